"""Split a rank's rows into micro-batches, and run the forward pass of one. Steps and proofs share this code."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.rank.data.batch import Shard, bounds, numbers_of, on_device, pair, take, tokens_of
from nbkit.rank.loss.counted_targets import Counted, CountedTargets, share_of
from nbkit.rank.loss.row_weights import Loss, Weighed, weigh
from nbkit.rank.parallel.sharded_model import ShardedModel


@dataclass(frozen=True)
class Micro:
    """A micro-batch.

    data: on the device that computes it. rows: the number of rows. numbers: their indices in the global batch. shard,
    start: the micro-batch begins at row `start` of `shard`.
    """

    data: Any
    rows: int
    numbers: Sequence[int]
    shard: Shard
    start: int

    @property
    def read(self) -> Any:
        """Return its data in the form in which it was read."""
        return take(self.shard.data, self.start, self.start + self.rows, rows=self.shard.rows)


def micro_batches(shard: Shard, model: ShardedModel, size: int | None, device: torch.device) -> list[Micro]:
    """Split a shard into micro-batches: into the number of a pipeline strategy, else into `size` rows each, else into
    one.

    The whole shard is moved to `device` once, for all micro-batches and stages.
    """
    axes, rows = model.axes, shard.rows
    numbers = numbers_of(shard.parts, shard.total, axes.size("dp"), axes.index("dp"))
    if (count := model.strategy.microbatches) is not None:
        cuts = [bounds(rows, min(count, rows), i) for i in range(min(count, rows))]
    else:
        size = size or max(rows, 1)
        cuts = [(start, min(start + size, rows)) for start in range(0, rows, size)]
    moved = on_device(shard.data, device)
    return [
        Micro(take(moved, start, stop, rows=rows), stop - start, numbers[start:stop], shard, start)
        for start, stop in cuts
    ]


def most_passes(shard: Shard, model: ShardedModel, size: int | None) -> int:
    """Return the number of micro-batches of the rank that has the most."""
    most = shard.most(model.axes.size("dp"))
    if (count := model.strategy.microbatches) is not None:
        return min(count, most)
    return -(-most // (size or max(most, 1)))


def check_collectives(shard: Shard, model: ShardedModel, size: int | None, collective: str) -> None:
    """Raise TrainingError, on every rank, if a `collective` of the model or the loss would not match across ranks.

    collective: "" if they make none. Ranks that make fewer forward passes, or gather fewer rows, would leave the other
    ranks waiting.
    """
    ranks = model.axes.size("dp")
    if not collective or ranks == 1:
        return
    rows = [len(numbers_of(shard.parts, shard.total, ranks, rank)) for rank in range(ranks)]
    # A sum over the ranks needs equal numbers of calls. A gather needs equal numbers of rows.
    counts = [-(-each // size) if size else min(each, 1) for each in rows] if collective == "all_reduce" else rows
    if len(set(counts)) > 1:
        raise TrainingError(
            f"The model or the loss calls {collective} by itself, but ranks have different numbers of rows, so some "
            "would call it more often.",
            numbers=f"a batch of {shard.total} rows: {', '.join(map(str, rows[:8]))} on data ranks 0, 1, ...",
            hint="loading=nbkit.Loading(drop_last=True), and a batch_size that the data ranks divide",
        )


def check_stages(shard: Shard, model: ShardedModel) -> None:
    """Raise TrainingError, on every rank, if pipelines that share experts would make different numbers of passes.

    The experts of a stage compute for the same stage of all pipelines.
    """
    ranks, count = model.axes.size("dp"), model.strategy.microbatches
    if model.strategy.ep == 1 or count is None:
        return
    rows = [len(numbers_of(shard.parts, shard.total, ranks, rank)) for rank in range(ranks)]
    if len({min(count, each) for each in rows}) > 1:
        raise TrainingError(
            "Pipelines that share experts must make the same number of forward passes, but some have too few rows.",
            numbers=f"a batch of {shard.total} rows: {', '.join(map(str, rows[:8]))} on data ranks 0, 1, ...; {count} "
            "micro-batches",
            hint="loading=nbkit.Loading(drop_last=True), and a batch_size of at least dp x microbatches",
        )


@dataclass(frozen=True)
class Whole:
    """A global batch.

    targets: for each cross entropy, the number of targets that count, if they are counted in advance.
    """

    rows: int
    targets: tuple[float, ...] = ()


def whole_of(shard: Shard, counted: Counted | None, model: ShardedModel, device: torch.device) -> Whole:
    """Return the batch that contains `shard`. If its targets are counted, all ranks along dp must call it."""
    if counted is None or not counted.labels:
        return Whole(shard.total)
    own = [labels.count(shard.data) if shard.rows else 0.0 for labels in counted.labels]
    sums = torch.tensor(own, dtype=torch.float64, device=device)
    if (group := model.axes.group("dp")) is not None:
        dist.all_reduce(sums, group=group)
    return Whole(shard.total, tuple(sums.tolist()))


@dataclass(frozen=True)
class ForwardPass:
    """The forward pass of one stage on micro-batches."""

    model: ShardedModel
    loss: Loss
    inputs: Any

    def run(
        self, micro: Micro, stage: int, received: tuple[Tensor, ...], counted: Counted | None, whole: Whole
    ) -> tuple[Any, Weighed | None, int]:
        """Return (output of the stage, weighted loss, tokens). The last two are None and 0 except on the last stage.

        counted: see ModelFacts; None if the loss weights rows.
        """
        model = self.model
        value, target = pair(micro.data, self.inputs)
        if stage != model.last_stage:
            return model.stage(stage, value, received), None, 0
        targets = None
        if counted is not None:
            share = None
            if counted.labels:
                share = share_of(counted.labels, micro.read, whole.targets, micro.rows / whole.rows)
            targets = CountedTargets(share)
        inside = counted is not None and counted.where == "model"
        with targets.inside() if targets is not None and inside else nullcontext():
            output = model.stage(stage, value, received)
        model.data.settle()  # a loss may read weights itself
        with targets or nullcontext():
            result = self.loss(output, target)
        if targets is not None:
            targets.check()
        return output, weigh(result, micro.rows, targets), tokens_of(value, micro.rows)
