"""The base classes of keys: what a key has to define, and what it can leave out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from nbkit.errors import StrategyError
from nbkit.mesh import Mesh
from nbkit.techniques.exchange import GradientExchange
from nbkit.techniques.registry import key_of, names, spelled


class AnyStrategy(Protocol):
    """The part of a strategy that its keys can use; see nbkit.strategy.Strategy."""

    def degree(self, axis: str) -> int:
        """Return the number of ranks along `axis`: "dp", "tp", "pp" or "cp"."""

    @property
    def mesh(self) -> Mesh:
        """Return the grid of ranks; `mesh.size` is their number."""

    @property
    def zero(self) -> int:
        """Return the ZeRO stage of the data axis, 0 to 3."""

    @property
    def shard(self) -> int:
        """Return the number of ranks of a sharding group. Without hsdp it is dp."""

    @property
    def ep(self) -> int:
        """Return the number of ranks that share the experts of a layer; 1 if each holds all."""

    @property
    def schedule(self) -> str | None:
        """Return the name of the pipeline schedule, None without a pipeline."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return the values of the keys that change something, by name."""


class Key:
    """A key of a strategy: how its value is written, with what it can be combined, and what it costs.

    name: the word before the `=`. neutral: the value that changes nothing; the key has it if it is not given. same: why
    the neutral value has no effect if it is given. suggestions: values that the planner tries if a step waits for its
    link. engine: the torch half of a GradientKey: a function, or its place as "package.module:function"; None if there
    is none. See `ReplicaSetup` in nbkit/rank/parallel/data_parallel/ddp.py.
    """

    name: ClassVar[str]
    neutral: ClassVar[Any] = None
    same: ClassVar[str] = "it is the default"
    suggestions: ClassVar[Sequence[Any]] = ()
    engine: ClassVar[Callable[..., Any] | str | None] = None
    is_field: ClassVar[bool] = False
    """True if Strategy has a field of this name, because the planner and the ranks read the value in many places."""
    rehearsed: ClassVar[bool] = False
    """True if the step that tests a strategy before the training uses this key."""

    def parse(self, text: str) -> Any:
        """Return the value that `text` means. It must be hashable. Raises StrategyError for an invalid text."""
        raise NotImplementedError

    def spell(self, value: Any) -> str:
        """Return the text from which `parse` makes `value`."""
        return str(value)

    def word(self, value: Any) -> str:
        """Return the word of a strategy with this value: "bucket=4M"."""
        return f"{self.name}={self.spell(value)}"

    def refuse(self, value: Any, strategy: AnyStrategy) -> None:
        """Raise StrategyError if `value` cannot be part of `strategy`. It is not called for the neutral value."""

    def no_effect(self, value: Any, strategy: AnyStrategy) -> str:
        """Return why `value` changes nothing in `strategy`; "" if it changes something.

        The result ends the sentence "order=dp has no effect because dp is 1". It is not called for the neutral value.
        """
        return ""

    def settle(self, value: Any, strategy: AnyStrategy) -> Any:
        """Return the value to use instead of `value`. A key that is a field may also replace the neutral value."""
        return value

    def deviation(self, value: Any) -> tuple[str, str] | None:
        """Return how a training differs from one in a single process, and by how much; None if it does not differ."""
        return None

    def exchange(self, value: Any, exchange: GradientExchange, strategy: AnyStrategy) -> GradientExchange:
        """Return how gradients are exchanged with `value`. exchange: how they are exchanged without it."""
        return exchange


class GradientKey(Key):
    """A key about the messages between data parallel ranks. It is refused if there is only one such rank.

    needs_whole: True if ranks must hold the whole model and its whole gradients in each step. This is so for a key with
    a torch half. A strategy can have at most one of these.
    """

    needs_whole: ClassVar[bool] = True

    def refuse(self, value: Any, strategy: AnyStrategy) -> None:
        dp, size = strategy.degree("dp"), strategy.mesh.size
        if dp == 1:
            given = spelled({name: v for name, v in strategy.settings.items() if isinstance(key_of(name), GradientKey)})
            raise StrategyError(
                f"{given} needs two or more data parallel ranks, because it changes what they send each other.",
                numbers=f"dp 1 of {size} rank{'s' * (size != 1)}",
                hint=f"dp={max(size, 2)} {given}",
            )
        if not self.needs_whole:
            return
        if strategy.zero or dp < size or strategy.ep > 1:
            split = (
                f"zero={strategy.zero}"
                if strategy.zero
                else f"ep={strategy.ep}"
                if dp == size
                else f"dp {dp} of {size} ranks"
            )
            given = spelled({name: v for name, v in strategy.settings.items() if _needs_whole(name)})
            raise StrategyError(
                f"{given} is for ranks that hold the whole model and its whole gradients.",
                numbers=f"{split}: a rank holds only a part of them",
                hint=f"dp={size} {given}",
            )
        self.refuse_others(value, strategy)

    def refuse_others(self, value: Any, strategy: AnyStrategy) -> None:
        """Raise StrategyError if another key of the strategy also has a torch half."""
        before = [key_of(name) for name in names()[: names().index(self.name)] if name in strategy.settings]
        for other in before:
            if self.engine is not None and other.engine is not None:
                words = other.word(strategy.settings[other.name]), self.word(value)
                raise StrategyError(
                    "Each of two keys decides how gradients are sent.",
                    numbers=" ".join(words),
                    hint=f"{words[0]}, or {words[1]}",
                )


def _needs_whole(name: str) -> bool:
    key = key_of(name)
    return isinstance(key, GradientKey) and key.needs_whole


def whole_number(key: str, text: str, *, least: int = 1, what: str = "") -> int:
    """Return `text` as a whole number. Raises StrategyError if it is none, or less than `least`."""
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        what = what or f"a value of {key}"
        raise StrategyError(
            f"{key + '=' + text!r} is not {what}.",
            numbers=f"{what} is a whole number >= {least}",
            hint=f"{key}={max(least, 2)}",
        )
    return int(text)
