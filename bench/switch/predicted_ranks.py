"""A rank whose job predicts what a switch will cost, makes it, and says both. Run by bench.rigs.forked."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from bench.rigs.jobs import config, trainer
from nbkit.rank.train.estimate import strategy_table
from nbkit.rank.train.estimate.time_model import measured_pace
from nbkit.strategy import Strategy


class Worker:
    """A job of a GPT under ddp."""

    def __init__(self, *, width: int, layers: int, batch: int) -> None:
        self.job = trainer(config(width, layers, block=32), "ddp", batch=batch, log_dir="runs")
        self.job.fit(2)

    def switch(self, strategy: str) -> dict[str, Any]:
        """bytes, seconds: as predicted, and as measured on this rank. A step follows."""
        row = self._row(strategy)
        done = self.job.switch(strategy)
        self.job.fit(1)
        return {"bytes": (row["moved_bytes"], done.moved_bytes), "seconds": (row["switch_s"], done.pause_s)}

    def steps(self, strategy: str, steps: int) -> tuple[float | None, float | None]:
        """Seconds of a step, predicted under ddp (None: unknown) and measured."""
        self.job.fit(steps)
        predicted = self._row(strategy)["predicted_step_s"]
        self.job.switch(strategy)
        self.job.fit(steps)
        pace = measured_pace(self.job.job, self.job.job.strategy)
        return predicted, None if pace is None else pace.seconds

    def _row(self, strategy: str) -> dict[str, Any]:
        """Of rank 0's table; the others let it have the machine."""
        wanted = str(Strategy.parse(strategy, dist.get_world_size()))
        strategy_table.look_at_all(self.job.job)
        rows = strategy_table.table(self.job.job)["options"] if dist.get_rank() == 0 else []
        dist.barrier()
        found: dict[str, Any] = next(
            (row for row in rows if row["strategy"] == wanted),
            dict.fromkeys(("moved_bytes", "switch_s", "predicted_step_s")),
        )
        return found
