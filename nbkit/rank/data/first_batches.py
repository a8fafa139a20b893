"""Checks the first batches of a user's own loop, and of data that can only be iterated, when they arrive.

Other data is checked when the job is made (see fact_finder.py). Here the model is already split. If each rank has the
whole model, rank 0 checks it and tells the other ranks. Otherwise all ranks run the check together, in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from nbkit.rank.comm.delegating_group import stand_in
from nbkit.rank.comm.thread_group import Alone
from nbkit.rank.data.batch import Shard, call, pair
from nbkit.rank.data.sample_rows import Sample, undrawn
from nbkit.rank.loss.loss_check import Examined, examine
from nbkit.rank.loss.row_trial import kept, varying
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.parallel.proof.outside_state import outside_kept
from nbkit.rank.parallel.proof.unchanged import unchanged
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.rng.draw_plan import DrawPlan
from nbkit.rank.rng.keyed_dropout import find_draws

_BATCHES = 4


class FirstBatches:
    """The check of the first batches of one job, under any of its strategies.

    parted: True if a rank cuts its rows into several forward passes. begun: the first step that was checked.
    """

    def __init__(
        self,
        loss: Loss,
        inputs: Sequence[str] | None,
        *,
        parted: bool,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self._loss, self._inputs = loss, inputs
        self._rank, self._world_size, self._device = rank, world_size, device
        self._parted = parted or world_size > 1
        self.begun: int | None = None
        self._varied: frozenset[int] = frozenset()

    def part(self) -> None:
        """Note that ranks cut their rows from now on. So the next batches are checked."""
        self._parted, self.begun = True, None

    def look(self, sharded_model: ShardedModel, shard: Shard, step: int) -> Examined | None:
        """Return the result for the batch of `step`, the same on every rank; None if the batch is not checked.

        Collective in the first steps.
        """
        # Count finished steps, which are equal on all ranks even if one of them was interrupted.
        self.begun = step if self.begun is None else self.begun
        if not 0 <= step - self.begun < _BATCHES or shard.everything is None or not self._parted:
            return None
        # With a pipeline or split positions, an example batch was checked before.
        strategy = sharded_model.strategy
        if strategy.pp > 1 or strategy.cp > 1:
            return None
        # Rank 0's data decides for all ranks. If other ranks read different data, an error after the step says so.
        sample, told = self._sample(shard), [False]
        if self._rank == 0 and sample is not None:
            told[0] = not (varied := varying(sample.batch, sample.rows)) <= self._varied or self.begun == step
            self._varied |= varied
        found: Examined | None = self._of_first([self._found(sharded_model, sample)]) if self._of_first(told) else None
        return found

    def _of_first(self, told: list[Any]) -> Any:
        """Return the `told` of rank 0 on every rank. Collective."""
        if self._world_size > 1:
            dist.broadcast_object_list(told, src=0, device=self._device)
        return told[0]

    def _sample(self, shard: Shard) -> Sample | None:
        with suppress(Exception), undrawn():  # training reports what is wrong with the batch
            sample = Sample(*shard.everything()) if shard.everything is not None else None
            return sample if sample is not None and sample.rows else None
        return None

    def _found(self, sharded_model: ShardedModel, sample: Sample | None) -> Examined | None:
        strategy = sharded_model.strategy
        whole = strategy.tp == 1 and strategy.zero < 3 and strategy.ep == 1

        def run(value: Any) -> Any:
            sharded_model.data.reset()
            return call(sharded_model.module, value)

        if sample is None or (whole and self._rank):
            return None
        # Rank 0 runs a whole model alone.
        with (
            stand_in(Alone()) if whole else nullcontext(),
            outside_kept(sharded_model.module, self._loss) if whole else nullcontext(),
        ):
            draws = self._draws(sharded_model, run, sample)
            with undrawn():
                found = examine(sharded_model.module, run, self._loss, sample, self._inputs, whole=whole, draws=draws)
        return replace(found, draws=draws)

    def _draws(self, sharded_model: ShardedModel, run: Callable[[Any], Any], sample: Sample) -> DrawPlan | None:
        """Return the plan of the model's own random draws in training, such as which draws have rows along dim 0."""

        def of_rows(rows: int) -> None:
            part = sample.part([i % sample.rows for i in range(rows)], self._device)
            run(pair(part, self._inputs)[0])

        module = sharded_model.module
        with (
            suppress(Exception),  # training reports what is wrong with the model
            undrawn(),
            unchanged(module),
            kept(module, training=True),
            sharded_model.data.computing(),
        ):
            return find_draws(module, of_rows)
        return None
