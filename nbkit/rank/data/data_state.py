"""Where reading stands by the data's own state_dict(): reading goes on there, and nothing before it is read again.

As in torchdata's loaders, the data may have state_dict() and load_state_dict(), or the iterator that it gives, or both.
A state need not be faithful: that of a shuffle buffer may leave out what lies in the buffer. So a StreamPosition holds
a checksum of samples that have followed it, and whoever goes on from it compares them.

The feed of a job: the little that it has to know of where its batches come from; without a Trainer nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from nbkit.rank.data.batch import fingerprint
from nbkit.rank.rng.seeding import Drawn
from nbkit.strategy import Strategy

READ_AGAIN = "the data is read again up to sample {offset:,} of epoch {epoch}, and passed over: {why}"
"""What is said where no state leads there."""
NO_STATE = "it has no state_dict() and load_state_dict() of its own"
COMPARED = 2  # samples


@dataclass(frozen=True)
class StreamPosition:
    """Behind `index` samples. shard: the one that was read. data, iterator: their states.

    drawn: the generators of torch, Python and numpy there; None where nothing had been drawn from them.
    first, checks: the number of a sample behind it, and a checksum of each from that one on.
    """

    index: int
    shard: int
    data: Any
    iterator: Any
    drawn: Any = None
    first: int = 0
    checks: tuple[int, ...] = ()


def has_state(thing: Any) -> bool:
    """Return True if it says where it stands, and can be told."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


@dataclass(frozen=True)
class Opened:
    """Data that is being read, and its iterator."""

    data: Any
    samples: Iterator[Any]

    @classmethod
    def at(cls, data: Any, mark: StreamPosition | None) -> Opened:
        """`data` from its beginning, or from the mark on."""
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
        """(of the data, of the iterator); None of what has none."""
        own = self.data.state_dict() if self.samples is not self.data and has_state(self.data) else None
        return own, self.samples.state_dict() if has_state(self.samples) else None  # type: ignore[attr-defined]


def draws_now() -> tuple[Any, Any, Any]:
    """Where the generators of torch, Python and numpy stand."""
    here = Drawn.so_far()
    return torch.get_rng_state(), here.python, here.numpy


def same_draws(some: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> bool:
    """Return True if nothing was drawn between them."""
    numpy = [[part.tolist() if hasattr(part, "tolist") else part for part in one[2] or ()] for one in (some, other)]
    return torch.equal(some[0], other[0]) and some[1] == other[1] and (numpy[0] == numpy[1] or some[2] is None)


def draw_from(drawn: tuple[Any, Any, Any]) -> None:
    """Have the generators stand there."""
    state, python, numpy = drawn
    torch.set_rng_state(state)
    if numpy is not None:
        numpy = tuple(part.numpy() if isinstance(part, torch.Tensor) else part for part in numpy)
    Drawn(python, numpy).restore()


def checksum(collate: Callable[[list[Any]], Any], sample: Any) -> int:
    """Of one sample; 0 where it cannot be collated, which is said where it is trained on."""
    with suppress(Exception):
        return fingerprint(collate([sample]), 1)
    return 0


def written(mark: StreamPosition) -> dict[str, Any]:
    """`mark` as a checkpoint holds it."""
    return dict(vars(mark))


def read(values: Any) -> StreamPosition | None:
    """Return what was `written`; None for what was not."""
    try:
        mark = StreamPosition(**{**values, "checks": tuple(values["checks"])})
    except (TypeError, KeyError):
        return None
    return mark if all(type(number) is int for number in (mark.index, mark.shard, mark.first, *mark.checks)) else None


@dataclass(frozen=True)
class DataHooks:
    """position, go_to: where in the data it stands, carried when ranks become one again. fits: refuses a strategy that
    cannot cut the batch, and returns the arithmetic of one that can. recut: the strategy has changed.
    remakes: who makes the steps asks `proof.settled` in each, and can make one again. after: finished steps -> where a
    training stands in the data that has made them all on it; None where nobody knows. where: see
    Stream.where; collective."""

    position: Callable[[], Any] = lambda: None
    go_to: Callable[[Any], None] = lambda position: None
    fits: Callable[[Strategy], Any] = lambda strategy: None
    recut: Callable[[], None] = lambda: None
    remakes: bool = False
    after: Callable[[int], Any] = lambda step: None
    where: Callable[[], Any] = lambda: None
