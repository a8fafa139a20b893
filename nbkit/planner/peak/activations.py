"""Bytes that computing takes beside parameters, gradients and optimizer state, piece by piece of a model.

A piece is what a pipeline can hold alone: a block, with what comes before the first one or behind the last one. What
its forward and its backward hold at every moment is linear in the rows that they compute, so two runs tell it for any
number of rows. See nbkit/rank/train/estimate/model_trace/trace.py, which measures pieces, and gpt_pieces.py, which
computes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """Bytes: `fixed`, and `row` more for each row."""

    fixed: float = 0.0
    row: float = 0.0

    def at(self, rows: float) -> float:
        """For so many rows."""
        return self.fixed + self.row * rows

    def __sub__(self, other: Line) -> Line:
        return Line(self.fixed - other.fixed, self.row - other.row)

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float]) -> Line:
        """Through two (rows, bytes)."""
        row = (second[1] - first[1]) / (second[0] - first[0])
        return cls(first[1] - row * first[0], row)


Peak = tuple[Line, ...]
"""The most of several moments, each of which is a line."""


def most(peak: Peak, rows: float) -> float:
    """Bytes at the highest moment."""
    return max((line.at(rows) for line in peak), default=0.0)


def upper(lines: Iterable[Line]) -> Peak:
    """Those of `lines` that are the highest for some number of rows >= 0."""
    found: list[Line] = []
    for line in sorted(set(lines), key=lambda line: (line.row, line.fixed)):
        while found and found[-1].fixed <= line.fixed:
            found.pop()
        # The middle one of three is never the highest where the outer two cross above it.
        while len(found) > 1 and _cross(found[-2], line) <= _cross(found[-2], found[-1]):
            found.pop()
        found.append(line)
    return tuple(found)


def _cross(low: Line, high: Line) -> float:
    """The rows from which on `high` is higher."""
    return (low.fixed - high.fixed) / (high.row - low.row)


@dataclass(frozen=True)
class Piece:
    """One piece, with all its parameters there. Everything is counted above what there was when its forward began.

    forward, backward: at their highest moments; backward includes what is kept, and the gradients that it makes.
    kept: from the end of its forward to its backward, with what it hands on. carried: what it hands on alone.
    deferred: gradients behind each of its layers, which a split backward keeps for those of the weights.
    """

    forward: Peak
    kept: Line
    backward: Peak
    carried: Line
    deferred: Line = Line()


@dataclass(frozen=True)
class Updating:
    """Bytes that an optimizer's step takes for a moment, per byte of the largest parameter and per byte of all."""

    largest: float = 2.0
    all: float = 0.0
