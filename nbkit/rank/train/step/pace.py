"""The pace of a strategy: the median of the seconds of its newest steps, and an interval around it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

LEAST = 5  # steps: the median lies between the shortest and the longest with 94 %; fewer say little
_STEPS = 20  # newest steps of a strategy; their median is its pace
_STRATEGIES = 64  # how many are remembered; beyond that, the one that was left first is forgotten


@dataclass(frozen=True)
class StepPace:
    """The pace of a strategy.

    seconds: the median of `steps` steps, between low and high with 95 %. low, high: None of fewer than `LEAST`. ago:
    how many steps were made since the newest of them, under other strategies.
    """

    seconds: float
    low: float | None
    high: float | None
    steps: int
    ago: int = 0


def pace_of(seconds: Sequence[float]) -> StepPace | None:
    """Return the pace of steps with these seconds; None if there are none."""
    if not seconds:
        return None
    few = len(seconds) < LEAST
    low, high = (None, None) if few else interval(seconds)
    return StepPace(statistics.median(seconds), low, high, len(seconds))


def interval(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the two of `seconds` between which the median lies with 95 %, whatever their distribution."""
    ordered, n = sorted(seconds), len(seconds)
    at = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2))
    return ordered[at], ordered[n - 1 - at]


class Paces:
    """The newest seconds of each strategy that has run, however long ago. A single thread writes, any thread reads."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._newest: dict[str, tuple[int, tuple[float, ...]]] = {}  # (its last step, seconds), replaced as a whole
        self._step = 0
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a step that has been made. Its `record` follows those of all earlier ones."""
        strategy, self._step = record["strategy"], record["step"]
        _, seconds = self._newest.get(strategy, (0, ()))
        self._newest[strategy] = self._step, (*seconds, record["seconds"])[-_STEPS - 1 :]
        if len(self._newest) > _STRATEGIES:
            del self._newest[min(self._newest, key=lambda name: self._newest[name][0])]

    def of(self, strategy: str) -> StepPace | None:
        """Return the pace of a strategy; None if it is unknown.

        The first step does not count, because it makes what later ones reuse.
        """
        step, seconds = self._newest.get(strategy, (0, ()))
        pace = pace_of(seconds[1:])
        return replace(pace, ago=self._step - step) if pace is not None else None
