"""The torch half of tp_chunks=: a row map whose sum over the ranks overlaps with its product, piece by piece.

Forward computes a piece of the product and starts its collective, then computes the next piece. Without sequence
parallelism the collective is an all-reduce, and backward has none. With it, forward reduce-scatters the positions, and
backward gathers the gradient of the next piece while it multiplies one with the weight. The gradient of the weight is
one product over all rows. Sums and bytes are those of `reduce_from` and `reduce_scatter_seq` (collectives.py).

Wang et al. 2023, "Overlap communication with dependent computation via decomposition". torchtitan's asynchronous tensor
parallelism and Megatron's tp-comm-overlap use kernels that copy between GPUs. Here a piece is one ordinary collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nbkit.rank.parallel.module.kept_outputs import kept
from nbkit.rank.parallel.tensor.collectives import gather_single, padded, scatter_single, taken
from nbkit.techniques.tp_chunks import pieces
from nbkit.tensor_layout import Runs, bounds


def chunked_sum(x: Tensor, weight: Tensor, group: dist.ProcessGroup, chunks: int, *, sequence: bool) -> Tensor | None:
    """Return `x @ weight.T`, summed over the ranks in at most `chunks` pieces. Return None if this is not possible.

    x: (..., inputs of this rank). weight: (outputs, inputs of this rank). With `sequence`, x is (rows, positions,
    inputs), and the result has this rank's positions.
    """
    if type(x) is not Tensor or type(weight) not in (Tensor, nn.Parameter) or x.ndim < 2 or not prod(x.shape[:-1]):
        # Another class of tensor may compute something else. A rank without input features takes part, as others wait.
        return None
    if (dtype := _autocast_dtype(x)) is not None:
        x, weight = x.to(dtype), weight.to(dtype)
    if x.dtype != weight.dtype or (sequence and x.ndim != 3):
        return None
    with torch.autocast(x.device.type, enabled=False):  # its cache would keep a weight without a graph
        if sequence:
            place = _GatheredProduct.apply(x, weight, group, chunks)
            return _Sum.apply(place, lambda: _scattered(x.detach(), weight.detach(), group, chunks))  # type: ignore[no-any-return]
        flat = x.flatten(0, -2)
        y = _Sum.apply(_Product.apply(flat, weight), lambda: _summed(flat.detach(), weight.detach(), group, chunks))
    return y.unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    if not torch.is_autocast_enabled(x.device.type) or not x.is_floating_point() or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(x.device.type)


# A map has two nodes in the graph. The first one saves tensors for backward, and computes the backward. Its output has
# no values. The second one computes the forward. Recomputation ends with the last tensor that is saved, so it neither
# computes the last map of a block nor sends its output, which nobody needs.


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return _save(ctx, x, weight, len(x))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return None if weight is None else grad @ weight, None if x is None else grad.t() @ x


class _GatheredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup, chunks: int) -> Tensor:
        ctx.group, ctx.chunks, ctx.total = group, chunks, x.shape[1]
        start, stop = bounds(ctx.total, group.size(), group.rank())
        return _save(ctx, x, weight, len(x), stop - start)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        whole = grad.new_empty(len(grad), ctx.total, grad.shape[2])
        grad_x = None if weight is None else grad.new_empty(*whole.shape[:2], weight.shape[1])
        for piece in _gathered(grad, whole, ctx.group, ctx.chunks):
            if grad_x is not None:
                piece.put(piece.of(whole) @ weight, grad_x)
        grad_weight = None if x is None else whole.flatten(0, 1).t() @ x.flatten(0, 1)
        return grad_x, grad_weight, None, None


def _save(ctx: Any, x: Tensor, weight: Tensor, *shape: int) -> Tensor:
    """Save what backward needs. Return a tensor (*shape, outputs) without values."""
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
    return x.new_empty(()).expand(*shape, len(weight))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


# Arguments of the following functions have no gradient, so that a selective recomputation keeps the results only.


@kept
def _summed(x: Tensor, weight: Tensor, group: dist.ProcessGroup, chunks: int) -> Tensor:
    y, works = x.new_empty(len(x), len(weight)), []
    for start, stop, _, _ in pieces(len(x), 1, chunks):
        torch.mm(x[start:stop], weight.t(), out=y[start:stop])
        works.append(dist.all_reduce(y[start:stop], group=group, async_op=True))
    _wait(works)
    return y


@kept
def _scattered(x: Tensor, weight: Tensor, group: dist.ProcessGroup, chunks: int) -> Tensor:
    start, stop = bounds(x.shape[1], group.size(), group.rank())
    y, works, sent = x.new_empty(len(x), -(-x.shape[1] // group.size()), len(weight)), [], []
    for piece in _Piece.every(x.shape[0], x.shape[1], group, chunks):
        parts = F.linear(piece.of(x), weight).split([stop - start for start, stop in piece.runs], 1)
        # A collective uses its tensors until it has been waited for.
        sent.append(torch.stack([padded(part, 1, piece.length) for part in parts]))
        works.append(scatter_single(piece.part(y).view(-1), sent[-1].view(-1), group=group, async_op=True))
    _wait(works)
    # Not a view, so that the model may change it in place.
    return y if y.shape[1] == stop - start else y[:, : stop - start].clone()


def _gathered(grad: Tensor, whole: Tensor, group: dist.ProcessGroup, chunks: int) -> Iterator[_Piece]:
    """Gather `grad`, this rank's positions, in `whole`, all positions. Yield each piece that has arrived.

    The next piece is under way meanwhile.
    """
    coming: list[tuple[_Piece, Tensor, Tensor, Any]] = []
    for piece in [*_Piece.every(whole.shape[0], whole.shape[1], group, chunks), None]:
        if piece is not None:
            sent = padded(piece.part(grad), 1, piece.length).contiguous()
            received = sent.new_empty(group.size(), *sent.shape)
            work = gather_single(received.view(-1), sent.view(-1), group=group, async_op=True)
            coming.append((piece, sent, received, work))
        if len(coming) > (piece is not None):
            arrived, sent, received, work = coming.pop(0)
            _wait([work])
            arrived.put(received, whole)
            yield arrived


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


@dataclass(frozen=True)
class _Piece:
    """A piece of a tensor (rows, positions, ...) whose positions are split over ranks.

    rows: of the tensor. within: positions in the part of each rank, padded to the longest part. runs: the positions in
    the whole tensor, for each rank; a run may be shorter than `within`. is_full: True if it has all positions.
    """

    rows: slice
    within: slice
    runs: Runs
    is_full: bool

    @classmethod
    def every(cls, rows: int, total: int, group: dist.ProcessGroup, chunks: int) -> Iterator[_Piece]:
        """Yield the pieces of a tensor with `rows` rows and `total` positions."""
        size = group.size()
        parts, longest = [bounds(total, size, i) for i in range(size)], -(-total // size)
        for first, last, begin, end in pieces(rows, longest, chunks):
            runs = tuple((min(start + begin, stop), min(start + end, stop)) for start, stop in parts)
            yield cls(slice(first, last), slice(begin, end), runs, end - begin == longest)

    @property
    def length(self) -> int:
        """Return the positions that each rank sends, padding included."""
        return self.within.stop - self.within.start  # type: ignore[no-any-return]

    def part(self, x: Tensor) -> Tensor:
        """Return the piece of a tensor that has the positions of one rank."""
        return x[self.rows, self.within]

    def of(self, x: Tensor) -> Tensor:
        """Return the piece of a tensor that has all positions: the runs of all ranks, concatenated."""
        return x[self.rows] if self.is_full else taken(x[self.rows], 1, self.runs)

    def put(self, x: Tensor, into: Tensor) -> None:
        """Copy `x` into a tensor that has all positions. x: a result of `of`, or the padded parts of all ranks."""
        if x.ndim == into.ndim and self.is_full:
            into[self.rows] = x
            return
        lengths = [stop - start for start, stop in self.runs]
        parts = x.split(lengths, 1) if x.ndim == into.ndim else x.unbind(0)
        for (start, stop), part in zip(self.runs, parts, strict=True):
            into[self.rows, start:stop] = part[:, : stop - start]
