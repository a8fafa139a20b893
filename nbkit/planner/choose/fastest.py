"""Which of several strategies to choose: by their seconds, and where these do not tell, by what a switch costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

ALIKE = 1.02
"""Seconds this close count as equal: the simpler strategy is recommended."""

AGED = 400  # steps
WIDER = 0.1
"""Seconds that were measured more than `AGED` steps ago may be by this part longer or shorter now: of old ones nothing
tells how the ranks, their links and what else runs there have changed since."""

T = TypeVar("T")


def fastest(seconds: Mapping[T, float]) -> T | None:
    """The first of those that take least: in the order from simple to not so simple, as Strategy.every has it."""
    least = min(seconds.values(), default=0.0)
    return next((one for one, took in seconds.items() if took <= ALIKE * least), None)


@dataclass(frozen=True)
class Choice:
    """strategy: to choose, "" where none fits. why: what it has before the others. rivals: those that may be faster."""

    strategy: str = ""
    why: Literal["fastest", "in force", "least memory", ""] = ""
    rivals: tuple[str, ...] = ()


def recommended(rows: Sequence[Mapping[str, Any]], limit: float | None, now: str) -> Choice:
    """The one strategy to choose of those that fit.

    The fastest, and the simplest of those as fast. Where others may be faster for all one knows, or seconds are known
    of fewer than two: of these the one in force, as nothing tells that a switch would gain; else the one that holds
    least. rows: of a table of strategies, simple ones first. limit: bytes that the fullest rank can hold; None: not
    known. now: the strategy in force.
    """
    sizes = {row["strategy"]: row["peak_bytes"] or row["memory"].get("after", 0) for row in rows if row["ok"]}
    fits = {row["strategy"]: row for row in rows if row["ok"] and (limit is None or sizes[row["strategy"]] <= limit)}
    known = {name: seconds for name, row in fits.items() if (seconds := _seconds(row)) is not None}
    first = fastest(known) if len(known) > 1 else None
    if first is None:
        return _by_state(list(fits), sizes, now)
    high = bounds_of(fits[first])[1]
    rivals = [name for name in known if name != first and ALIKE * bounds_of(fits[name])[0] < high]
    if not rivals:
        return Choice(first, "fastest")
    tied = [name for name in known if name == first or name in rivals]
    chosen = _by_state(tied, sizes, now)
    return replace(chosen, rivals=tuple(name for name in tied if name != chosen.strategy))


def _by_state(names: Sequence[str], sizes: Mapping[str, float], now: str) -> Choice:
    """Of strategies between which no seconds decide."""
    if now in names:
        return Choice(now, "in force")
    return Choice(min(names, key=lambda name: sizes[name]), "least memory") if names else Choice()


def _seconds(row: Mapping[str, Any]) -> float | None:
    found: float | None = row["step_s"] if row["step_s"] is not None else row["predicted_step_s"]
    return found


def bounds_of(row: Mapping[str, Any]) -> tuple[float, float]:
    """Between what the seconds of its step lie: anything where too few steps were measured, more where these were long
    ago. A prediction has no margin."""
    if row["step_s"] is None:
        predicted: float = row["predicted_step_s"]
        return predicted, predicted
    if row["step_low_s"] is None or row["step_high_s"] is None:
        return 0.0, math.inf
    wider = 1 + WIDER * (row["step_ago"] > AGED)
    return row["step_low_s"] / wider, row["step_high_s"] * wider
