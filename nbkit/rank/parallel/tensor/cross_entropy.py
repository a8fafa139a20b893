"""Cross entropy of logits whose vocabulary is spread over a group (Shoeybi et al. 2019, 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.rank.torch_private import assert_async
from nbkit.tensor_layout import bounds


def split_cross_entropy(
    logits: Tensor, target: Tensor, group: dist.ProcessGroup, *, total: int, ignore_index: int, smoothing: float
) -> Tensor:
    """Losses (N,), zero where the target is `ignore_index`; the same on every rank. Half precision computes in float32.

    logits: this rank's columns (N, V / n) of `total` by `bounds`; target: ids (N,) in the whole vocabulary;
    smoothing: as F.cross_entropy's label_smoothing. A target outside of the vocabulary is an error of the device.
    """
    return _SplitCrossEntropy.apply(logits, target, group, total, ignore_index, smoothing)  # type: ignore[no-any-return]


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: dist.ProcessGroup, total: int, ignore: int, smoothing: float
    ) -> Tensor:
        x = logits.float() if logits.dtype.itemsize < 4 else logits
        start, stop = bounds(total, group.size(), group.rank())
        counted = target != ignore
        assert_async((~counted | ((target >= 0) & (target < total))).all(), "a target lies outside of the vocabulary")
        highest = x.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = x - highest[:, None]
        here = counted & (target >= start) & (target < stop)
        column = torch.where(here, target - start, 0)[:, None]
        hit = torch.where(here, shifted.gather(1, column)[:, 0], 0)
        sums = [hit, shifted.sum(-1)] if smoothing else [hit]
        probability = shifted.exp_()
        parts = torch.stack([probability.sum(-1), *sums])
        dist.all_reduce(parts, group=group)
        log_sum = parts[0].log()
        losses = log_sum - parts[1]
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (log_sum - parts[2] / total)
        probability.div_(parts[0][:, None])
        ctx.save_for_backward(probability, column, here, counted)
        ctx.total, ctx.smoothing, ctx.dtype = total, smoothing, logits.dtype
        return torch.where(counted, losses, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # type: ignore[override]
        probability, column, here, counted = ctx.saved_tensors
        hit = (here.to(probability.dtype) * (1 - ctx.smoothing))[:, None]
        result = probability.scatter_add(1, column, -hit)
        if ctx.smoothing:
            result = result - ctx.smoothing / ctx.total
        result = result * torch.where(counted, grad, 0)[:, None]
        return result.to(ctx.dtype), None, None, None, None, None
