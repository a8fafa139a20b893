"""Strategies measured beside each other on the live job: from one state, on the same batches, in turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nbkit.errors import StrategyError, SwitchError
from nbkit.rank.comm import delegating_group
from nbkit.rank.comm.all_gather_objects import all_gather_objects
from nbkit.rank.telemetry.memory import bytes_held, reset_peak
from nbkit.rank.train.argument_checks import check_counts
from nbkit.rank.train.estimate.free_memory import trim
from nbkit.rank.train.estimate.pace import interval
from nbkit.rank.train.switch.switch import Switchable
from nbkit.rank.train.switch.trial import check_again, measure
from nbkit.strategy import Strategy

_MOST_TURNS = 4


def compare(
    job: Switchable, strategies: Sequence[str], steps: int, make_step: Callable[[], None], *, again: bool
) -> dict[str, Any]:
    """Measure each for so many steps, and the one in force with them, then go on as if nothing had been. Collective.

    Each takes its turn several times, from the same state on the same batches, so that a machine that gets slower does
    so for all; a first step of each turn is not counted. See try_out for make_step and again. Returns steps and, for
    each strategy: step_s, the median, between low_s and high_s with 95 %; memory_bytes, of the fullest rank at its
    peak, beyond what it held before; sent_bytes of a step, of the busiest rank; or the error that refused it.
    """
    check_counts(steps=steps)
    check_again(again)
    names = list(dict.fromkeys(str(job.parsed(text)) for text in (str(job.strategy), *strategies)))
    turns = max(1, min(_MOST_TURNS, steps // 4))
    found = {name: _Measured() for name in names}
    with job.ledger.clock.stopped():
        for turn in range(turns):
            for name in names if turn % 2 == 0 else reversed(names):
                if not found[name].error:
                    found[name].add(job, job.parsed(name), math.ceil(steps / turns), make_step)
        job.close_left_groups()
    rows = [{"strategy": name, **found[name].row(job)} for name in names]
    return {"steps": steps, "strategies": rows}


class _Measured:
    """Of one strategy on this rank; seconds are the same on all."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.error = ""
        self._peak = self._sent = self._counted = 0

    def add(self, job: Switchable, strategy: Strategy, steps: int, make_step: Callable[[], None]) -> None:
        trim(job.device)
        before = bytes_held(job.device)[0]
        reset_peak(job.device)
        try:
            _, seconds = measure(job, strategy, 1 + steps, make_step, later=self._counting())
        except (StrategyError, SwitchError) as error:  # on every rank alike
            self.error = f"{error.what} {error.numbers}".strip()
            return
        self.seconds += seconds[1:]
        self._counted += steps
        self._peak = max(self._peak, bytes_held(job.device)[1] - before)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        def listen(operation: str, group: str, num_bytes: int) -> None:
            self._sent += num_bytes * (operation != "recv")

        delegating_group.listeners.append(listen)
        try:
            yield
        finally:
            delegating_group.listeners.remove(listen)

    def row(self, job: Switchable) -> dict[str, Any]:
        """What is told of it. Collective."""
        if self.error:
            return {"error": self.error}
        own = self._peak, self._sent // self._counted
        everyone = all_gather_objects(own, world_size=job.world_size, device=job.device)
        low, high = interval(self.seconds)
        return {
            "step_s": statistics.median(self.seconds),
            "low_s": low,
            "high_s": high,
            "memory_bytes": max(peak for peak, _ in everyone),
            "sent_bytes": max(sent for _, sent in everyone),
            "error": "",
        }
