"""Seconds of a step, from one reading of a batch to the next: the same clocks in every loop that collates batches."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data import default_collate


class Paced:
    """A collate function that remembers when it was called."""

    def __init__(self) -> None:
        self._stamps: list[float] = []
        self._cpu: list[float] = []

    def __call__(self, samples: list[Any]) -> Any:
        self._stamps.append(time.perf_counter())
        self._cpu.append(time.process_time())
        return default_collate(samples)

    def restart(self) -> None:
        self._stamps.clear()
        self._cpu.clear()

    @property
    def seconds(self) -> float:
        """Of a step, mean since `restart`; what comes before the first batch and after the last one is left out."""
        return (self._stamps[-1] - self._stamps[0]) / (len(self._stamps) - 1)

    @property
    def cpu_seconds(self) -> float:
        """The same, of the CPU time of all threads of this process."""
        return (self._cpu[-1] - self._cpu[0]) / (len(self._cpu) - 1)
