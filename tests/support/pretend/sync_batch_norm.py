"""torch's SyncBatchNorm on the pretended device: its kernels, which torch has only for GPUs, in plain operations.

Its communication and reads on the host stay torch's own. Shapes: input (N, C, ...), statistics (C,), counts (ranks,).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_kept: list[torch.library.Library] = []
"""Keeps the registrations: they end with their library object."""


def install() -> None:
    """Replace the kernels for the rest of this process's life."""
    forward, kind = nn.SyncBatchNorm.forward, torch._C._get_privateuse1_backend_name

    def on_device(module: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        torch._C._get_privateuse1_backend_name = lambda: "cpu"  # a device kind that it accepts
        try:
            return forward(module, input)
        finally:
            torch._C._get_privateuse1_backend_name = kind

    nn.SyncBatchNorm.forward = on_device  # type: ignore[method-assign]
    _kept.append(torch.library.Library("aten", "IMPL"))
    for kernel in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        _kept[0].impl(kernel.__name__, kernel, "CPU")


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(input, _rows(input), correction=0)
    return mean, (variance + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input: Tensor, mean: Tensor, invstd: Tensor, running_mean: Any, running_var: Any, momentum: float, eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return mean and invstd (C,) over all ranks. mean, invstd: (ranks, C)."""
    share, total = (counts / counts.sum())[:, None], counts.sum()
    whole = (share * mean).sum(0)
    variance = (share * (invstd.pow(-2) - eps + (mean - whole).square())).sum(0)
    if running_mean is not None:
        running_mean.lerp_(whole, momentum)
        running_var.lerp_(variance * total / (total - 1), momentum)
    return whole, (variance + eps).rsqrt()


def batch_norm_elemt(input: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    found = (input - _of(mean, input)) * _of(invstd, input)
    found = found if weight is None else found * _of(weight, input)
    return found if bias is None else found + _of(bias, input)


def batch_norm_backward_reduce(
    grad: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Any, of_input: bool, of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    sum_dy = grad.sum(_rows(grad))
    sum_dy_xmu = (grad * (input - _of(mean, input))).sum(_rows(grad))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy.clone()


def batch_norm_backward_elemt(
    grad: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Any, sum_dy: Tensor, sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:  # fmt: skip
    total = count.sum()
    normal = (input - _of(mean, input)) * _of(invstd.square() * sum_dy_xmu / total, input)
    found = (grad - _of(sum_dy / total, grad) - normal) * _of(invstd, grad)
    return found if weight is None else found * _of(weight, grad)


def _rows(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _of(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.ndim - 2))
