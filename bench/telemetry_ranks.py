"""A rank that trains the same job with telemetry and without. Run by bench.forked."""

from __future__ import annotations

import torch.distributed as dist

from bench.jobs import config, trainer
from bench.paced import Paced
from nbkit.rank.telemetry import record


class Worker:
    """Two jobs, one that records its run and one that does not, under one strategy after the other."""

    def __init__(self, *, width: int, layers: int, block: int, batch: int) -> None:
        self._config, self._batch, self._pace = config(width, layers, block=block), batch, Paced()

    def prepare(self, strategy: str) -> None:
        """Train `strategy` from here on."""
        self._jobs = {}
        for recorded in (False, True):
            where = "runs" if recorded else None
            job = trainer(self._config, strategy, batch=self._batch, collate=self._pace, log_dir=where)
            job.fit(3)
            self._jobs[recorded] = job

    def block(self, mode: str, steps: int) -> tuple[float, float]:
        """(seconds, CPU-seconds) of a step, of so many. mode: "off", "count", or "time" with all that a run
        records of itself."""
        record.set_mode(mode)
        job = self._jobs[mode == "time"]
        dist.barrier()
        self._pace.restart()
        job.fit(steps + 1)
        record.set_mode("time")
        return self._pace.seconds, self._pace.cpu_seconds
