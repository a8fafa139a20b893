"""The loss on other data: weighted over all samples and ranks, each counted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbkit.errors import TrainingError
from nbkit.rank.data.data_rng import alike, content
from nbkit.rank.data.open_stream import shards
from nbkit.rank.data.stream import fetched, is_map_style
from nbkit.rank.train.control.rank_agreement import compare_ranks

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job


def evaluate(job: Job, data: Any, *, batch_size: int, collate: Callable[[list[Any]], Any]) -> float:
    """Mean loss of the job's model over one pass of `data`. Collective; the model is in eval mode meanwhile.

    Raises TrainingError when there is nothing to weigh.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=job.device)
    axes = job.sharded_model.axes
    if is_map_style(data):
        ends = content(lambda: fetched(data, [0, -1 % len(data)], (0, 1), collate).data) if len(data) else 0
        compare_ranks(
            {"samples": len(data), "the first and the last one": ends},
            world_size=job.world_size,
            device=job.device,
            what="data to evaluate on",
            hint="the whole data on every rank, which divides it",
        )
    with job.sharded_model.evaluating(autocast=job.training_step.precision.dtype is not None), alike():
        every = shards(data, batch_size=batch_size, rank=axes.index("dp"), ranks=axes.size("dp"), collate=collate)
        for shard in every:
            sums += job.training_step.evaluate(shard)
    if job.world_size > 1:
        dist.all_reduce(sums)
    total, count = sums.tolist()
    if not count:
        raise TrainingError("There is nothing to evaluate.", numbers=f"weight {count:g}", hint="data with samples")
    return float(total / count)
