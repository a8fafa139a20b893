"""Positions in the data by the data's own state_dict(), from which reading continues without reading anything again.

As in torchdata's loaders, the data may have state_dict() and load_state_dict(), or its iterator may, or both. A state
may be incomplete. For example, the state of a shuffle buffer may lack the samples in the buffer. So a StreamPosition
holds checksums of the samples that followed it, and a reader that continues from it compares them.

With `DataHooks` a job controls the source of its batches. Without a Trainer they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from nbkit.rank.data.batch import fingerprint
from nbkit.rank.rng.host_generators import Drawn
from nbkit.strategy import Strategy

READ_AGAIN = "the data is read again up to sample {offset:,} of epoch {epoch}, and these samples are skipped: {why}"
"""The warning if no state leads to the position."""
NO_STATE = "the data has no state_dict() and load_state_dict()"
COMPARED = 2  # the number of samples whose checksums are compared


@dataclass(frozen=True)
class StreamPosition:
    """The position after `index` samples. shard: the current shard. data, iterator: the states of both, or None.

    drawn: the states of the generators of torch, Python and numpy at the position; None if nothing was drawn before.
    first, checks: the number of a later sample, and the checksums of the samples from there on.
    """

    index: int
    shard: int
    data: Any
    iterator: Any
    drawn: Any = None
    first: int = 0
    checks: tuple[int, ...] = ()


def has_state(thing: Any) -> bool:
    """Return True if `thing` has both state_dict() and load_state_dict()."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


@dataclass(frozen=True)
class Opened:
    """Data that is being read, and its iterator."""

    data: Any
    samples: Iterator[Any]

    @classmethod
    def at(cls, data: Any, mark: StreamPosition | None) -> Opened:
        """Open `data` at its beginning, or at `mark`."""
        if mark is not None and mark.data is not None:
            data.load_state_dict(mark.data)
        samples = iter(data)
        if mark is not None and mark.iterator is not None:
            samples.load_state_dict(mark.iterator)  # type: ignore[attr-defined]
        return cls(data, samples)

    @property
    def has_state(self) -> bool:
        return has_state(self.data) or has_state(self.samples)

    def states(self) -> tuple[Any, Any]:
        """Return (state of the data, state of the iterator), with None for one that has no state."""
        own = self.data.state_dict() if self.samples is not self.data and has_state(self.data) else None
        return own, self.samples.state_dict() if has_state(self.samples) else None  # type: ignore[attr-defined]


def draws_now() -> tuple[Any, Any, Any]:
    """Return the current states of the generators of torch, Python and numpy."""
    here = Drawn.so_far()
    return torch.get_rng_state(), here.python, here.numpy


def same_draws(some: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> bool:
    """Return True if the two states are equal, so that nothing was drawn in between."""
    numpy = [[part.tolist() if hasattr(part, "tolist") else part for part in one[2] or ()] for one in (some, other)]
    return torch.equal(some[0], other[0]) and some[1] == other[1] and (numpy[0] == numpy[1] or some[2] is None)


def draw_from(drawn: tuple[Any, Any, Any]) -> None:
    """Set the generators to these states."""
    state, python, numpy = drawn
    torch.set_rng_state(state)
    if numpy is not None:
        numpy = tuple(part.numpy() if isinstance(part, torch.Tensor) else part for part in numpy)
    Drawn(python, numpy).restore()


def checksum(collate: Callable[[list[Any]], Any], sample: Any) -> int:
    """Return the checksum of one sample; 0 if it cannot be collated, which training on it will report."""
    with suppress(Exception):
        return fingerprint(collate([sample]), 1)
    return 0


def written(mark: StreamPosition) -> dict[str, Any]:
    """Return `mark` in the form that a checkpoint holds."""
    return dict(vars(mark))


def read(values: Any) -> StreamPosition | None:
    """Return the position from the result of `written`; None if `values` is no such result."""
    try:
        mark = StreamPosition(**{**values, "checks": tuple(values["checks"])})
    except (TypeError, KeyError):
        return None
    return mark if all(type(number) is int for number in (mark.index, mark.shard, mark.first, *mark.checks)) else None


@dataclass(frozen=True)
class DataHooks:
    """Functions that a job calls to control the source of its batches.

    position, go_to: return and set the position in the data.
    fits: raises for a strategy that cannot cut the batch; else returns how it is cut (see BatchSplit).
    recut: called after the strategy has changed.
    remakes: True if the code that makes steps calls `proof.settled` in each step, and can make a step again.
    after: number of finished steps -> position, for a training that made all its steps on this data; None if unknown.
    where: see Stream.where; collective.
    """

    position: Callable[[], Any] = lambda: None
    go_to: Callable[[Any], None] = lambda position: None
    fits: Callable[[Strategy], Any] = lambda strategy: None
    recut: Callable[[], None] = lambda: None
    remakes: bool = False
    after: Callable[[int], Any] = lambda step: None
    where: Callable[[], Any] = lambda: None
