"""Finds which random draws of a model have the rows of the batch along dim 0, and tracks parts of tensors.

The model is run on two rows and on three rows. If a draw grows with the rows, each row has its own numbers. Any other
draw is shared by the whole batch, and every rank and every micro-batch repeats it. The same holds for numbers from
Python's and numpy's generators, if a module draws as many for two rows as for three. Draws that cannot be keyed are
recorded with their module.

An `extent` is the part of a logical tensor that a forward pass works on. A strategy that gives a rank a part of the
positions, heads or features puts an extent around the code that works on the part. Dropout then draws only the part of
the whole tensor's mask. Kinds of extents, and their dims:

    sequence   positions:  dim 1 of (B, T, D), dim 2 of (B, H, T, S)
    head       heads:      dim 1 of (B, H, T, S)
    feature    features:   dim 2 of (B, T, D)

Extents are kept in a context variable, so they belong to a thread. Autograd may recompute in its own threads, which
have no extents. There `restored` sets the extents that `present` has returned in the forward pass.
"""

from __future__ import annotations

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
"""The place of a draw: (module path, call of the module, draw within the call), as keyed_dropout.py counts them."""


@dataclass(frozen=True)
class DrawPlan:
    """The random draws of a model. shared: draws that the whole batch shares.

    unkeyed: draws that are not keyed, with their modules. hosts: the names of modules whose draws from Python's or
    numpy's generators are shared by the whole batch.
    """

    shared: frozenset[Place] = frozenset()
    unkeyed: tuple[str, ...] = ()
    hosts: frozenset[str] = frozenset()


@dataclass
class DrawTrace:
    """The random draws of one forward pass. lengths: place of a keyed draw -> its dim 0, or 0 for a scalar.

    unkeyed: the draws that are not keyed. hosts: (generator of Python or numpy, module) -> states of the generator, one
    after each part of the module that drew from it.
    """

    lengths: dict[Place, int] = field(default_factory=dict)
    unkeyed: dict[str, None] = field(default_factory=dict)
    hosts: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    replacing: bool = False

    def note(self, what: str, module: str) -> None:
        """Record a draw that is not keyed. what: the generator or function that draws."""
        self.unkeyed[f"{what} in {module or 'the model'}"] = None

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Do not record draws inside this context, because keyed numbers replace them."""
        self.replacing = True
        try:
            yield
        finally:
            self.replacing = False


def plan_of(two: DrawTrace, three: DrawTrace) -> DrawPlan:
    """Return the plan that follows from the traces of passes with two rows and with three rows."""
    shared = {place for place, length in two.lengths.items() if three.lengths.get(place) == length}
    uneven = [
        f"{what} in {module or 'the model'}"
        for what, module in two.hosts.keys() | three.hosts.keys()
        if two.hosts.get((what, module)) != three.hosts.get((what, module))
    ]
    hosts = () if uneven else {module for _, module in two.hosts}
    return DrawPlan(frozenset(shared), (*two.unkeyed, *sorted(uneven)), frozenset(hosts))


class Elsewhere(WatchingMode):
    """A mode that records in `trace` all of torch's draws that keyed numbers do not replace, except dropout.

    where: returns the name of the module that is being called.
    """

    def __init__(self, trace: DrawTrace, where: Callable[[], str]) -> None:
        super().__init__()
        self._trace, self._where = trace, where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        draws = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name and "dropout" not in name
        if draws and not self._trace.replacing:
            own = (kwargs or {}).get("generator") is not None
            self._trace.note("the model's own generator" if own else f"torch's {name}", self._where())
        return func(*args, **(kwargs or {}))


KINDS = ("sequence", "head", "feature")

Present = Mapping[str, tuple[tuple[Runs, int], ...]]
"""kind -> (runs, total) of all nested parts, innermost last. Each part is relative to the next outer part."""

_present: ContextVar[Present] = ContextVar("extents", default=MappingProxyType({}))


@contextmanager
def extent(kind: str, start: int | Runs, total: int) -> Iterator[None]:
    """Declare that tensors inside this context hold only a part of `total` elements along `kind`.

    start: the element at which the part begins, or the runs of elements that the part holds, in order. Nested parts of
    one kind compose: a part of a part begins at the sum of both starts.
    Raises TrainingError for an unknown kind, or for a part that begins outside the whole.
    """
    runs = ((start, total),) if isinstance(start, int) else start
    if kind not in KINDS or not runs or not all(0 <= first <= last <= total for first, last in runs):
        raise TrainingError(
            f"nbkit does not know the kind of dim {kind}."
            if kind not in KINDS
            else f"The part lies outside of the {kind}.",
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
    """Disable the innermost `extent` of `kind` inside this context, where its parts have been gathered."""
    now = _present.get()
    token = _present.set({**now, kind: now.get(kind, ())[:-1]})
    try:
        yield
    finally:
        _present.reset(token)


def extent_of(kind: str) -> tuple[int, int] | None:
    """Return (start, total) of the innermost `extent` of `kind`; None without one."""
    parts = _present.get().get(kind)
    return (parts[-1][0][0][0], parts[-1][1]) if parts else None


def place_of(kind: str) -> tuple[int, int] | None:
    """Return (start, total) of the part that tensors hold here along `kind`, within the whole of all ranks.

    Returns None if they hold the whole. If they hold several runs, `start` is that of the first run: see `runs_of`.
    """
    if not (parts := _present.get().get(kind)):
        return None
    first = runs_of(kind, 1)
    return first[0][0] if first else parts[0][1], parts[0][1]


def runs_of(kind: str, num: int) -> Runs:
    """Return the runs of elements that a tensor of length `num` along `kind` holds, within the whole of all ranks.

    The runs have fewer than `num` elements if the tensor is longer than the part.
    """
    found: Runs = ((0, num),)
    for runs, _ in reversed(_present.get().get(kind, ())):
        found = tuple(run for start, stop in found for run in _within(runs, start, stop))
    return found


def _within(runs: Runs, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield elements start to stop - 1 of a part, as runs in the whole. runs: the runs of the part in the whole."""
    for first, last in runs:
        low, high = max(start, 0), min(stop, last - first)
        if low < high:
            yield first + low, first + high
        start, stop = start - (last - first), stop - (last - first)


def present() -> Present:
    """Return all extents of this thread, to pass to `restored` in another thread."""
    return _present.get()


@contextmanager
def restored(extents: Present) -> Iterator[None]:
    """Use the extents that `present` returned, inside this context."""
    token = _present.set(extents)
    try:
        yield
    finally:
        _present.reset(token)
