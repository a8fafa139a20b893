"""The loss on other data: weighted over all samples and ranks, each counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbkit.errors import TrainingError
from nbkit.rank.train.job import Job
from nbkit.rank.train.stream import shards

__all__ = ["evaluate"]


@torch.no_grad()
def evaluate(job: Job, data: Any, *, batch_size: int, collate: Callable[[list[Any]], Any]) -> float:
    """Mean loss of the job's model over one pass of `data`. Collective; the model is in eval mode meanwhile.

    Raises TrainingError when there is nothing to weigh.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=job.device)
    with _evaluating(job.model):
        for shard in shards(data, batch_size=batch_size, rank=job.rank, ranks=job.world_size, collate=collate):
            for micro, rows, _ in job.gradients.cut(shard):
                part, weight, weighted, _ = job.gradients.forward(micro, rows)
                sums[0] += part if weighted else part * rows
                sums[1] += weight
    if job.world_size > 1:
        dist.all_reduce(sums)
    total, count = sums.tolist()
    if not count:
        raise TrainingError("There is nothing to evaluate.", numbers=f"weight {count:g}", hint="data with samples")
    return float(total / count)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
