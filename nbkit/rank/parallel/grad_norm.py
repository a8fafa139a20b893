"""The norm of all gradients of a job. Each rank holds some of them, and several ranks may hold the same gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.rank.torch_private import foreach_mul_, foreach_norm

_SUMMED = 1 << 16
"""Maximum number of elements that a CPU sums at once. It adds squares to a float32 sum in order. With 38 M elements the
norm has an error of 0.3 %, with this many 2e-7. A GPU already sums in such small blocks."""


@torch.no_grad()
def grad_norm(
    held: Mapping[str, nn.Parameter],
    replication: Mapping[str, int],
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    world_size: int | None = None,
) -> Tensor:
    """Return the 2-norm of the gradients of a job: float64, 0-dimensional, on `device`. All ranks must call it.

    It does not synchronise with the device. replication: name -> number of ranks in `group` (None: the world) that hold
    each element of this gradient. Each element counts once. world_size: 1 sends nothing. The ranks sum their squares /
    replication in one all-reduce of one number.
    """
    alike: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for name, p in held.items():
        if p.grad is not None and p.grad.numel():
            alike.setdefault((replication.get(name, 1), p.grad.dtype), []).append(p.grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (copies, dtype), grads in alike.items():
        # The norm of bfloat16 gradients would otherwise be rounded to bfloat16.
        norms = foreach_norm(_pieces(grads, device), 2, dtype=torch.promote_types(dtype, torch.float32))
        total += torch.stack(norms).to(torch.float64).square().sum() / copies
    if (dist.get_world_size(group) if world_size is None else world_size) > 1:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def _pieces(grads: list[Tensor], device: torch.device) -> list[Tensor]:
    """Split gradients on a CPU into pieces of at most `_SUMMED` elements, because a CPU sums elements in order."""
    if device.type != "cpu":
        return grads
    return [piece for grad in grads for piece in grad.reshape(-1).split(_SUMMED)]


@torch.no_grad()
def clip(held: Mapping[str, nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients, whose norm is `norm`, to a norm of at most `max_norm`. It does not synchronise."""
    # The same formula as torch.nn.utils.clip_grad_norm_.
    scale((p.grad for p in held.values() if p.grad is not None), torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def scale(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply the gradients by a 0-dimensional factor without changing their dtypes. It does not synchronise."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        alike.setdefault(grad.dtype, []).append(grad)
    for dtype, some in alike.items():
        # With equal dtypes a device uses one kernel for all. A 16-bit dtype would round the factor by up to 0.4 %.
        foreach_mul_(some, factor.to(dtype) if dtype in (torch.float32, torch.float64) else factor)
