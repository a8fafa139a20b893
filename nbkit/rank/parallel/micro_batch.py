"""A rank's rows in micro-batches, and the forward pass of one: the same in a step and in the proof before it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nbkit.rank.data.batch import Shard, bounds, on_device, pair, take, tokens_of
from nbkit.rank.loss.counted_targets import Counted, CountedTargets
from nbkit.rank.loss.row_weights import Loss, Weighed, weigh
from nbkit.rank.parallel.sharded_model import ShardedModel


@dataclass(frozen=True)
class Micro:
    """A micro-batch: its data, how many rows, and which of the global batch the first one is."""

    data: Any
    rows: int
    first: int


def micro_batches(shard: Shard, model: ShardedModel, size: int | None) -> list[Micro]:
    """A shard in as many micro-batches as the strategy of a pipeline says, else of `size` rows, else in one."""
    axes, rows = model.axes, shard.rows
    first, _ = bounds(shard.total, axes.size("dp"), axes.index("dp"))
    if (count := model.strategy.microbatches) is not None:
        cuts = [bounds(rows, min(count, rows), i) for i in range(min(count, rows))]
    else:
        size = size or max(rows, 1)
        cuts = [(start, min(start + size, rows)) for start in range(0, rows, size)]
    return [Micro(take(shard.data, start, stop, rows=rows), stop - start, first + start) for start, stop in cuts]


def most_passes(shard: Shard, model: ShardedModel, size: int | None) -> int:
    """Micro-batches of the rank that has most."""
    _, most = bounds(shard.total, model.axes.size("dp"), 0)
    if (count := model.strategy.microbatches) is not None:
        return min(count, most)
    return -(-most // (size or max(most, 1)))


@dataclass(frozen=True)
class ForwardPass:
    """Of one stage, on micro-batches. counted: see Options; None where the loss weighs rows."""

    model: ShardedModel
    loss: Loss
    inputs: Any
    device: torch.device

    def run(
        self, micro: Micro, stage: int, received: tuple[Tensor, ...], counted: Counted | None
    ) -> tuple[Any, Weighed | None, int]:
        """(what the stage gives, what the loss weighs, tokens); the last two only of the stage that ends the model."""
        model = self.model
        value, target = pair(on_device(micro.data, self.device), self.inputs)
        if stage != model.last_stage:
            return model.stage(stage, value, received), None, 0
        targets = CountedTargets() if counted is not None else None
        inside = counted is not None and counted.where == "model"
        with targets.inside() if targets is not None and inside else nullcontext():
            output = model.stage(stage, value, received)
        with targets or nullcontext():
            result = self.loss(output, target)
        if targets is not None:
            targets.check()
        return output, weigh(result, micro.rows, targets), tokens_of(value, micro.rows)
