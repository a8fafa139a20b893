"""Reduce-scatter over gloo at the bytes that the operation needs.

gloo's own is an all-reduce of which each rank keeps its part: 2 (n - 1) / n of the input leaves every rank. Here the
ranks exchange the parts, (n - 1) / n of the input, and each sums the n parts that are its own, always in the order of
the ranks. nccl has a real one and never comes by here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.rank.comm.gloo.exchange import Exchange, as_bytes, options, swap


def _reduce(op: Any, ranks: int) -> Callable[..., Any] | None:
    """What makes an output, out=, of the parts of all ranks; None for what gloo alone knows.

    Of two ranks it gets both parts, which takes half of the time, else a tensor that has them along dim 0.
    """
    if op == dist.ReduceOp.SUM:
        return torch.add if ranks == 2 else _sum
    if op == dist.ReduceOp.AVG:
        add = torch.add if ranks == 2 else _sum
        return lambda *parts, out: add(*parts, out=out).div_(ranks)
    if op == dist.ReduceOp.MAX:
        return torch.maximum if ranks == 2 else lambda parts, out: torch.amax(parts, 0, out=out)
    if op == dist.ReduceOp.MIN:
        return torch.minimum if ranks == 2 else lambda parts, out: torch.amin(parts, 0, out=out)
    return None


def _sum(parts: Tensor, *, out: Tensor) -> Tensor:
    return torch.sum(parts, 0, dtype=parts.dtype, out=out)


def _serves(inner: Any, tensors: Sequence[Tensor], opts: Any) -> Callable[..., Any] | None:
    """The reduction, when these tensors go over gloo and it can be made here."""
    if not isinstance(opts, dist.ReduceScatterOptions) or inner.size() == 1:
        return None
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.dtype is torch.bool or tensor.is_complex() or tensor.is_sparse:
            return None
    op: Any = opts.reduceOp
    if op == dist.ReduceOp.AVG and not all(tensor.is_floating_point() for tensor in tensors):
        return None
    return _reduce(op, inner.size()) if inner._get_backend(torch.device("cpu")).name() == "gloo" else None


def _exchange(inner: Any, pairs: Sequence[tuple[Tensor, Tensor]], opts: Any, reduce: Callable[..., Any]) -> dist.Work:
    """(output, flat input) of each: part r of the input goes to rank r. All are in use until the work is waited for."""
    works: list[Any] = []
    arrived: list[tuple[Tensor, ...]] = []
    ranks, index = inner.size(), inner.rank()
    for output, flat in pairs:
        if ranks == 2:
            # What a rank keeps is added where it lies.
            parts = flat.split(output.numel()) if output.numel() else (flat, flat)
            other = torch.empty_like(parts[index])
            works.append(swap(inner, other, parts[1 - index], opts.timeout))
            arrived.append((parts[index].view(output.shape), other.view(output.shape)))
        else:
            rows = flat.new_empty(ranks, *output.shape)
            splits = [output.numel() * output.element_size()] * ranks
            works.append(inner.alltoall_base(as_bytes(rows), as_bytes(flat), splits, splits, options(opts.timeout)))
            arrived.append((rows,))

    def finish() -> None:
        for (output, _), parts in zip(pairs, arrived, strict=True):
            reduce(*parts, out=output)

    return Exchange(works, finish, [output for output, _ in pairs])


# Each of these answers None where the inner group's own serves.
def _single(inner: Any, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work | None:
    return _coalesced(inner, [output], [source], opts)


def _coalesced(inner: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work | None:
    reduce = _serves(inner, [*outputs, *inputs], opts)
    if reduce is None:
        return None
    for output, source in zip(outputs, inputs, strict=True):
        # What does not fit is left to torch's own checks and messages.
        if source.numel() != inner.size() * output.numel() or source.dtype != output.dtype:
            return None
    flats = [source.detach().contiguous().view(-1) for source in inputs]
    return _exchange(
        inner, [(output.detach(), flat) for output, flat in zip(outputs, flats, strict=True)], opts, reduce
    )


def _list(inner: Any, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work | None:
    if not isinstance(outputs, list) or len(outputs) != 1 or len(inputs) != 1 or len(inputs[0]) != inner.size():
        return None
    output, parts = outputs[0], inputs[0]
    if any(part.numel() != output.numel() or part.dtype != output.dtype for part in parts):
        return None
    reduce = _serves(inner, [output, *parts], opts)
    if reduce is None:
        return None
    return _exchange(inner, [(output.detach(), torch.cat([part.detach().reshape(-1) for part in parts]))], opts, reduce)


INSTEAD: dict[str, Callable[..., dist.Work | None]] = {
    "reduce_scatter": _list,
    "reduce_scatter_single": _single,
    "_reduce_scatter_base": _single,
    "reduce_scatter_single_coalesced": _coalesced,
    "reduce_scatter_tensor_coalesced": _coalesced,
}
