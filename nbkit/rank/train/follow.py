"""What a user has changed on the model meanwhile goes along to the next side: what is frozen, evaluates, or drops."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from nbkit.rank.parallel.side import Side

__all__ = ["follow"]


def follow(side: Side, skeleton: nn.Module, *, world_size: int) -> None:
    """Give `skeleton` what the module of `side` has by now. Collective: a pipeline stage knows of its own blocks."""
    own = (
        {name: p.requires_grad for name, p in side.held.items()},
        {path: part.training for path, part in side.module.named_modules() if side.runs(f"{path}.")},
        {path: part.p for path, part in side.module.named_modules() if _drops(part) and side.runs(f"{path}.")},
    )
    everyone = [own]
    if world_size > 1:
        everyone = [({}, {}, {}) for _ in range(world_size)]
        dist.all_gather_object(everyone, own)
    params, parts = dict(skeleton.named_parameters()), dict(skeleton.named_modules())
    for trained, modes, drops in everyone:
        for name, value in trained.items():
            params[name].requires_grad_(value)
        for path, training in modes.items():
            if path in parts:
                parts[path].training = training
        for path, p in drops.items():
            if path in parts:
                parts[path].p = p


def _drops(part: nn.Module) -> bool:
    return isinstance(part, nn.modules.dropout._DropoutNd)
