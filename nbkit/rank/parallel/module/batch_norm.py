"""BatchNorm couples the samples of a batch: over several ranks it is synchronised or refused, never different."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nbkit.errors import TrainingError
from nbkit.rank.data.batch import Parts, numbers_of
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.torch_private import BatchNorm, graph_task_id


def batch_norms(model: nn.Module) -> list[str]:
    """Names of every BatchNorm that takes its statistics from the batch."""
    return [name for name, part in model.named_modules() if isinstance(part, BatchNorm) and part.training]


def synchronised(model: nn.Module, *, axes: Axes, micros: int, device: torch.device) -> nn.Module:
    """`model` with every BatchNorm replaced by one whose statistics are those of the rows of all ranks of `dp`.

    Without BatchNorm that trains, or where every rank sees whole batches, the model itself. micros: micro-batches that
    a pipeline makes of a rank's rows. Raises TrainingError under a pipeline that cuts the batch.
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
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model, axes.group("dp"))
    if not accelerator().holds(device):
        for module in model.modules():
            if isinstance(module, nn.SyncBatchNorm):
                module.__class__ = CpuSyncBatchNorm
    return model


class CpuSyncBatchNorm(nn.SyncBatchNorm):
    """nn.SyncBatchNorm for tensors on the CPU, which torch refuses there."""

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, ...) -> the same shape. Running statistics are those of the rows of all ranks."""
        self._check_input_dim(input)
        if not self.training:
            mean, variance = self.running_mean, self.running_var
            return nn.functional.batch_norm(input, mean, variance, self.weight, self.bias, mean is None, 0.0, self.eps)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, self.process_group)
        # Forward runs again, within backward, where activations are recomputed: the batch counts once.
        if self.running_mean is not None and graph_task_id() < 0:
            self._update(mean, variance * (count / max(count - 1, 1)))
        return output  # type: ignore[no-any-return]

    def _update(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)


class _Normalize(torch.autograd.Function):
    """Batch normalization over the rows of all ranks of a group: one collective forward, one backward.

    Means and variances of the ranks are merged as in Chan, Golub, LeVeque: "Updating Formulae and a Pairwise Algorithm
    for Computing Sample Variances" (1979), in float64.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        channels = input.shape[1]
        variance, mean = torch.var_mean(input.double(), _summed(input), correction=0)
        own = torch.cat([torch.tensor([input.numel() / channels], dtype=torch.float64), mean, variance])
        found = own.new_empty(dist.get_world_size(group) * len(own))
        dist.all_gather_into_tensor(found, own, group=group)
        # (ranks, 1), (ranks, C), (ranks, C)
        counts, means, variances = found.view(-1, len(own)).split((1, channels, channels), dim=1)
        share = counts / (count := counts.sum())
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean).square())).sum(0)  # biased
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(input, weight, mean, scale)
        ctx.group, ctx.count, ctx.biased = group, float(count), bias is not None
        factor = scale if weight is None else scale * weight.double()
        offset = -mean * factor if bias is None else bias.double() - mean * factor
        output = input * _of_channels(factor, input) + _of_channels(offset, input)
        ctx.mark_non_differentiable(mean, variance)
        return output, mean, variance, float(count)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        input, weight, mean, scale = ctx.saved_tensors
        normal = input * _of_channels(scale, input) - _of_channels(mean * scale, input)
        dims = _summed(grad)
        own = torch.stack([grad.sum(dims, dtype=torch.float64), (grad * normal).sum(dims, dtype=torch.float64)])
        sums = own.clone()
        dist.all_reduce(sums, group=ctx.group)
        to_shift, to_scale = sums / ctx.count
        factor = scale if weight is None else scale * weight.double()
        inner = grad - _of_channels(to_shift, grad) - normal * _of_channels(to_scale, grad)
        return (
            inner * _of_channels(factor, grad),
            None if weight is None else own[1].to(weight.dtype),
            own[0].to(grad.dtype) if ctx.biased else None,
            None,
            None,
        )


def _summed(x: Tensor) -> list[int]:
    """All dimensions of (N, C, ...) but C."""
    return [0, *range(2, x.ndim)]


def _of_channels(values: Tensor, like: Tensor) -> Tensor:
    """(C,) as (1, C, 1, ...), in the dtype of `like`."""
    return values.to(like.dtype).view(1, -1, *[1] * (like.ndim - 2))


def check_level(total: int, *, ranks: int, microbatch_size: int | None, parts: Parts = None) -> None:
    """Raises TrainingError unless every rank makes one forward: SyncBatchNorm waits for all of them.

    total: rows of the global batch; microbatch_size: rows per forward, None for all of a rank's; parts: see Shard.
    """
    sizes = [len(numbers_of(parts, total, ranks, rank)) for rank in range(ranks)]
    fewest, most = min(sizes), max(sizes)
    forwards = [-(-rows // (microbatch_size or max(rows, 1))) for rows in (fewest, most)]
    numbers = f"{total} rows over {ranks} ranks: {most} or {fewest}, {forwards[1]} or {forwards[0]} forwards"
    if forwards[0] != forwards[1]:
        raise TrainingError(
            "The ranks would make unequal numbers of forwards, and BatchNorm waits for all of them in each.",
            numbers=numbers,
            hint="drop_last=True",
        )
    if forwards[1] > 1:
        raise TrainingError(
            "BatchNorm would see one micro-batch at a time, not the whole batch.",
            numbers=numbers,
            hint="microbatch_size=None; or nn.GroupNorm or nn.LayerNorm; or module.eval() on it",
        )
