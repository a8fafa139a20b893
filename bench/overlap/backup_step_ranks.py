"""A rank whose blocks sleep, with a backup after each step over a link that sleeps. Run by bench.rigs.forked."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import nbkit
from bench.overlap.sleeping_block import SleepingBlock, drawn_rows
from bench.rigs.slept_link import Rate, SleptLink
from nbkit.rank.train.replace.backup import BackupGeneration, Backups
from nbkit.rank.world.world import World

_WIDTH, _BLOCKS, _ROWS = 256, 8, 16
_WARM = 3


class Worker:
    """Two trainings of blocks that sleep `compute` seconds in a step of one rank: with a backup of each step, and none.

    share: of that, in which the link carries this rank's backup.
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
        # Of a pipeline a rank has a part of the blocks, for each of its micro-batches.
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
        """Seconds of each step; and of a backup: bytes that left this rank, and those of weights and optimizer state
        of the whole model."""
        trainer, self._share = self._trainers[every], share
        torch.distributed.barrier()
        self._began.clear()
        before = self._link.carried
        trainer.fit(_WARM + steps)
        backups = _WARM + steps + 1  # one before the first step
        times = self._began[_WARM - 1 :]
        return {
            "seconds": [later - earlier for earlier, later in pairwise(times)],
            "bytes": (self._link.carried - before) / backups,
            "whole": 3 * 4 * _BLOCKS * _WIDTH * _WIDTH,
        }
