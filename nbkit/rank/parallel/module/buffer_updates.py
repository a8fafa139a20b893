"""Buffers that a forward pass updates (running statistics) drift apart per rank: refused by name, never silently so."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.device_mesh import Axes

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name warns


def kept_buffers(model: nn.Module) -> set[str]:
    """Return the names of the buffers that a state dict of `model` has. Of a model in parts one cannot ask for that."""
    return {
        f"{path}.{name}" if path else name
        for path, part in model.named_modules(remove_duplicate=False)
        for name in part._buffers.keys() - part._non_persistent_buffers_set
    }


def watched(model: nn.Module) -> list[str]:
    """Return the names of the buffers to compare: those that a checkpoint holds. Others are scratch by declaration.

    Without the calls that a BatchNorm counts and, having a momentum, does not use: a pipeline makes more of them.
    """
    kept = kept_buffers(model)
    unused = {
        id(part.num_batches_tracked)
        for part in model.modules()
        if getattr(part, "num_batches_tracked", None) is not None and getattr(part, "momentum", None) is not None
    }
    return [
        name
        for name, buffer in model.named_buffers()
        if name in kept and id(buffer) not in unused and not buffer.is_sparse and not buffer.is_complex()
    ]


@torch.no_grad()
def check_buffers(model: nn.Module, names: list[str], *, axes: Axes, device: torch.device) -> None:
    """Compare the sums of the buffers `names` over the ranks that hold the same part of the model. Collective.

    Raises TrainingError, the same on every rank, naming the first that differs.
    """
    group = axes.group("dp")
    if group is None or not names:
        return
    held = dict(model.named_buffers())
    none = torch.zeros((), device=device)
    sums = torch.stack([_sum(held.get(name, none)) for name in names])
    everyone = sums.new_empty(axes.size("dp"), len(names))
    _all_gather(everyone.view(-1), sums, group=group)
    same = ((everyone == everyone[0]) | everyone.isnan() & everyone[0].isnan()).all(dim=0).tolist()
    drifted = [name for name, equal in zip(names, same, strict=True) if not equal]
    if drifted:
        shown = ", ".join(f"{value:.6g}" for value in everyone[:4, names.index(drifted[0])].tolist())
        raise TrainingError(
            f"The forward pass updates the buffer {drifted[0]!r} from this rank's rows alone: the ranks drift apart.",
            numbers=f"its sum on data ranks 0, 1, ...: {shown}{', ...' * (axes.size('dp') > 4)}; "
            f"{len(drifted)} such buffers",
            hint="all-reduce it in forward; or track_running_stats=False; or one rank",
        )


def _sum(buffer: torch.Tensor) -> torch.Tensor:
    """Weighed by place, so that what is counted in another element shows."""
    numbers = buffer.detach().reshape(-1).to(torch.float64)
    return (numbers * torch.linspace(1.0, 2.0, numbers.numel(), dtype=torch.float64, device=numbers.device)).sum()
