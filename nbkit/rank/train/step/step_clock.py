"""Measures how long steps take, on every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from nbkit.rank.telemetry.phases import OUTSIDE, phase


class Clock:
    """Seconds from loss to loss, without what runs between steps (evaluation, checkpoints, live cells)."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A run begins now."""
        self._mark = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What runs inside does not count, laps of its own and a clock that is stopped again included."""
        so_far = time.perf_counter() - self._mark
        try:
            with phase(OUTSIDE):
                yield
        finally:
            self._mark = time.perf_counter() - so_far
