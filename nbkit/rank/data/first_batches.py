"""The first batches of a loop of the user's own, and of data that can only be iterated, looked at when they come.

What is known beforehand is looked at when the job is made (see blueprint.py). Here the model is split already. Where
each rank has the whole of it, rank 0 looks and tells the others; else all compute alike, in evaluation.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nbkit.rank.data.batch import Shard, call
from nbkit.rank.data.sample_rows import Sample, undrawn
from nbkit.rank.loss.loss_check import coupled
from nbkit.rank.loss.row_selection import varying
from nbkit.rank.parallel.check_findings import warn_of_coupled
from nbkit.rank.parallel.options import Coupled, need_rows
from nbkit.rank.parallel.sharded_model import Side
from nbkit.rank.train.config import Setup
from nbkit.strategy import Strategy

if TYPE_CHECKING:
    from nbkit.rank.train.builder import Blueprint

__all__ = ["FirstBatches"]

_BATCHES = 4


class FirstBatches:
    """Of one job, whatever its strategies."""

    def __init__(self, blueprint: Blueprint, setup: Setup) -> None:
        self.blueprint, self.setup = blueprint, setup
        self._parted = blueprint.world_size > 1 or setup.microbatch_size is not None
        self._begun: int | None = None
        self._varied: frozenset[int] = frozenset()

    def look(self, side: Side, shard: Shard, step: int) -> None:
        """Before the forward passes of `step`. Collective in the first steps.

        Raises StrategyError, on every rank alike, where the strategy parts rows that are coupled.
        """
        # Counted by the steps that were made: they are the same on ranks of which one was interrupted.
        self._begun = step if self._begun is None else self._begun
        if not 0 <= step - self._begun < _BATCHES or shard.everything is None or not self._parted:
            return
        # Of a pipeline, and of positions that are split, the example was looked at.
        strategy = side.strategy
        if strategy.pp > 1 or strategy.cp > 1:
            return
        # What rank 0 reads decides for all, should they read other data: which is said when the step is over.
        sample, told = self._sample(shard), [False]
        if self.blueprint.rank == 0 and sample is not None:
            told[0] = not (varied := varying(sample.batch, sample.rows)) <= self._varied or self._begun == step
            self._varied |= varied
        if self._of_first(told):
            self._refuse(strategy, self._of_first([self._found(side, sample)]))

    def _of_first(self, told: list[Any]) -> Any:
        """What rank 0 tells."""
        if self.blueprint.world_size > 1:
            dist.broadcast_object_list(told, src=0, device=self.blueprint.device)
        return told[0]

    def _sample(self, shard: Shard) -> Sample | None:
        with suppress(Exception), undrawn():  # what is wrong with the batch is said where it trains
            sample = Sample(*shard.everything()) if shard.everything is not None else None
            return sample if sample is not None and sample.rows else None
        return None

    def _found(self, side: Side, sample: Sample | None) -> Coupled | None:
        whole = side.strategy.tp == 1 and side.strategy.zero < 3

        def run(value: Any) -> Any:
            side.data.reset()
            return call(side.module, value)

        if sample is None or (whole and self.blueprint.rank):
            return None
        with undrawn():
            return coupled(side.module, run, self.setup.loss, sample, self.setup.inputs, whole=whole)

    def _refuse(self, strategy: Strategy, found: Coupled | None) -> None:
        if found is None:
            return
        self.blueprint.couple(found)
        need_rows(self.blueprint.wishes, strategy)
        for finding in warn_of_coupled(self.blueprint.wishes, strategy):
            warnings.warn(f"{finding.what} {finding.numbers}", stacklevel=2)
