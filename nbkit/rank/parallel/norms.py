"""BatchNorm couples the samples of a batch: over several ranks it is synchronised or refused, never different."""

from __future__ import annotations

import torch
from torch import nn

from nbkit.errors import TrainingError

__all__ = ["check_level", "synchronised"]


def synchronised(model: nn.Module, *, world_size: int, device: torch.device) -> nn.Module:
    """`model` with every BatchNorm that trains replaced by SyncBatchNorm (which torch has for CUDA alone).

    On one rank, or without BatchNorm, the model itself. Raises TrainingError on CPU ranks.
    """
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]
    if world_size == 1 or not found:
        return model
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return]
    raise TrainingError(
        f"BatchNorm {found[0]!r} would see only a part of each batch: torch synchronises it over ranks on CUDA alone.",
        numbers=f"{len(found)} BatchNorm module{'s' * (len(found) > 1)}, {world_size} CPU ranks",
        hint="nn.GroupNorm or nn.LayerNorm; or one rank; or module.eval() on it, which freezes its statistics",
    )


def check_level(total: int, *, ranks: int, microbatch: int | None) -> None:
    """Raises TrainingError when ranks would make unequal numbers of forwards: SyncBatchNorm waits for all of them.

    total: rows of the global batch; microbatch: rows per forward, None for all of a rank's.
    """
    fewest, most = total // ranks, -(-total // ranks)
    forwards = [-(-rows // (microbatch or max(rows, 1))) for rows in (fewest, most)]
    if forwards[0] != forwards[1]:
        raise TrainingError(
            "The ranks would make unequal numbers of forwards, and BatchNorm waits for all of them in each.",
            numbers=f"{total} rows over {ranks} ranks: {most} or {fewest}, {forwards[1]} or {forwards[0]} forwards",
            hint="drop_last=True",
        )
