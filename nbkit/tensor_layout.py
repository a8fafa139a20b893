"""Layouts: the part of a tensor that a rank holds, in whole numbers. No torch: plans and pictures use them too.

A rank's tensor is made of pieces, each a box of the local tensor that is a box of the global one. Mostly one piece;
a packed projection split over ranks (query, key and value in one matrix) has one for each of the packed parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod


def bounds(total: int, parts: int, index: int) -> tuple[int, int]:
    """First and one past the last of `total` things that part `index` holds; the first total % parts hold one more."""
    each, extra = divmod(total, parts)
    start = index * each + min(index, extra)
    return start, start + each + (index < extra)


Runs = tuple[tuple[int, int], ...]
"""(first, one past the last) of things that follow each other; a part may have several, in ascending order."""

Parting = Callable[[int, int, int], Runs]
"""(total, parts, index) -> what part `index` holds. Every one gives each part as many things as `bounds` does."""


def count(runs: Runs) -> int:
    """Return how many things they are."""
    return sum(stop - start for start, stop in runs)


def contiguous(total: int, parts: int, index: int) -> Runs:
    """As `bounds`: one run."""
    return (bounds(total, parts, index),)


def head_and_tail(total: int, parts: int, index: int) -> Runs:
    """A run counted from the head and one counted from the tail, each half of what `bounds` gives the part.

    Where a thing at i costs i + 1, as a query does that looks at all before it and itself, the parts cost the same:
    to the last one if 2 * parts divides `total`.
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
        """Elements in it."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes it out of a tensor."""
        return tuple(slice(at, at + length) for at, length in zip(self.start, self.shape, strict=True))

    def meet(self, other: Box) -> Box | None:
        """Return what both cover, None when that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        shape = tuple(end - at for at, end in zip(start, stop, strict=True))
        return None if any(length <= 0 for length in shape) else Box(start, shape)

    def moved(self, origin: Sequence[int], target: Sequence[int]) -> Box:
        """The same box when what was at `origin` is at `target`."""
        return Box(tuple(at - o + t for at, o, t in zip(self.start, origin, target, strict=True)), self.shape)


@dataclass(frozen=True)
class Layout:
    """What a rank holds of one tensor. shape: the global one; local: this rank's; pieces: (in local, in global)."""

    shape: tuple[int, ...]
    local: tuple[int, ...]
    pieces: tuple[tuple[Box, Box], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Layout:
        """Return all of it."""
        box = Box((0,) * len(shape), tuple(shape))
        return cls(tuple(shape), tuple(shape), ((box, box),) if box.numel else ())

    @classmethod
    def of_ranges(cls, shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> Layout:
        """These global ranges along `dim`, one behind the other."""
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
        """Elements that the rank holds."""
        return prod(self.local)

    @property
    def is_whole(self) -> bool:
        """Return True if the rank holds the tensor as it is."""
        return self == Layout.whole(self.shape)

    def cut(self, dim: int, start: int, stop: int) -> Layout:
        """Of the local tensor only start..stop along `dim`."""
        local = tuple(stop - start if d == dim else n for d, n in enumerate(self.local))
        window = Box(tuple(start if d == dim else 0 for d in range(len(self.local))), local)
        pieces = []
        for here, there in self.pieces:
            if (kept := here.meet(window)) is not None:
                pieces.append((kept.moved(window.start, (0,) * len(local)), kept.moved(here.start, there.start)))
        return Layout(self.shape, local, tuple(pieces))

    def part(self, dim: int, parts: int, index: int) -> Layout:
        """Part `index` of `parts` nearly equal ones of the local tensor along `dim`."""
        return self.cut(dim, *bounds(self.local[dim], parts, index))
