"""The pace of a strategy from the seconds of its newest steps: their median, and between what it lies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 5  # steps whose shortest and longest have the median between them with 94 %; fewer say little


@dataclass(frozen=True)
class Pace:
    """seconds: the median of `steps` steps, between low and high with 95 %. low, high: None of fewer than `LEAST`."""

    seconds: float
    low: float | None
    high: float | None
    steps: int


def pace_of(seconds: Sequence[float]) -> Pace | None:
    """None of no steps."""
    if not seconds:
        return None
    few = len(seconds) < LEAST
    low, high = (None, None) if few else interval(seconds)
    return Pace(statistics.median(seconds), low, high, len(seconds))


def interval(seconds: Sequence[float]) -> tuple[float, float]:
    """Between which two of them the median lies with 95 %, whatever their distribution."""
    ordered, n = sorted(seconds), len(seconds)
    at = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2))
    return ordered[at], ordered[n - 1 - at]
