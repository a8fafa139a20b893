"""Collectives with a gradient, which change how a tensor is distributed over a group.

A tensor is *whole* (it and its gradient are the same on every rank), *split* along a dim (`bounds` gives the lengths of
the parts, which may differ), or *partial* (its value is the sum over the ranks). A part is contiguous unless `parting`
says otherwise. A whole tensor has its own order. Each docstring says what the input and output are. The backward pass
is the transposed collective (Shoeybi et al. 2019, f and g; Korthikanti et al. 2022 for the sequence).

    function              forward           backward          sent per rank, forward + backward, tensor of S bytes
    copy_to               -                 all-reduce        0 + 2 S (n-1)/n
    reduce_from           all-reduce        -                 2 S (n-1)/n + 0
    split_to              -                 all-gather        0 + S (n-1)/n
    gather_from           all-gather        -                 S (n-1)/n + 0
    gather_seq            all-gather        reduce-scatter    S (n-1)/n + S (n-1)/n
    reduce_scatter_seq    reduce-scatter    all-gather        S (n-1)/n + S (n-1)/n
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from nbkit.rank.parallel.module.kept_outputs import kept
from nbkit.tensor_layout import Parting, Runs, contiguous, count

# torch 2.13 renamed these functions, and warns about the old names.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x` (whole -> whole), before a computation that the ranks divide. Backward sums their gradients."""
    return _Copy.apply(x, group)  # type: ignore[no-any-return]


def reduce_from(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks (partial -> whole)."""
    return _Reduce.apply(x, group)  # type: ignore[no-any-return]


def split_to(x: Tensor, group: dist.ProcessGroup, dim: int, parting: Parting = contiguous) -> Tensor:
    """Take this rank's part along `dim` (whole -> split)."""
    return _Split.apply(x, group, dim % x.ndim, parting)  # type: ignore[no-any-return]


def gather_from(x: Tensor, group: dist.ProcessGroup, dim: int, total: int, parting: Parting = contiguous) -> Tensor:
    """Gather parts along `dim` (split -> whole, `total` long), before a computation that every rank repeats."""
    return _Gather.apply(x, group, dim % x.ndim, total, parting)  # type: ignore[no-any-return]


def gather_seq(x: Tensor, group: dist.ProcessGroup, dim: int, total: int, parting: Parting = contiguous) -> Tensor:
    """Gather parts along `dim` (split -> whole, `total` long), before a computation that is divided over the ranks.

    Backward sums the gradients and splits them.
    """
    return _GatherSum.apply(x, group, dim % x.ndim, total, parting)  # type: ignore[no-any-return]


def reduce_scatter_seq(x: Tensor, group: dist.ProcessGroup, dim: int, parting: Parting = contiguous) -> Tensor:
    """Sum over the ranks and take this rank's part along `dim` (partial -> split)."""
    return _ReduceScatter.apply(x, group, dim % x.ndim, parting)  # type: ignore[no-any-return]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, parting: Parting) -> Tensor:
        ctx.group, ctx.dim, ctx.total, ctx.parting = group, dim, x.shape[dim], parting
        return _own(x, group, dim, parting)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _all_gather(grad, ctx.group, ctx.dim, ctx.total, ctx.parting), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, total: int, parting: Parting) -> Tensor:
        ctx.group, ctx.dim, ctx.parting = group, dim, parting
        return _all_gather(x, group, dim, total, parting)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        return _own(grad, ctx.group, ctx.dim, ctx.parting), None, None, None, None


class _GatherSum(_Gather):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        return _reduce_scatter(grad, ctx.group, ctx.dim, ctx.parting), None, None, None, None


class _ReduceScatter(_Split):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, parting: Parting) -> Tensor:
        ctx.group, ctx.dim, ctx.total, ctx.parting = group, dim, x.shape[dim], parting
        return _reduce_scatter(x, group, dim, parting)


@kept
def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # Copy, because autograd passes one gradient to several consumers.
    summed = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    return summed


def taken(x: Tensor, dim: int, runs: Runs) -> Tensor:
    """Return the `runs` of `x` along `dim`, concatenated. A single run is returned as a view."""
    found = [x.narrow(dim, start, stop - start) for start, stop in runs]
    return found[0] if len(found) == 1 else torch.cat(found, dim)


def together(parts: Sequence[Tensor], dim: int, total: int, parting: Parting) -> Tensor:
    """Return the whole tensor, `total` long along `dim`, from the `parts` of all ranks, which may end with padding."""
    runs = []
    for index, part in enumerate(parts):
        at = 0
        for start, stop in parting(total, len(parts), index):
            runs.append((start, part.narrow(dim, at, stop - start)))
            at += stop - start
    return torch.cat([run for _, run in sorted(runs, key=lambda run: run[0])], dim)


def _own(x: Tensor, group: dist.ProcessGroup, dim: int, parting: Parting) -> Tensor:
    runs = parting(x.shape[dim], group.size(), group.rank())
    own = taken(x, dim, runs)
    return own if len(runs) > 1 else own.clone(memory_format=torch.contiguous_format)


def padded(x: Tensor, dim: int, length: int) -> Tensor:
    """Return `x` with zeros at its end, so that it is `length` long along `dim`."""
    missing = length - x.shape[dim]
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x


@kept
def _all_gather(x: Tensor, group: dist.ProcessGroup, dim: int, total: int, parting: Parting) -> Tensor:
    """Gather the parts. Each is padded to the longest, with at most n - 1 slices of padding in total for n ranks."""
    size = group.size()
    longest = -(-total // size)
    sent = padded(x, dim, longest).contiguous()
    received = sent.new_empty((size, *sent.shape))
    if sent.numel():
        gather_single(received.view(-1), sent.view(-1), group=group)
    if dim == 0 and total == size * longest and parting is contiguous:
        return received.flatten(0, 1)
    return together(received.unbind(0), dim, total, parting)


@kept
def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int, parting: Parting) -> Tensor:
    size, total = group.size(), x.shape[dim]
    longest = -(-total // size)
    if parting is contiguous:
        parts = [taken(x, dim, contiguous(total, size, i)) for i in range(size)]
        sent = torch.stack([padded(part, dim, longest) for part in parts])
    else:
        # Copy run by run, to avoid temporary tensors.
        sent = x.new_empty((size, *x.shape[:dim], longest, *x.shape[dim + 1 :]))
        for i in range(size):
            at = 0
            for start, stop in parting(total, size, i):
                sent[i].narrow(dim, at, stop - start).copy_(x.narrow(dim, start, stop - start))
                at += stop - start
            sent[i].narrow(dim, at, longest - at).zero_()
    received = sent.new_empty(sent.shape[1:])
    if prod(received.shape):
        scatter_single(received.view(-1), sent.view(-1), group=group)
    own = count(parting(total, size, group.rank()))
    # Not a view, so that the model may change it in place.
    return received if own == longest else received.narrow(dim, 0, own).clone()
