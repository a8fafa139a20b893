"""sync_every=8: each replica makes 8 steps alone, then the weights are averaged. This sends an eighth of the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from nbkit.errors import StrategyError
from nbkit.techniques.exchange import GradientExchange
from nbkit.techniques.key import AnyStrategy, GradientKey
from nbkit.techniques.registry import key_of, spelled


class SyncEveryKey(GradientKey):
    """The number of steps between two averages. The default is 1."""

    name = "sync_every"
    neutral = 1
    same = "ranks sum their gradients in every step"
    suggestions: ClassVar[Sequence[int]] = (8,)
    engine = "nbkit.rank.parallel.data_parallel.sync_every:apply"

    def parse(self, text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < 1:
            raise StrategyError(
                f"{'sync_every=' + text!r} is not a number of steps.",
                numbers="steps that each replica makes by itself: a whole number >= 1",
                hint="sync_every=8",
            )
        return int(text)

    def refuse_others(self, value: int, strategy: AnyStrategy) -> None:
        given = {name: v for name, v in strategy.settings.items() if isinstance(key_of(name), GradientKey)}
        others = {name: v for name, v in given.items() if name != self.name}
        if others:
            raise StrategyError(
                "With sync_every=, ranks do not send gradients, so the other key has no effect.",
                numbers=spelled(given),
                hint=f"{self.word(value)}, or {spelled(others)}",
            )

    def deviation(self, value: int) -> tuple[str, str]:
        return (
            f"sync_every={value}: replicas train apart, and losses are not those of one process.",
            f"weights are averaged every {value} steps, before an evaluation and at the end of fit; the "
            "optimizer's state stays each rank's own until a switch or a checkpoint averages it",
        )

    def exchange(self, value: int, exchange: GradientExchange, strategy: AnyStrategy) -> GradientExchange:
        # With Adam and similar optimizers, a rank keeps the weights of the last average, and their momentum. Both are
        # counted for every optimizer.
        return replace(exchange, every=value, kept=exchange.kept + 2.0)
