"""Which of several strategies to choose by their seconds alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

ALIKE = 1.02
"""Seconds this close count as equal: the simpler strategy is recommended."""

T = TypeVar("T")


def fastest(seconds: Mapping[T, float]) -> T | None:
    """The first of those that take least: in the order from simple to not so simple, as Strategy.every has it."""
    least = min(seconds.values(), default=0.0)
    return next((one for one, took in seconds.items() if took <= ALIKE * least), None)


def recommended(rows: Sequence[Mapping[str, Any]], limit: float | None) -> tuple[str, tuple[str, ...]]:
    """The fastest of those that fit, the simplest of those as fast, and the ones that may be faster for all one knows.

    Where there are such, or seconds are known of fewer than two, nothing is recommended: "". rows: of a table of
    strategies. limit: bytes that the fullest rank can hold; None: not known.
    """
    known, bounds = {}, {}
    for row in rows:
        seconds = row["step_s"] if row["step_s"] is not None else row["predicted_step_s"]
        size = row["peak_bytes"] or row["memory"].get("after", 0)
        if row["ok"] and seconds is not None and (limit is None or size <= limit):
            known[row["strategy"]], bounds[row["strategy"]] = seconds, bounds_of(row)
    chosen = fastest(known) if len(known) > 1 else None
    if chosen is None:
        return "", ()
    high = bounds[chosen][1]
    rivals = tuple(one for one, (low, _) in bounds.items() if one != chosen and ALIKE * low < high)
    return ("", (chosen, *rivals)) if rivals else (chosen, ())


def bounds_of(row: Mapping[str, Any]) -> tuple[float, float]:
    """Between what the seconds of its step lie: anything where too few steps were measured. A prediction has no
    margin."""
    if row["step_s"] is None:
        predicted: float = row["predicted_step_s"]
        return predicted, predicted
    if row["step_low_s"] is None or row["step_high_s"] is None:
        return 0.0, math.inf
    return row["step_low_s"], row["step_high_s"]
