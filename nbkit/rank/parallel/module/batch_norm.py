"""BatchNorm couples the samples of a batch: over several ranks it is synchronised or refused, never different."""

from __future__ import annotations

import torch
from torch import nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.device_mesh import Axes

__all__ = ["batch_norms", "check_level", "synchronised"]


def batch_norms(model: nn.Module) -> list[str]:
    """Names of every BatchNorm that takes its statistics from the batch."""
    kind = nn.modules.batchnorm._BatchNorm
    return [name for name, part in model.named_modules() if isinstance(part, kind) and part.training]


def synchronised(model: nn.Module, *, axes: Axes, micros: int, device: torch.device) -> nn.Module:
    """`model` with every BatchNorm that trains replaced by SyncBatchNorm (which torch has for CUDA alone).

    Without BatchNorm, or where every rank sees whole batches, the model itself. micros: micro-batches that a pipeline
    makes of a rank's rows. Raises TrainingError on CPU ranks, and under a pipeline that cuts the batch.
    """
    found = batch_norms(model)
    if (axes.size("dp") == 1 and micros == 1) or not found:
        return model
    if micros > 1:
        raise TrainingError(
            f"BatchNorm {found[0]!r} would see one micro-batch of the pipeline at a time, not the whole batch.",
            numbers=f"{len(found)} BatchNorm module{'s' * (len(found) > 1)}, {micros} micro-batches",
            hint="microbatches=1; or nn.GroupNorm or nn.LayerNorm; or module.eval() on it: that freezes its statistics",
        )
    if device.type == "cuda":
        group = axes.group("dp")
        return nn.SyncBatchNorm.convert_sync_batchnorm(model, group)  # type: ignore[no-any-return]
    raise TrainingError(
        f"BatchNorm {found[0]!r} would see only a part of each batch: torch synchronises it over ranks on CUDA alone.",
        numbers=f"{len(found)} BatchNorm module{'s' * (len(found) > 1)}, {axes.size('dp')} CPU ranks",
        hint="nn.GroupNorm or nn.LayerNorm; or one rank; or module.eval() on it, which freezes its statistics",
    )


def check_level(total: int, *, ranks: int, microbatch_size: int | None) -> None:
    """Raises TrainingError when ranks would make unequal numbers of forwards: SyncBatchNorm waits for all of them.

    total: rows of the global batch; microbatch_size: rows per forward, None for all of a rank's.
    """
    fewest, most = total // ranks, -(-total // ranks)
    forwards = [-(-rows // (microbatch_size or max(rows, 1))) for rows in (fewest, most)]
    if forwards[0] != forwards[1]:
        raise TrainingError(
            "The ranks would make unequal numbers of forwards, and BatchNorm waits for all of them in each.",
            numbers=f"{total} rows over {ranks} ranks: {most} or {fewest}, {forwards[1]} or {forwards[0]} forwards",
            hint="drop_last=True",
        )
