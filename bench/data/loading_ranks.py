"""A rank whose steps sleep, on data that sleeps when it is read. Run by bench.rigs.forked."""

from __future__ import annotations

import multiprocessing
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import nbkit
from bench.rigs.jobs import config, trainer

BATCH = 4


class SlowStep(nn.Module):
    """A layer whose forward takes a given time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(8, 1), 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.layer(x)  # type: ignore[no-any-return]


class SlowData:
    """Each batch takes a given time to read."""

    seconds = 0.0

    def __len__(self) -> int:
        return 256 * BATCH

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        time.sleep(self.seconds)
        return [(torch.zeros(8), torch.zeros(1)) for _ in indices]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(8), torch.zeros(1)


class Worker:
    """step: seconds of one."""

    def __init__(self, *, step: float) -> None:
        self._step = step
        # These ranks are daemons, which Python forbids to have workers; those of a cluster are none.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        self._jobs: dict[tuple[float, int], Any] = {}

    def steps(self, count: int, batch_seconds: float, workers: int) -> float:
        """Seconds of a step: the lower quartile of `count` in one `fit`, since others use this machine too.

        The first ones, in which workers start, are left out.
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
