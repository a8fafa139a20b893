"""Statistics of the table: medians, bootstrap intervals, and whether a bar is met.

A ratio is computed within each round, in which both sides run one after the other, so that a machine that is slow for a
while slows both. The figure is the median of these ratios. Intervals are 95 % bootstrap percentiles over rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

RESAMPLES = 4_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A figure and the ends of its 95 % interval."""

    middle: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def quantile(values: Sequence[float], at: float = 0.5) -> Interval:
    """Return a quantile of `values` and its interval. at: 0.5 for the median. Raises ValueError without values."""
    if not values:
        raise ValueError("no values to take a quantile of")
    data = numpy.asarray(values, dtype=float)
    # Seeded, so that the same measurements always print the same table.
    picks = numpy.random.default_rng(0).integers(0, len(data), (RESAMPLES, len(data)))
    drawn = numpy.quantile(data[picks], at, axis=1)
    low, high = numpy.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(numpy.quantile(data, at)), float(low), float(high))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the median over rounds of ours / theirs. Raises ValueError if the rounds do not match."""
    if len(ours) != len(theirs):
        raise ValueError(f"rounds do not match: {len(ours)} of ours, {len(theirs)} of theirs")
    return quantile([a / b for a, b in zip(ours, theirs, strict=True)])


def meets(figure: Interval, bar: float, again: Interval | None = None) -> bool:
    """Return True if a figure that should be small is within `bar`.

    again: the A/A comparison of the same run. The run cannot see differences below its half-width, so the interval may
    end above the bar by that much. For a bar below 1 the half-width is multiplied by the bar, since it was measured at
    a ratio of 1.
    """
    slack = again.half_width * min(1.0, bar) if again else 0.0
    return figure.high <= bar + slack
