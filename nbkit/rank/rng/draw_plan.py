"""Which draws of a model have the rows of the batch along dim 0, found by running it on two rows and on three.

A draw that grows with the rows gives each row its own numbers; any other is one for the whole batch, which every rank
and every micro-batch repeats. What cannot be keyed is noted with the module it is in.

The part of a logical tensor that a forward pass works on, for whoever draws or masks inside it.

A strategy that gives a rank a part of the positions, heads or features says so around the code that works on the
part; dropout then draws the slice of the mask that the whole tensor would have got. Kinds, and where they lie:

    sequence   positions:  dim 1 of (B, T, D), dim 2 of (B, H, T, S)
    head       heads:      dim 1 of (B, H, T, S)
    feature    features:   dim 2 of (B, T, D)

It costs a context variable, hence belongs to a thread. Autograd recomputes in threads of its own: `present` there is
empty, and `restored(present())`, taken in the forward pass, brings it back.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from nbkit.errors import TrainingError
from nbkit.rank.watching_mode import WatchingMode
from nbkit.tensor_layout import Runs

Place = tuple[int, int, int]
"""Of a draw: (path of the module, call of the module, draw within the call), as keyed_dropout.py counts them."""


@dataclass(frozen=True)
class DrawPlan:
    """shared: draws that are one for the whole batch. unkeyed: what each rank draws by itself, and in which module."""

    shared: frozenset[Place] = frozenset()
    unkeyed: tuple[str, ...] = ()


@dataclass
class DrawTrace:
    """What one forward pass draws: dim 0 of each keyed draw, 0 where it has none; and what is drawn otherwise."""

    lengths: dict[Place, int] = field(default_factory=dict)
    unkeyed: dict[str, None] = field(default_factory=dict)
    replacing: bool = False

    def note(self, what: str, module: str) -> None:
        """Something that is not keyed was drawn from."""
        self.unkeyed[f"{what} in {module or 'the model'}"] = None

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Inside, what is drawn is replaced."""
        self.replacing = True
        try:
            yield
        finally:
            self.replacing = False


def plan_of(two: DrawTrace, three: DrawTrace) -> DrawPlan:
    """From passes of two rows and of three."""
    shared = {place for place, length in two.lengths.items() if three.lengths.get(place) == length}
    return DrawPlan(frozenset(shared), tuple(two.unkeyed))


class Elsewhere(WatchingMode):
    """Notes in a trace what torch draws and nothing replaces, dropout aside. where: the module that is being called."""

    def __init__(self, trace: DrawTrace, where: Callable[[], str]) -> None:
        super().__init__()
        self._trace, self._where = trace, where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        draws = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name and "dropout" not in name
        if draws and not self._trace.replacing:
            own = (kwargs or {}).get("generator") is not None
            self._trace.note("a generator of the model's" if own else f"torch's {name}", self._where())
        return func(*args, **(kwargs or {}))


class OtherGenerators:
    """Tells whether Python's generator or numpy's was drawn from since it was asked last."""

    def __init__(self) -> None:
        self._seen = self._now()

    def changed(self) -> list[str]:
        """The names of those that were."""
        before, self._seen = self._seen, self._now()
        return [name for name, state in self._seen.items() if before.get(name) != state]

    def _now(self) -> dict[str, Any]:
        found: dict[str, Any] = {"Python's random": random.getstate()}
        if (numpy := sys.modules.get("numpy")) is not None:
            kind, key, *rest = numpy.random.get_state()
            found["numpy.random"] = (kind, key.tobytes(), *rest)
        return found


KINDS = ("sequence", "head", "feature")

Present = Mapping[str, tuple[tuple[Runs, int], ...]]
"""kind -> (runs, total) of every nested part, the innermost last; each counts in what is outside of it."""

_present: ContextVar[Present] = ContextVar("extents", default=MappingProxyType({}))


@contextmanager
def extent(kind: str, start: int | Runs, total: int) -> Iterator[None]:
    """Inside, tensors begin at element `start` of the `total` elements that they had along `kind` outside.

    start: also the runs of those elements that they hold, one behind the other. Nested parts of one kind compose: a
    part of a part lies at the sum of both starts.
    Raises TrainingError for an unknown kind and for a part that begins outside of the whole.
    """
    runs = ((start, total),) if isinstance(start, int) else start
    if kind not in KINDS or not runs or not all(0 <= first <= last <= total for first, last in runs):
        raise TrainingError(
            f"No extent of a {kind}." if kind not in KINDS else f"A part of a {kind} lies outside of it.",
            numbers=f"start {start} of {total}",
            hint=f"kinds: {', '.join(KINDS)}; 0 <= start <= total",
        )
    now = _present.get()
    token = _present.set({**now, kind: (*now.get(kind, ()), (runs, total))})
    try:
        yield
    finally:
        _present.reset(token)


@contextmanager
def gathered(kind: str) -> Iterator[None]:
    """Inside, tensors are as long along `kind` as outside of the innermost `extent`, which gathered its parts."""
    now = _present.get()
    token = _present.set({**now, kind: now.get(kind, ())[:-1]})
    try:
        yield
    finally:
        _present.reset(token)


def extent_of(kind: str) -> tuple[int, int] | None:
    """(start, total) of the innermost part along `kind`, as `extent` was given them; None outside of all parts."""
    parts = _present.get().get(kind)
    return (parts[-1][0][0][0], parts[-1][1]) if parts else None


def place_of(kind: str) -> tuple[int, int] | None:
    """(start, total) of what tensors hold along `kind` here, in the whole of all ranks; None when they hold all.

    Where they hold several runs, the first of these begins there: see `runs_of`.
    """
    if not (parts := _present.get().get(kind)):
        return None
    first = runs_of(kind, 1)
    return first[0][0] if first else parts[0][1], parts[0][1]


def runs_of(kind: str, num: int) -> Runs:
    """The runs of elements, in the whole of all ranks, that a tensor `num` long along `kind` holds here.

    They are fewer than `num` elements where it reaches beyond what it is a part of.
    """
    found: Runs = ((0, num),)
    for runs, _ in reversed(_present.get().get(kind, ())):
        found = tuple(run for start, stop in found for run in _within(runs, start, stop))
    return found


def _within(runs: Runs, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Elements `start` to `stop` of what `runs` hold, as runs of what they are of."""
    for first, last in runs:
        low, high = max(start, 0), min(stop, last - first)
        if low < high:
            yield first + low, first + high
        start, stop = start - (last - first), stop - (last - first)


def present() -> Present:
    """Return all extents of this thread, to be `restored` in another one."""
    return _present.get()


@contextmanager
def restored(extents: Present) -> Iterator[None]:
    """Inside, the extents are those that `present` gave."""
    token = _present.set(extents)
    try:
        yield
    finally:
        _present.reset(token)
