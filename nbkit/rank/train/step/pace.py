"""The pace of a strategy from the seconds of its newest steps: their median, and between what it lies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

LEAST = 5  # steps whose shortest and longest have the median between them with 94 %; fewer say little
_STEPS = 20  # of a strategy, whose median is its pace
_STRATEGIES = 64  # of more than these the one that was left first is forgotten


@dataclass(frozen=True)
class StepPace:
    """seconds: the median of `steps` steps, between low and high with 95 %. low, high: None of fewer than `LEAST`.

    ago: how many steps were made since the newest of them, under other strategies.
    """

    seconds: float
    low: float | None
    high: float | None
    steps: int
    ago: int = 0


def pace_of(seconds: Sequence[float]) -> StepPace | None:
    """None of no steps."""
    if not seconds:
        return None
    few = len(seconds) < LEAST
    low, high = (None, None) if few else interval(seconds)
    return StepPace(statistics.median(seconds), low, high, len(seconds))


def interval(seconds: Sequence[float]) -> tuple[float, float]:
    """Between which two of them the median lies with 95 %, whatever their distribution."""
    ordered, n = sorted(seconds), len(seconds)
    at = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2))
    return ordered[at], ordered[n - 1 - at]


class Paces:
    """The newest seconds of each strategy that has run, however long ago. Written by one thread, read by any."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._newest: dict[str, tuple[int, tuple[float, ...]]] = {}  # (its last step, seconds), replaced as a whole
        self._step = 0
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """A step has been made; its `record` follows those of all earlier ones."""
        strategy, self._step = record["strategy"], record["step"]
        _, seconds = self._newest.get(strategy, (0, ()))
        self._newest[strategy] = self._step, (*seconds, record["seconds"])[-_STEPS - 1 :]
        if len(self._newest) > _STRATEGIES:
            del self._newest[min(self._newest, key=lambda name: self._newest[name][0])]

    def of(self, strategy: str) -> StepPace | None:
        """Without the first step of a strategy, which makes what later ones reuse; None where there is no other."""
        step, seconds = self._newest.get(strategy, (0, ()))
        pace = pace_of(seconds[1:])
        return replace(pace, ago=self._step - step) if pace is not None else None
