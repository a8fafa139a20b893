"""Measure how long a checkpoint of half a gigabyte stops a training, and a copy of the same bytes in host memory.

The steps sleep, so that the figure shows how long a step waits, not how long it computes. A checkpoint is saved in the
middle of the run. The pause is the time by which its step is longer than the usual step.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

import torch
from torch import Tensor, nn

from bench.rigs.forked import Ranks
from bench.settings import Settings
from bench.stats import ratio
from bench.table import Row
from nbkit.rank.train.trainer import Trainer

RANKS = 2
ROUNDS = 9
BAR = 1.5


def run(settings: Settings) -> list[Row]:
    """Return two rows: the pause, and the longest step while a thread writes."""
    num_bytes = (32 if settings.quick else 500) << 20
    copies, pauses, others, waited = [], [], [], []
    with Ranks("checkpoint_pause", RANKS, folder=settings.folder, num_bytes=num_bytes) as ranks:
        ranks.ask("pause", path="kept", beside=True)  # the first one allocates memory and forms the group
        for number in range(settings.count(ROUNDS)):
            copies.append(max(ranks.ask("copy")))
            own, other = zip(*ranks.ask("pause", path="kept", beside=True), strict=True)
            pauses.append(max(own))
            others.append(max(other))
            if number < 2:
                waited.append(max(one for one, _ in ranks.ask("pause", path="kept", beside=False)))
    figure, what = ratio(pauses, copies), f"checkpoint of {num_bytes >> 20} MiB, {RANKS} ranks"
    return [
        Row(
            f"{what}, written beside the training: pause of the step",
            _ms(pauses),
            f"copy of the same bytes in host memory {_ms(copies)}; a save that is waited for {_ms(waited)}",
            f"{figure.middle:.2f} [{figure.low:.2f}, {figure.high:.2f}]",
            "",
            f"≤ {BAR:g} x (median)",
            figure.middle <= BAR,
            {"nbkit": pauses, "copy": copies},
        ),
        Row(f"{what}: the longest step while it is written, beyond the usual", _ms(others), "", "", "", "", None),
    ]


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.0f} ms"


STEP_S = 0.03
STEPS = 60
PARTS = 8


class Sleeping(nn.Module):
    """A small layer that trains, and `num_bytes` of parameters that do not.

    `began` has the time at which each forward pass began.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.small = nn.Linear(4, 4)
        self.kept = nn.ParameterList(
            nn.Parameter(torch.zeros(num_bytes // 4 // PARTS), requires_grad=False) for _ in range(PARTS)
        )
        self.began: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.began.append(time.perf_counter())
        time.sleep(STEP_S)
        y: Tensor = self.small(x)
        return y


class Worker:
    """A rank with a Trainer of a `Sleeping` model."""

    def __init__(self, *, num_bytes: int) -> None:
        self.model = Sleeping(num_bytes)
        self.trainer = Trainer(
            model=self.model,
            loss=nn.functional.mse_loss,
            optimizer=lambda model: torch.optim.SGD(model.small.parameters(), lr=0.1),
            data=[(torch.ones(4), torch.ones(4))] * 64,
            batch_size=8,
            log_dir=None,
            progress=False,
            callbacks=[self._record],
        )
        self._save: tuple[int, str, bool] | None = None
        self._at = 0
        share = num_bytes // self.trainer.job.world_size
        self.source, self.target = torch.ones(share, dtype=torch.uint8), torch.empty(share, dtype=torch.uint8)
        self.copy()

    def copy(self) -> float:
        """Copy as many bytes in host memory as this rank copies for a checkpoint, and return the seconds."""
        torch.distributed.barrier()
        began = time.perf_counter()
        self.target.copy_(self.source)
        return time.perf_counter() - began

    def pause(self, *, path: str, beside: bool) -> tuple[float, float]:
        """Save a checkpoint during `STEPS` steps and return by how many seconds two of them exceed the usual one.

        The first is the step in which the checkpoint is saved, the second the longest step after it.
        """
        self._save = self.trainer.step + STEPS // 4, path, beside
        self.model.began.clear()
        self.trainer.fit(STEPS)
        periods = [later - earlier for earlier, later in pairwise(self.model.began)]
        usual, at = statistics.median(periods), self._at
        return periods[at] - usual, max(periods[at + 1 :]) - usual

    def _record(self, trainer: Trainer, record: dict[str, float]) -> None:
        if self._save is not None and record["step"] == self._save[0]:
            (_, path, beside), self._save = self._save, None
            self._at = len(self.model.began) - 1
            trainer.save(path, beside=beside)
