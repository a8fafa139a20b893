"""Measure how much of the time to read data a step waits, with loader workers and without.

A batch takes 20 ms to read. Reads and steps sleep, so that they need no cores.
"""

from __future__ import annotations

import multiprocessing
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import nbkit
from bench.rigs.forked import Ranks
from bench.rigs.jobs import config, trainer
from bench.settings import Settings
from bench.table import Row, absolute

ROUNDS = 9
STEPS = 20
STEP_SECONDS, BATCH_SECONDS = 0.04, 0.02
WORKERS = 2
BAR = 0.05


def run(settings: Settings) -> list[Row]:
    """Return one row: the share of the reading time that steps still wait if workers read."""
    shown: list[float] = []
    seconds: list[tuple[float, float]] = []
    with Ranks("loading", 1, folder=settings.folder, step=STEP_SECONDS) as ranks:
        for _ in range(settings.count(ROUNDS)):
            ideal, ahead, in_step = (
                ranks.ask("steps", count=STEPS, batch_seconds=batch, workers=workers)[0]
                for batch, workers in ((0.0, 0), (BATCH_SECONDS, WORKERS), (BATCH_SECONDS, 0))
            )
            shown.append((ahead - ideal) / (in_step - ideal))
            seconds.append((ahead, in_step))
    ahead, in_step = (sorted(some)[len(some) // 2] * 1e3 for some in zip(*seconds, strict=True))
    return [
        absolute(
            f"reading that a step waits for, {BATCH_SECONDS * 1e3:g} ms a batch, workers={WORKERS}",
            *(shown, BAR, "x"),
            peer=f"workers=0: 1 x; a step {ahead:.1f} ms with workers, {in_step:.1f} ms without",
        )
    ]


BATCH = 4


class SlowStep(nn.Module):
    """A layer whose forward sleeps for `seconds`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(8, 1), 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.layer(x)  # type: ignore[no-any-return]


class SlowData:
    """A dataset that sleeps for `seconds` when a batch is read."""

    seconds = 0.0

    def __len__(self) -> int:
        return 256 * BATCH

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        time.sleep(self.seconds)
        return [(torch.zeros(8), torch.zeros(1)) for _ in indices]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(8), torch.zeros(1)


class Worker:
    """A rank that times steps. step: seconds that a forward sleeps."""

    def __init__(self, *, step: float) -> None:
        self._step = step
        # These ranks are daemons, and Python forbids daemons to start workers. The ranks of a cluster are not daemons.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        self._jobs: dict[tuple[float, int], Any] = {}

    def steps(self, count: int, batch_seconds: float, workers: int) -> float:
        """Return the seconds of a step: the lower quartile of `count` steps in one `fit`, as the machine is shared.

        The first steps are left out, because workers start in them.
        """
        if (batch_seconds, workers) not in self._jobs:
            data, model = SlowData(), SlowStep()
            self._jobs[batch_seconds, workers] = trainer(
                config(8, 1),
                "ddp",
                batch=BATCH,
                model=model,
                loss=nn.functional.mse_loss,
                data=data,
                loading=nbkit.Loading(workers=workers),
                callbacks=[lambda *_: self._ended.append(time.perf_counter())],
            )
            data.seconds, model.seconds = batch_seconds, self._step
        self._ended: list[float] = []
        self._jobs[batch_seconds, workers].fit(count + 4)
        took = sorted(after - before for before, after in pairwise(self._ended[2:]))
        return took[len(took) // 4]
