"""BatchNorm couples the samples of a batch. Over several ranks it is synchronised or refused, so that results stay
correct.

Buffers that a forward pass updates (running statistics) may become different on each rank. Then an error names the
buffer.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from nbkit.errors import TrainingError
from nbkit.rank.data.batch import Parts, numbers_of
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.module.forward_wrapper import Wrapper, wrap, wrapped_by
from nbkit.rank.parallel.module.kept_outputs import kept
from nbkit.rank.torch_private import BatchNorm, graph_task_id, sync_batch_norm


def batch_norms(model: nn.Module) -> list[str]:
    """Return the names of all BatchNorms that take their statistics from the batch."""
    return [name for name, part in model.named_modules() if isinstance(part, BatchNorm) and part.training]


def synchronised(model: nn.Module, *, axes: Axes, micros: int, device: torch.device) -> nn.Module:
    """Return `model`, with every BatchNorm taking its statistics from the rows of all ranks of `dp`.

    The model is unchanged if no BatchNorm trains, or if every rank sees whole batches. micros: number of micro-batches
    into which a pipeline splits a rank's rows. Raises TrainingError for a pipeline that splits the batch.
    """
    found = batch_norms(model)
    if (axes.size("dp") == 1 and micros == 1) or not found:
        return model
    if micros > 1:
        raise TrainingError(
            f"BatchNorm {found[0]!r} would compute its statistics from one micro-batch of the pipeline, not from the "
            "whole batch.",
            numbers=f"{len(found)} BatchNorm module{'s' * (len(found) > 1)}, {micros} micro-batches",
            hint="microbatches=1; or nn.GroupNorm or nn.LayerNorm; or module.eval() on it: that freezes its statistics",
        )
    on_device = accelerator().holds(device)
    for part in model.modules():
        if isinstance(part, BatchNorm):
            vars(part)["process_group"] = axes.group("dp")
            if takes_all_ranks(part):
                continue
            own = type(part).forward is not nn.BatchNorm1d.forward or "forward" in vars(part)
            wrap(part, _OwnForward(part, on_device) if own else OfAllRanks(part, on_device))
    return model


class OfAllRanks(Wrapper):
    """The forward of a plain BatchNorm over the rows of all ranks. Like nn.SyncBatchNorm, but also works on a CPU."""

    def __init__(self, part: nn.Module, on_device: bool) -> None:
        super().__init__(part.forward)
        self._part, self._on_device = part, on_device

    def __call__(self, input: Tensor) -> Tensor:
        """Normalize (N, C, ...) to the same shape. Running statistics are computed from the rows of all ranks."""
        part: Any = self._part
        if not part.training:
            return self.plain(input)  # type: ignore[no-any-return]
        part._check_input_dim(input)
        tracks = part.track_running_stats
        tracked = part.num_batches_tracked if tracks else None
        if tracked is not None and not _runs_again():
            tracked.add_(1)
        factor = part.momentum if part.momentum is not None or tracked is None else 1 / float(tracked)
        mean, variance = (part.running_mean, part.running_var) if tracks else (None, None)
        held = part.weight, part.bias, factor, part.eps, part.process_group
        return _of_all_ranks(input, mean, variance, *held, self._on_device)


def _runs_again() -> bool:
    """Return True in a forward that runs within backward, to recompute activations. A batch must count only once."""
    return graph_task_id() >= 0


def takes_all_ranks(part: nn.Module) -> bool:
    """Return True if `part` is a BatchNorm that waits for all ranks in each forward."""
    return isinstance(part, nn.SyncBatchNorm) or wrapped_by(part, OfAllRanks) or wrapped_by(part, _OwnForward)


class _OwnForward(Wrapper, TorchFunctionMode):
    """The forward of a BatchNorm subclass that does more than normalize, for example apply an activation.

    It normalizes over the rows of all ranks.
    """

    def __init__(self, part: nn.Module, on_device: bool) -> None:
        TorchFunctionMode.__init__(self)
        Wrapper.__init__(self, part.forward)
        self._part, self._on_device = part, on_device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracked = self._part._buffers.get("num_batches_tracked")
        before = tracked.clone() if tracked is not None and _runs_again() else None
        with self:
            output = self.plain(*args, **kwargs)
        if before is not None and tracked is not None:
            tracked.copy_(before)
        return output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.batch_norm:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(func).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        input, mean, variance, weight, bias, training, factor, eps = given.arguments.values()
        if not training or not self._part.training:
            return func(*args, **(kwargs or {}))
        group: Any = self._part.process_group
        return _of_all_ranks(input, mean, variance, weight, bias, factor, eps, group, self._on_device)


def _of_all_ranks(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    factor: float | None,
    eps: float,
    group: Any,
    on_device: bool,
) -> Tensor:
    """Run F.batch_norm in training over the rows of all ranks of `group`. on_device: use torch's accelerator
    kernels."""
    if _runs_again():
        running_mean = running_var = None
    if on_device:
        running, size = (running_mean, running_var), dist.get_world_size(group)
        return sync_batch_norm.apply(input, weight, bias, *running, eps, factor or 0.0, group, size)  # type: ignore[no-any-return]
    output, mean, variance, count = _Normalize.apply(input, weight, bias, eps, group)
    if running_mean is not None and running_var is not None and factor is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), factor)
        running_var.lerp_((variance * (count / max(count - 1, 1))).to(running_var.dtype), factor)
    return output  # type: ignore[no-any-return]


class _Normalize(torch.autograd.Function):
    """Batch normalization over the rows of all ranks of a group, with one collective in forward and one in backward.

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
        # (ranks, 1), (ranks, C), (ranks, C)
        counts, means, variances = _gathered(own, group).split((1, channels, channels), dim=1)
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


@kept
def _gathered(own: Tensor, group: Any) -> Tensor:
    """Return the vectors (N,) of all ranks, (ranks, N)."""
    found = own.new_empty(dist.get_world_size(group), len(own))
    _all_gather(found.view(-1), own, group=group)
    return found


def _summed(x: Tensor) -> list[int]:
    """Return all dimensions of (N, C, ...) except C."""
    return [0, *range(2, x.ndim)]


def _of_channels(values: Tensor, like: Tensor) -> Tensor:
    """Return `values` (C,) with shape (1, C, 1, ...), in the dtype of `like`."""
    return values.to(like.dtype).view(1, -1, *[1] * (like.ndim - 2))


def check_level(total: int, *, ranks: int, microbatch_size: int | None, parts: Parts = None) -> None:
    """Raise TrainingError unless every rank makes one forward pass, because SyncBatchNorm waits for all ranks.

    total: rows of the global batch. microbatch_size: rows per forward pass, None for all rows of a rank. parts: see
    Shard.
    """
    sizes = [len(numbers_of(parts, total, ranks, rank)) for rank in range(ranks)]
    fewest, most = min(sizes), max(sizes)
    forwards = [-(-rows // (microbatch_size or max(rows, 1))) for rows in (fewest, most)]
    numbers = f"{total} rows over {ranks} ranks: {most} or {fewest}, {forwards[1]} or {forwards[0]} forwards"
    if forwards[0] != forwards[1]:
        raise TrainingError(
            "Ranks would make different numbers of forward passes, but BatchNorm waits for all ranks in each forward "
            "pass.",
            numbers=numbers,
            hint="loading=nbkit.Loading(drop_last=True)",
        )
    if forwards[1] > 1:
        raise TrainingError(
            "BatchNorm would compute its statistics from one micro-batch, not from the whole batch.",
            numbers=numbers,
            hint="compute=nbkit.Compute(microbatch_size=None); or nn.GroupNorm or nn.LayerNorm; or module.eval() on it",
        )


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name warns


def kept_buffers(model: nn.Module) -> set[str]:
    """Return the names of the buffers in a state dict of `model`. Also works for a model in parts, which has none."""
    return {
        f"{path}.{name}" if path else name
        for path, part in model.named_modules(remove_duplicate=False)
        for name in part._buffers.keys() - part._non_persistent_buffers_set
    }


def watched(model: nn.Module) -> list[str]:
    """Return the names of the buffers to compare: those in a checkpoint. Other buffers are declared as temporary.

    Leave out BatchNorm's count of calls if it is not used, which is so with a momentum, because a pipeline makes more
    calls.
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
    """Compare the sums of the buffers `names` over the ranks that hold the same part of the model. All ranks must call
    it.

    Raises TrainingError, the same on every rank, which names the first buffer that differs.
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
            f"The forward pass updates the buffer {drifted[0]!r} from the rows of one rank, so the buffer would "
            "differ between ranks.",
            numbers=f"its sum on data ranks 0, 1, ...: {shown}{', ...' * (axes.size('dp') > 4)}; {len(drifted)} such "
            "buffers",
            hint="all-reduce it in forward; or track_running_stats=False; or one rank",
        )


def _sum(buffer: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements, weighted by position, so that moving a value to another element changes it."""
    numbers = buffer.detach().reshape(-1).to(torch.float64)
    return (numbers * torch.linspace(1.0, 2.0, numbers.numel(), dtype=torch.float64, device=numbers.device)).sum()
