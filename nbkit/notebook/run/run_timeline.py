"""A run from its first step to its newest as a bounded number of points, and what has been added since a cursor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbkit.notebook.run.curve import folded
from nbkit.records.late_ranks import Bar
from nbkit.records.readings import adding_up, clock
from nbkit.records.records import StepRecord

PARTS = ("compute", "exposed", "waiting", "bubble", "data", "optimizer", "other")
POINTS = 480
RECENT = 200  # steps that the page can show alone, and that stay what they are

Point = list[Any]  # last step, span, seconds, each of PARTS, tokens/s or None, loss or None, strategy
_MEANS = range(2, 5 + len(PARTS))


def point_of(steps: Mapping[int, StepRecord], bars: Sequence[Bar]) -> Point:
    """The mean over ranks of one step: its number, how many steps it stands for, seconds, parts, numbers, strategy.

    Seconds are those of the clock, as in `usual_bars`: what ranks do between two steps is in "other".
    """
    first, by_clock = steps[min(steps)], clock(steps) or None
    seconds = by_clock or sum(one.seconds for one in steps.values()) / len(steps)
    bars = [adding_up(bar, by_clock) for bar in bars]
    parts = [short(sum(getattr(bar, part) for bar in bars) / len(bars)) if bars else 0.0 for part in PARTS]
    numbers, rate = first.numbers, rate_of(first)
    loss = numbers.get("loss")
    return [
        first.step,
        first.span,
        short(seconds),
        *parts,
        short(rate),
        short(loss) if isinstance(loss, (int, float)) else None,
        str(numbers.get("strategy", "")),
    ]


def rate_of(step: StepRecord) -> float | None:
    """Tokens per second of a step, by the clock; None where they were not recorded."""
    tokens, wall = step.numbers.get("tokens"), step.numbers.get("seconds") or step.seconds
    return tokens / wall if isinstance(tokens, (int, float)) and isinstance(wall, (int, float)) and wall else None


class Timeline:
    """Points in order of their steps. epoch: changes whenever points that were there have changed."""

    def __init__(self, points: int = POINTS) -> None:
        self.points: list[Point] = []
        self.epoch = 0
        self._at_most = points
        self._recent = points * RECENT // POINTS

    def add(self, point: Point) -> None:
        """One more; a training that was taken back to an earlier step loses what came after it."""
        if self.points and point[0] <= self.points[-1][0]:
            self.points = [one for one in self.points if one[0] < point[0]]
            self.epoch += 1
        self.points.append(point)
        if len(self.points) > self._at_most:
            self._fold()

    def since(self, epoch: int, count: int) -> tuple[int, list[Point]]:
        """(how many of the reader's `count` points still hold, the points to put after them)."""
        keep = min(count, len(self.points)) if epoch == self.epoch else 0
        return keep, self.points[keep:]

    def _fold(self) -> None:
        """Neighbours become means, but for the newest; each then stands for about as many steps."""
        old, new = self.points[: -self._recent], self.points[-self._recent :]
        total = old[-1][0] - old[0][0] + old[0][1]
        width = 3 * total / (self._at_most - self._recent)
        self.points = [*folded(old, max(width, 2), _mean), *new][-self._at_most :]
        self.epoch += 1


def _mean(a: Point, b: Point) -> Point:
    span = a[1] + b[1]
    means = []
    for i in _MEANS:
        known = [(one[i], one[1]) for one in (a, b) if one[i] is not None]
        weight = sum(n for _, n in known)
        means.append(short(sum(value * n for value, n in known) / weight) if known else None)
    return [b[0], span, *means, b[-1]]


def short(value: Any) -> Any:
    """Five digits are more than anyone sees."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
