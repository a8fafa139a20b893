"""Measure what a backup of each step costs.

The blocks sleep, and a slept link carries a rank's backup in 1/2 or 1/3 of a step's compute.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import nbkit
from bench.overlap.sleeping_block import SleepingBlock, drawn_rows
from bench.rigs.forked import Ranks
from bench.rigs.slept_link import Rate, SleptLink
from bench.settings import Settings
from bench.stats import ratio
from bench.table import Row
from nbkit.rank.train.replace.backup import BackupGeneration, Backups
from nbkit.rank.world.world import World

RANKS, ROUNDS, STEPS = 4, 8, 6
COMPUTE_S = 0.3
SHARES = (1 / 2, 1 / 3)  # of COMPUTE_S that the link needs; a third of COMPUTE_S is the forward pass
BAR, BYTES_BAR = 1.05, 1.001


def run(settings: Settings) -> list[Row]:
    """Return three rows for each strategy.

    Two compare a step with backups to one without, at two speeds of the link. The third counts the bytes sent.
    """
    rows = []
    for strategy in ("zero3", "pp"):
        name = "overlap.backup_step"
        with Ranks(name, RANKS, folder=settings.folder, strategy=strategy, compute=COMPUTE_S) as ranks:
            rows += _rows(ranks, strategy, settings.count(ROUNDS))
    return rows


def _rows(ranks: Ranks, strategy: str, rounds: int) -> list[Row]:
    what = f"backup of each step, {strategy} on {RANKS} ranks"
    sent, rows = 0.0, []
    for share in SHARES:
        backed_up, alone = [], []
        for number in range(rounds):
            for every in (1, 0) if number % 2 else (0, 1):
                said = ranks.ask("steps", every=every, steps=STEPS, share=share)
                seconds = statistics.median(max(each) for each in zip(*(one["seconds"] for one in said), strict=True))
                (backed_up if every else alone).append(seconds)
                if every:
                    sent = sum(one["bytes"] for one in said) / said[0]["whole"]
        figure = ratio(backed_up, alone)
        row = Row(
            f"{what}, carried in 1/{1 / share:.0f} of a step's compute of {COMPUTE_S * 1e3:.0f} ms: step",
            f"{1e3 * statistics.median(backed_up):.0f} ms",
            f"without {1e3 * statistics.median(alone):.0f} ms",
            f"{figure.middle:.3f} [{figure.low:.3f}, {figure.high:.3f}]",
            "",
            f"≤ {BAR:g} x (median)",
            figure.middle <= BAR,
            {"nbkit": backed_up, "alone": alone},
        )
        rows.append(row)
    return [
        *rows,
        Row(
            f"{what}: bytes that all ranks send / weights and optimizer state of the model",
            f"{sent:.4f}",
            "",
            "",
            "",
            f"≤ {BYTES_BAR:g}",
            sent <= BYTES_BAR,
        ),
    ]


_WIDTH, _BLOCKS, _ROWS = 256, 8, 16
_WARM = 3


class Worker:
    """A rank with two trainings, one with a backup of each step and one without.

    The blocks sleep `compute` seconds in a step of one rank. The link carries this rank's backup in the part `share` of
    `compute`.
    """

    def __init__(self, *, strategy: str, compute: float) -> None:
        self._link, self._compute, self._share = SleptLink(), compute, 0.5
        torch.set_num_threads(1)
        send = Backups._send

        def slow(backups: Backups, own: BackupGeneration) -> None:
            self._link.rate = Rate(0.0, own.flat.numel() / (compute * self._share))
            try:
                send(backups, own)
            finally:
                self._link.rate = None

        Backups._send = slow  # type: ignore[method-assign]
        self._data = drawn_rows(_ROWS * 4, _WIDTH)
        self._trainers = {every: self._trainer(strategy, every) for every in (1, 0)}
        self._began: list[float] = []

    def _trainer(self, strategy: str, every: int) -> nbkit.Trainer:
        ranks = World.join_from_env().place.world_size
        # In a pipeline, a rank has only a part of the blocks, and runs them for each micro-batch.
        parts = 8 / ranks if strategy == "pp" else 1
        block_s = self._compute / (_BLOCKS * parts)
        return nbkit.Trainer(
            model=lambda: nn.Sequential(*(SleepingBlock(_WIDTH, block_s / 3, 2 * block_s / 3) for _ in range(_BLOCKS))),
            loss=nn.functional.mse_loss,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
            data=self._data,
            batch_size=_ROWS,
            strategy=f"{strategy} microbatches=8" if strategy == "pp" else strategy,
            callbacks=[lambda trainer, record: self._began.append(time.perf_counter())],
            recovery=nbkit.Recovery(backup_every=every),
            log_dir=None,
            progress=False,
        )

    def steps(self, *, every: int, steps: int, share: float) -> dict[str, Any]:
        """Train and return a dict of measurements.

        seconds: of each step. bytes: sent by this rank for one backup. whole: bytes of the whole model's weights and
        optimizer state.
        """
        trainer, self._share = self._trainers[every], share
        torch.distributed.barrier()
        self._began.clear()
        before = self._link.carried
        trainer.fit(_WARM + steps)
        backups = _WARM + steps + 1  # one more is made before the first step
        times = self._began[_WARM - 1 :]
        return {
            "seconds": [later - earlier for earlier, later in pairwise(times)],
            "bytes": (self._link.carried - before) / backups,
            "whole": 3 * 4 * _BLOCKS * _WIDTH * _WIDTH,
        }
