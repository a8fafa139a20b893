"""A rank that trains one job with telemetry and without. Run by bench.rigs.forked."""

from __future__ import annotations

import torch.distributed as dist

import nbkit
from bench.rigs.jobs import config, trainer
from bench.steps.step_seconds import Paced
from nbkit.rank.telemetry import collectives
from nbkit.rank.telemetry.progress_line import ProgressLine
from nbkit.rank.train.run_recorder import Recorder


class Worker:
    """One job for all arms, in the same memory: what records its run is taken off and put back."""

    def __init__(self, *, width: int, layers: int, block: int, batch: int) -> None:
        self._config, self._batch, self._pace = config(width, layers, block=block), batch, Paced()

    def prepare(self, strategy: str) -> None:
        """Train `strategy` from here on."""
        self._trainer = trainer(
            self._config, strategy, batch=self._batch, loading=nbkit.Loading(collate=self._pace), log_dir="runs"
        )
        self._trainer.fit(3)
        job = self._trainer.job
        others = [one for one in job.ledger.bus.sinks if isinstance(one, ProgressLine)]
        self._recording = {True: (job.recorder, [*job.ledger.bus.sinks]), False: (Recorder(job.device), others)}

    def block(self, mode: str, steps: int) -> tuple[float, float, float]:
        """(seconds, CPU-seconds, seconds that noting calls has taken) of a step, of so many. mode: "off", "count", or
        "time" with all that a run records of itself."""
        collectives.set_mode(mode)
        job = self._trainer.job
        job.recorder, job.ledger.bus.sinks = self._recording[mode == "time"]
        dist.barrier()
        self._pace.restart()
        before = collectives.own_ns()
        self._trainer.fit(steps + 1)
        own = (collectives.own_ns() - before) / (steps + 1) / 1e9
        collectives.set_mode("time")
        return self._pace.seconds, self._pace.cpu_seconds, own
