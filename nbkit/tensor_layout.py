"""Layouts: the part of a tensor that a rank holds, in whole numbers. Plans and pictures use them too, without torch.

A rank's tensor consists of pieces. Each piece is a box of the local tensor that equals a box of the global one. Most
layouts have one piece. A packed projection (query, key and value in one matrix) that is split over ranks has a piece
for each packed part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod


def bounds(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return (first, one past the last) of `total` things for part `index`. The first total % parts hold one more."""
    each, extra = divmod(total, parts)
    start = index * each + min(index, extra)
    return start, start + each + (index < extra)


Runs = tuple[tuple[int, int], ...]
"""Runs of consecutive things, as (first, one past the last). A part may have several, in ascending order."""

Parting = Callable[[int, int, int], Runs]
"""A function (total, parts, index) -> what part `index` holds. Each part gets as many things as from `bounds`."""


def count(runs: Runs) -> int:
    """Return the number of things in `runs`."""
    return sum(stop - start for start, stop in runs)


def runs_of(things: Sequence[int]) -> Runs:
    """Return `things`, which are in ascending order, as runs."""
    found: list[tuple[int, int]] = []
    for thing in things:
        joins = bool(found) and found[-1][1] == thing
        found.append((found.pop()[0] if joins else thing, thing + 1))
    return tuple(found)


def contiguous(total: int, parts: int, index: int) -> Runs:
    """Return what `bounds` gives the part, as one run."""
    return (bounds(total, parts, index),)


def head_and_tail(total: int, parts: int, index: int) -> Runs:
    """Return a run counted from the head and one counted from the tail, each half of what `bounds` gives the part.

    The parts then cost the same if the thing at i costs i + 1, like a query that looks at all positions up to its own.
    They cost exactly the same if 2 * parts divides `total`.
    """
    lengths = [stop - start for start, stop in (bounds(total, parts, i) for i in range(index + 1))]
    heads = [(length + 1) // 2 for length in lengths]
    head, tail = sum(heads[:index]), total - sum(lengths) + sum(heads)
    runs = (head, head + heads[index]), (tail, tail + lengths[index] - heads[index])
    return tuple(run for run in runs if run[0] < run[1])


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: where it starts and how long it is, along each dim."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements in the box."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects the box in a tensor."""
        return tuple(slice(at, at + length) for at, length in zip(self.start, self.shape, strict=True))

    def meet(self, other: Box) -> Box | None:
        """Return the box that both cover, or None if they do not overlap."""
        start = tuple(map(max, self.start, other.start))
        stop = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        shape = tuple(end - at for at, end in zip(start, stop, strict=True))
        return None if any(length <= 0 for length in shape) else Box(start, shape)

    def moved(self, origin: Sequence[int], target: Sequence[int]) -> Box:
        """Return the box moved so that the point `origin` goes to `target`."""
        return Box(tuple(at - o + t for at, o, t in zip(self.start, origin, target, strict=True)), self.shape)


@dataclass(frozen=True)
class Layout:
    """The part of a tensor that a rank holds. shape: global. local: the rank's shape. pieces: (local, global) boxes."""

    shape: tuple[int, ...]
    local: tuple[int, ...]
    pieces: tuple[tuple[Box, Box], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Layout:
        """Return the layout of a rank that holds the whole tensor."""
        box = Box((0,) * len(shape), tuple(shape))
        return cls(tuple(shape), tuple(shape), ((box, box),) if box.numel else ())

    @classmethod
    def of_ranges(cls, shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> Layout:
        """Return the layout that holds these global ranges along `dim`, one after the other."""
        pieces, at = [], 0
        for start, stop in ranges:
            length = stop - start
            size = tuple(length if d == dim else n for d, n in enumerate(shape))
            here = tuple(at if d == dim else 0 for d in range(len(shape)))
            there = tuple(start if d == dim else 0 for d in range(len(shape)))
            if prod(size):
                pieces.append((Box(here, size), Box(there, size)))
            at += length
        local = tuple(at if d == dim else n for d, n in enumerate(shape))
        return cls(tuple(shape), local, tuple(pieces))

    @property
    def numel(self) -> int:
        """Return the number of elements that the rank holds."""
        return prod(self.local)

    @property
    def is_whole(self) -> bool:
        """Return True if the rank holds the whole tensor, unchanged."""
        return self == Layout.whole(self.shape)

    def cut(self, dim: int, start: int, stop: int) -> Layout:
        """Return the layout of only start..stop of the local tensor along `dim`."""
        local = tuple(stop - start if d == dim else n for d, n in enumerate(self.local))
        window = Box(tuple(start if d == dim else 0 for d in range(len(self.local))), local)
        pieces = []
        for here, there in self.pieces:
            if (kept := here.meet(window)) is not None:
                pieces.append((kept.moved(window.start, (0,) * len(local)), kept.moved(here.start, there.start)))
        return Layout(self.shape, local, tuple(pieces))

    def cut_runs(self, dim: int, runs: Runs) -> Layout:
        """Return the layout of several runs of the local tensor along `dim`, one behind the other."""
        parts, pieces, at = [self.cut(dim, *run) for run in runs] or [self.cut(dim, 0, 0)], [], 0
        for part in parts:
            shift = tuple(at if d == dim else 0 for d in range(len(self.local)))
            pieces += [(here.moved((0,) * len(shift), shift), there) for here, there in part.pieces]
            at += part.local[dim]
        return Layout(self.shape, (*self.local[:dim], at, *self.local[dim + 1 :]), tuple(pieces))

    def part(self, dim: int, parts: int, index: int) -> Layout:
        """Return the layout of part `index` of `parts` nearly equal parts of the local tensor along `dim`."""
        return self.cut(dim, *bounds(self.local[dim], parts, index))
