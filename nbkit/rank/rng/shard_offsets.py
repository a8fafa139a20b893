"""The part of a logical tensor that a forward pass works on, for whoever draws or masks inside it.

A strategy that gives a rank a part of the positions, heads or features says so around the code that works on the
part; dropout then draws the slice of the mask that the whole tensor would have got. Kinds, and where they lie:

    sequence   positions:  dim 1 of (B, T, D), dim 2 of (B, H, T, S)
    head       heads:      dim 1 of (B, H, T, S)
    feature    features:   dim 2 of (B, T, D)

It costs a context variable, hence belongs to a thread. Autograd recomputes in threads of its own: `present` there is
empty, and `restored(present())`, taken in the forward pass, brings it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

from nbkit.errors import TrainingError

KINDS = ("sequence", "head", "feature")

Present = Mapping[str, tuple[tuple[int, int], ...]]
"""kind -> (start, total) of every nested part, the innermost last; each counts in what is outside of it."""

_present: ContextVar[Present] = ContextVar("extents", default=MappingProxyType({}))


@contextmanager
def extent(kind: str, start: int, total: int) -> Iterator[None]:
    """Inside, tensors begin at element `start` of the `total` elements that they had along `kind` outside.

    Nested parts of one kind compose: a part of a part lies at the sum of both starts.
    Raises TrainingError for an unknown kind and for a part that begins outside of the whole.
    """
    if kind not in KINDS or not 0 <= start <= total:
        raise TrainingError(
            f"No extent of a {kind}." if kind not in KINDS else f"A part of a {kind} lies outside of it.",
            numbers=f"start {start} of {total}",
            hint=f"kinds: {', '.join(KINDS)}; 0 <= start <= total",
        )
    now = _present.get()
    token = _present.set({**now, kind: (*now.get(kind, ()), (start, total))})
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
    return parts[-1] if parts else None


def place_of(kind: str) -> tuple[int, int] | None:
    """(start, total) of what tensors hold along `kind` here, in the whole of all ranks; None when they hold all."""
    parts = _present.get().get(kind)
    return (sum(start for start, _ in parts), parts[0][1]) if parts else None


def present() -> Present:
    """All extents of this thread, to be `restored` in another one."""
    return _present.get()


@contextmanager
def restored(extents: Present) -> Iterator[None]:
    """Inside, the extents are those that `present` gave."""
    token = _present.set(extents)
    try:
        yield
    finally:
        _present.reset(token)
