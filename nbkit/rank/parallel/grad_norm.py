"""The norm of all gradients of a job, of which each rank holds some, and several ranks the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.rank.torch_private import foreach_mul_, foreach_norm

_SUMMED = 1 << 16
"""A CPU adds squares to float32 sums in order: of 38 M elements the norm is 0.3 % off, of this many 2e-7. A GPU sums
blocks as small as these by itself."""


@torch.no_grad()
def grad_norm(
    held: Mapping[str, nn.Parameter],
    replication: Mapping[str, int],
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    world_size: int | None = None,
) -> Tensor:
    """Return the 2-norm of the gradients of a job, float64, 0-dimensional, on `device`; nothing waits for it.
    Collective.

    replication: name -> how many ranks of `group` (None: the world) hold each element of this gradient, which counts
    once. world_size: 1 sends nothing. The sum of squares / replication over the ranks, one all-reduce of one number.
    """
    alike: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for name, p in held.items():
        if p.grad is not None and p.grad.numel():
            alike.setdefault((replication.get(name, 1), p.grad.dtype), []).append(p.grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (copies, dtype), grads in alike.items():
        # Of bfloat16, the norm would be rounded to bfloat16.
        norms = foreach_norm(_pieces(grads, device), 2, dtype=torch.promote_types(dtype, torch.float32))
        total += torch.stack(norms).to(torch.float64).square().sum() / copies
    if (dist.get_world_size(group) if world_size is None else world_size) > 1:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def _pieces(grads: list[Tensor], device: torch.device) -> list[Tensor]:
    """Of at most `_SUMMED` elements each, where they are summed one after the other."""
    if device.type != "cpu":
        return grads
    return [piece for grad in grads for piece in grad.reshape(-1).split(_SUMMED)]


@torch.no_grad()
def clip(held: Mapping[str, nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients so that their norm, which was `norm`, is at most `max_norm`; nothing waits."""
    # As torch.nn.utils.clip_grad_norm_ does it.
    scale((p.grad for p in held.values() if p.grad is not None), torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def scale(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply the gradients by a 0-dimensional factor, whose dtype changes none of theirs; nothing waits."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        alike.setdefault(grad.dtype, []).append(grad)
    for dtype, some in alike.items():
        # A device does all with one kernel where the dtypes are equal. A half would round the factor by up to 0.4 %.
        foreach_mul_(some, factor.to(dtype) if dtype in (torch.float32, torch.float64) else factor)
