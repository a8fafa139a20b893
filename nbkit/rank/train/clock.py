"""How long steps take, as every rank measures it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Clock"]


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
        """What runs inside does not count."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._mark += time.perf_counter() - began
