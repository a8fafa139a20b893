"""The statistics of the table: medians, bootstrap intervals, and when a bar is met.

A ratio is taken within each round, where both sides ran one after the other, so that what slows the machine for
a while slows both; the figure is the median of these ratios. Intervals are 95 % bootstrap percentiles over rounds.
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
    """A quantile of `values`; at: 0.5 for the median. Raises ValueError when there are none."""
    if not values:
        raise ValueError("no values to take a quantile of")
    data = numpy.asarray(values, dtype=float)
    # Seeded: the same measurements always print the same table.
    picks = numpy.random.default_rng(0).integers(0, len(data), (RESAMPLES, len(data)))
    drawn = numpy.quantile(data[picks], at, axis=1)
    low, high = numpy.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(numpy.quantile(data, at)), float(low), float(high))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Median over rounds of ours / theirs. Raises ValueError when the rounds do not match."""
    if len(ours) != len(theirs):
        raise ValueError(f"rounds do not match: {len(ours)} of ours, {len(theirs)} of theirs")
    return quantile([a / b for a, b in zip(ours, theirs, strict=True)])


def meets(figure: Interval, bar: float, again: Interval | None = None) -> bool:
    """Whether a figure that has to be small is within `bar`.

    again: the A/A comparison of the same run. Its half-width is what the run cannot tell apart, so the interval may
    end that much above the bar; for bars below 1 in proportion, since it was measured at a ratio of 1.
    """
    slack = again.half_width * min(1.0, bar) if again else 0.0
    return figure.high <= bar + slack
