"""Faster all-gather and reduce-scatter for groups that use gloo, made of gloo's all-to-all.

The all-gather here is for two ranks, and makes no copies. gloo's all-gather collects all parts in its own memory and
copies them from there, which takes three times the CPU time. For two ranks, one exchange of the same bytes is enough.
With more ranks gloo's all-gather is used. It passes parts around a ring, which crosses a link between two nodes less
often than exchanges do.

The reduce-scatter here sends only the bytes that the operation needs. gloo's reduce-scatter is an all-reduce of which
each rank keeps its part, so every rank sends 2 (n - 1) / n of the input. Here the ranks exchange the parts, which is
(n - 1) / n of the input, and each rank sums its n parts in the order of the ranks. nccl has a real reduce-scatter and
does not use this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import perf_counter_ns as now
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.rank.comm.gloo.interruptible_wait import future, wait


def options(timeout: timedelta) -> dist.AllToAllOptions:
    """Return the options of an exchange with this time-out."""
    found = dist.AllToAllOptions()
    found.timeout = timeout
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as flat bytes, so that gloo can send any dtype, even one that it cannot add."""
    return tensor.view(-1).view(torch.uint8)


def swap(inner: Any, received: Tensor, sent: Tensor, timeout: timedelta) -> Any:
    """Start to exchange tensors of one size with the other rank of a group of two. Returns gloo's handle."""
    splits = [0, 0]
    splits[1 - inner.rank()] = sent.nbytes
    return inner.alltoall_base(as_bytes(received), as_bytes(sent), splits, splits, options(timeout))


class GlooExchange(dist.Work):
    """A handle for messages under way. `finish` runs once, in the first call that finds that they have arrived."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], object], outputs: list[Tensor]) -> None:
        super().__init__()
        self._works, self._outputs, self._issued = works, outputs, now()
        self._finish: Callable[[], object] | None = finish
        self._lock = threading.Lock()

    def _end(self) -> None:
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            wait(work, self._issued, timeout)
        self._end()
        return True

    def is_completed(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            return False
        if self.is_success():
            self._end()
        return True

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        try:
            return next((error for work in self._works if (error := work.exception()) is not None), None)
        except TypeError:  # torch 2.11 can pass neither an exception nor None to Python
            return None if self.is_success() else RuntimeError("a message of this operation has failed")

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        def ended(done: torch.futures.Future[Any]) -> list[Tensor]:
            for one in done.value():
                one.value()  # raises what the exchange raised
            self._end()
            return self._outputs

        return torch.futures.collect_all([future(work, self._issued) for work in self._works]).then(ended)


def _all_gather_single(inner: Any, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work | None:
    """Gather by one exchange. Returns None if the inner group's own all-gather must be used.

    The choice must not depend on the memory layout of the tensors. The layout may differ on the other rank, and then
    the two ranks would wait for different messages.
    """
    if opts is None or inner.size() != 2 or not source.numel():
        return None
    # For arguments that do not fit, torch's own checks raise the error.
    if output.numel() != 2 * source.numel() or output.dtype != source.dtype:
        return None
    if any(tensor.device.type != "cpu" or tensor.is_sparse or tensor.is_complex() for tensor in (output, source)):
        return None
    if inner._get_backend(torch.device("cpu")).name() != "gloo":
        return None
    index, output, part = inner.rank(), output.detach(), source.detach().contiguous().view(-1)
    whole = output if output.is_contiguous() else output.new_empty(output.shape)
    rows = whole.view(2, -1)
    work: dist.Work = swap(inner, rows[1 - index], part, opts.timeout)
    if rows[index].data_ptr() != part.data_ptr():
        rows[index].copy_(part)
    return work if whole is output else GlooExchange([work], lambda: output.copy_(whole), [output])


ALL_GATHERS: dict[str, Callable[..., dist.Work | None]] = {
    "all_gather_single": _all_gather_single,
    "_allgather_base": _all_gather_single,
}


def _reduce(op: Any, ranks: int) -> Callable[..., Any] | None:
    """Return a function that reduces the parts of all ranks into `out=`; None for an operation that only gloo has.

    For two ranks it takes both parts as arguments, which takes half of the time. For more ranks it takes one tensor
    with the parts along dim 0.
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
    """Return the reduction if these tensors use gloo and it can be computed here; else None."""
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
    """Start a reduce-scatter of each (output, flat input): part r of the input goes to rank r.

    All tensors are in use until the returned work has been waited for.
    """
    works: list[Any] = []
    arrived: list[tuple[Tensor, ...]] = []
    ranks, index = inner.size(), inner.rank()
    for output, flat in pairs:
        if ranks == 2:
            # The rank's own part is added without a copy.
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

    return GlooExchange(works, finish, [output for output, _ in pairs])


# Each of these returns None if the inner group's own method must be used.
def _reduce_scatter_single(inner: Any, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work | None:
    return _coalesced(inner, [output], [source], opts)


def _coalesced(inner: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work | None:
    reduce = _serves(inner, [*outputs, *inputs], opts)
    if reduce is None:
        return None
    for output, source in zip(outputs, inputs, strict=True):
        # For arguments that do not fit, torch's own checks raise the error.
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


REDUCE_SCATTERS: dict[str, Callable[..., dist.Work | None]] = {
    "reduce_scatter": _list,
    "reduce_scatter_single": _reduce_scatter_single,
    "_reduce_scatter_base": _reduce_scatter_single,
    "reduce_scatter_single_coalesced": _coalesced,
    "reduce_scatter_tensor_coalesced": _coalesced,
}


_INSTEAD = {**REDUCE_SCATTERS, **ALL_GATHERS}

EXCHANGED = frozenset(_INSTEAD)
"""The names for which `method` returns another method than that of the inner group."""


def method(inner: Any, name: str) -> Callable[..., Any]:
    """Return the method `name` of an inner group. A method in `EXCHANGED` uses an exchange over gloo if possible."""
    own: Callable[..., Any] = getattr(inner, name)
    instead = _INSTEAD.get(name)
    if instead is None:
        return own

    def issue(*args: Any, **kwargs: Any) -> Any:
        work = instead(inner, *args, **kwargs) if not kwargs else None
        return own(*args, **kwargs) if work is None else work

    return issue
