"""Sum gradients over ranks, bucket by bucket, while backward runs.

Each rank keeps a part of the sums: a reduce-scatter computes it, followed by an all-reduce for hsdp. With gradients of
S bytes and n ranks, each rank sends (n - 1) / n S bytes. The all-reduce across r replicas adds 2 (r - 1) / r S / n
bytes, or uses two levels if the replicas are on several nodes. One element per parameter and the canary are sent with
the gradients. The canary is an element that shows whether a reduction was completed (see `Reduction`).

Buckets. Neighbouring parameters share a message. Buckets follow the order in which backward finishes gradients, so that
the first ones are sent while the rest is computed. All ranks send them in the same order, even if autograd finishes
gradients in another order on some rank.

Packing. Tensors are split along dim 0 over ranks, and stored in a matrix with one row per rank, the layout of a
reduce-scatter or all-gather. Row r contains rank r's part of each tensor, one after the other. Every tensor starts in
the same column of every row. So if dim 0 of a tensor is not a multiple of the number of ranks, the rows of ranks that
hold one tensor row less have a gap. Tensors that are split evenly come first, so that a device moves all of them with
one kernel.

NCCL and vectorized kernels are slow on unaligned memory. A large part of a tensor begins at a multiple of 128 bytes, as
rows do. A small part, for which this padding would exceed one percent, begins at a multiple of 16 bytes.

Two levels. If a group has several ranks on each of several nodes, its all-reduce has two levels: see nbkit.mesh. With S
bytes, k nodes and L ranks of the group per node, a rank sends (L - 1) / L S bytes twice within its node, and 2 (k - 1)
/ k S / L bytes to other nodes. The canary is sent with them: see `TwoLevelSum`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.data_parallel.base import DataAxis
from nbkit.rank.parallel.device_mesh import Axes, LevelGroups
from nbkit.rank.torch_private import foreach_copy_
from nbkit.techniques.exchange import BUCKET, FIRST_BUCKET
from nbkit.tensor_layout import bounds


class Bucket:
    """Parameters whose gradients are sent together.

    missing: the number of gradients that backward has not computed yet. views: the place of each gradient in the
    bucket's buffer; empty if there is no buffer.
    """

    def __init__(self, params: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
        self.params, self.views = params, views
        self.missing = len(params)

    def adopt(self) -> None:
        """Move every gradient that autograd stored elsewhere into its view."""
        fresh = [
            (p, view, p.grad)
            for p, view in zip(self.params, self.views, strict=False)
            if p.grad is not None and p.grad is not view
        ]
        if fresh:
            foreach_copy_([view for _, view, _ in fresh], [grad for _, _, grad in fresh])
        for p, view, _ in fresh:
            p.grad = view

    def send(self) -> None:
        """Start the reduction. A parameter without a gradient counts as zeros."""
        raise NotImplementedError


B = TypeVar("B", bound=Bucket)


class BucketedAxis(DataAxis, Generic[B]):
    """A data axis that sends gradients in buckets of about `bucket` bytes. A subclass makes the buckets.

    params: name -> parameter.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], *, bucket: int = BUCKET) -> None:
        super().__init__()
        self._params, self._bytes = dict(params), bucket
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        # The hooks live as long as the parameters, which may belong to the user. So they must not hold the buckets.
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._armed, self._next = False, 0

    def _bucket(self, names: Sequence[str]) -> B:
        """Make a bucket of these parameters, which have one dtype and device."""
        raise NotImplementedError

    def begin_again(self) -> None:
        self._build(self._backward_order())
        self.reset()

    def replicas(self) -> dict[str, nn.Parameter]:
        return dict(self._params) if self.apart == 1 else {}

    def let_go(self) -> None:
        self.close()
        self._buckets.clear()
        self._home.clear()
        self._trains.clear()  # so that the next step builds buckets
        for p in self._params.values():
            p.grad = None

    def reset(self, *, passes: int = 1) -> None:
        self._armed, self._next = False, 0
        self.follow()
        # A cell may freeze or unfreeze parameters between steps.
        if self._trains != [p.requires_grad for p in self._params.values()]:
            self._build(self._backward_order())

    def hold(self) -> None:
        for name in self._home:
            refuse_sparse(name, self._params[name])
        for bucket in self._buckets:
            bucket.adopt()

    def start(self) -> None:
        self._next, self._armed = 0, True
        for bucket in self._buckets:
            bucket.missing = len(bucket.params)

    def close(self) -> None:
        _remove(self._hooks)

    def _send_rest(self) -> None:
        """Send the remaining buckets at the end of backward."""
        self._armed = False
        while self._next < len(self._buckets):
            self._send_next()

    def _backward_order(self) -> list[str]:
        """Return the names in reverse order: backward finishes first what forward used last."""
        return list(reversed(self._params))

    def _build(self, order: Sequence[str]) -> None:
        self.close()
        self._buckets: list[B] = []
        self._home: dict[str, B] = {}
        self._trains = [p.requires_grad for p in self._params.values()]
        trained = [(name, p) for name in order if (p := self._params[name]).requires_grad]
        for names in self._chunks(trained):
            bucket = self._bucket(names)
            self._buckets.append(bucket)
            for name in names:
                self._home[name] = bucket
                self._hooks.append(self._params[name].register_post_accumulate_grad_hook(self._hook(name)))

    def _chunks(self, trained: Sequence[tuple[str, nn.Parameter]]) -> Iterable[list[str]]:
        """Return the names of each bucket, in the order in which the buckets are sent."""
        return chunks(trained, self._bytes)

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        itself = weakref.ref(self)

        def arrived(param: Tensor) -> None:
            if (axis := itself()) is not None and axis._armed:
                refuse_sparse(name, param)
                axis._arrive(name)

        return arrived

    def _arrive(self, name: str) -> None:
        bucket = self._home[name]
        if bucket.missing == 0:
            raise came_twice(name)
        bucket.missing -= 1
        # Send in order, so that every rank issues the same collectives, whatever order its autograd uses.
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.missing = 0
        bucket.send()


def _remove(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    while hooks:
        hooks.pop().remove()


def refuse_sparse(name: str, param: Tensor) -> None:
    """Raise TrainingError if the gradient of `param` is sparse."""
    if param.grad is not None and param.grad.is_sparse:
        raise TrainingError(
            f"The gradient of {name!r} is sparse; ranks sum dense ones.",
            numbers=f"shape {tuple(param.shape)}",
            hint="nn.Embedding(..., sparse=False)",
        )


def came_twice(name: str) -> TrainingError:
    """Return the error for a gradient that arrives after it was sent."""
    return TrainingError(
        f"The gradient of {name!r} came twice in one backward pass.",
        numbers="it had been sent to the other ranks already",
        hint="torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    )


def chunks(params: Sequence[tuple[str, nn.Parameter]], bucket: int = BUCKET) -> Iterator[list[str]]:
    """Yield lists of parameter names. A new list starts where dtype or device changes, and where a bucket is full.

    bucket: size in bytes. The first list is small.
    """
    chunk: list[str] = []
    size, limit, last = 0, min(FIRST_BUCKET, bucket), None
    for name, p in params:
        kind = (p.dtype, p.device)
        if chunk and (size >= limit or kind != last):
            yield chunk
            chunk, size, limit = [], 0, bucket
        chunk.append(name)
        size += p.numel() * p.element_size()
        last = kind
    if chunk:
        yield chunk


_BYTES, _BYTES_SMALL, _LARGE = 128, 16, 128 * 100


def aligned(num: int, like: Tensor, num_bytes: int = _BYTES) -> int:
    """Return `num` rounded up so that this many elements of `like` fill a multiple of `num_bytes` bytes."""
    step = max(num_bytes // like.element_size(), 1)
    return -(-num // step) * step


def flat_with_views(shapes: Sequence[Sequence[int]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return (zeroed and aligned memory for tensors of `shapes`, a flat view of it for each tensor)."""
    sizes = [prod(shape) for shape in shapes]
    pieces = like.new_zeros(sum(aligned(size, like) for size in sizes))
    views = pieces.split([aligned(size, like) for size in sizes])
    return pieces, [view[:size] for view, size in zip(views, sizes, strict=True)]


@dataclass(frozen=True)
class Packing:
    """The places of tensors of `shapes` in a matrix with a row for each of `ranks`. All ranks hold 0-dimensional
    tensors.

    starts, widths: first column and number of columns of each tensor. width: number of columns, including gaps between
    tensors.
    """

    shapes: tuple[tuple[int, ...], ...]
    ranks: int
    starts: tuple[int, ...]
    widths: tuple[int, ...]
    width: int

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], ranks: int, like: Tensor) -> Packing:
        """Pack the tensors that are split evenly first, then the others. like: a tensor with the element size."""
        tidy = tuple(tuple(shape) for shape in shapes)
        widths = tuple(-(-shape[0] // ranks) * prod(shape[1:]) if shape else 1 for shape in tidy)
        starts, width = [0] * len(tidy), 0
        for i in sorted(range(len(tidy)), key=lambda i: not _divides(ranks, tidy[i])):
            large = widths[i] * like.element_size() >= _LARGE
            starts[i] = aligned(width, like, _BYTES if large else _BYTES_SMALL)
            width = starts[i] + widths[i]
        return cls(tidy, ranks, tuple(starts), widths, width)

    def rows(self, i: int, rank: int) -> slice:
        """Return the rows of tensor `i`, along dim 0, that `rank` holds. The tensor must have a dim 0."""
        return slice(*bounds(self.shapes[i][0], self.ranks, rank))

    def shard(self, row: Tensor, i: int, rank: int) -> Tensor:
        """Return a view of the part of tensor `i` in the row of `rank`."""
        shape = self._shape(i, rank)
        return row[self.starts[i] : self.starts[i] + prod(shape)].view(shape)

    def shards(self, row: Tensor, rank: int) -> list[Tensor]:
        """Return a view of the part of each tensor in the row of `rank`."""
        sizes, shapes = self._cuts.get(rank) or self._cuts.setdefault(rank, self._cut(rank))
        pieces = row.split_with_sizes([*sizes, row.numel() - sum(sizes)])
        return [pieces[at].view(shape) for at, shape in shapes]

    def _shape(self, i: int, rank: int) -> tuple[int, ...]:
        shape = self.shapes[i]
        if not shape:
            return shape
        start, stop = bounds(shape[0], self.ranks, rank)
        return (stop - start, *shape[1:])

    @cached_property
    def _cuts(self) -> dict[int, tuple[list[int], list[tuple[int, tuple[int, ...]]]]]:
        """Cache by rank: (sizes of the pieces of its row, gaps included; (piece, shape) of each tensor)."""
        return {}

    def _cut(self, rank: int) -> tuple[list[int], list[tuple[int, tuple[int, ...]]]]:
        sizes: list[int] = []
        shapes: dict[int, tuple[int, tuple[int, ...]]] = {}
        end = 0
        for i in sorted(range(len(self.shapes)), key=lambda i: (self.starts[i], self.widths[i])):
            shape = self._shape(i, rank)
            shapes[i] = len(sizes) + 1, shape
            sizes += [self.starts[i] - end, prod(shape)]
            end = self.starts[i] + prod(shape)
        return sizes, [shapes[i] for i in range(len(self.shapes))]

    @torch.no_grad()
    def pack(self, matrix: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Copy the tensors into the matrix. None becomes zeros. The padding of uneven tensors is not written."""
        even, end = self._even
        if even:
            pieces = []
            for i, n in even:
                tensor = None if i is None else tensors[i]
                if tensor is not None:
                    pieces.append(tensor.reshape(self.ranks, n))
                else:  # nothing reads the gap between two tensors
                    pieces.append(matrix.new_empty(self.ranks, n) if i is None else matrix.new_zeros(self.ranks, n))
            torch.cat(pieces, dim=1, out=matrix[:, :end])
        pairs = []
        for i in self._uneven:
            tensor, columns = tensors[i], matrix[:, self.starts[i] : self.starts[i] + self.widths[i]]
            if tensor is None:
                columns.zero_()
            elif not self.shapes[i]:
                columns.fill_(tensor)
            else:
                pairs += self._pairs(matrix, i, tensor.reshape(-1))
        if pairs:
            foreach_copy_([there for there, _ in pairs], [here for _, here in pairs])

    @torch.no_grad()
    def unpack(self, matrix: Tensor, flats: Sequence[Tensor]) -> None:
        """Copy from the matrix into the tensors, each of which is given flat."""
        even, end = self._even
        if even:
            out = [matrix.new_empty(self.ranks, n) if i is None else flats[i].view(self.ranks, n) for i, n in even]
            torch.split_with_sizes_copy(matrix[:, :end], [n for _, n in even], dim=1, out=out)
        pairs = []
        for i in self._uneven:
            if self.shapes[i]:
                pairs += self._pairs(matrix, i, flats[i])
            else:
                pairs.append((matrix[0, self.starts[i] : self.starts[i] + 1], flats[i]))
        if pairs:
            foreach_copy_([here for _, here in pairs], [there for there, _ in pairs])

    @cached_property
    def _even(self) -> tuple[list[tuple[int | None, int]], int]:
        """Return (pieces, the column where they end).

        A piece is (index of a tensor that is split evenly, or None for a gap; its number of columns).
        """
        pieces: list[tuple[int | None, int]] = []
        end = 0
        for i, shape in enumerate(self.shapes):
            if _divides(self.ranks, shape) and self.widths[i]:
                if self.starts[i] > end:
                    pieces.append((None, self.starts[i] - end))
                pieces.append((i, self.widths[i]))
                end = self.starts[i] + self.widths[i]
        return pieces, end

    @cached_property
    def _uneven(self) -> list[int]:
        return [i for i, shape in enumerate(self.shapes) if not _divides(self.ranks, shape)]

    def _pairs(self, matrix: Tensor, i: int, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of views of the same elements, in the matrix and in the tensor.

        One pair is for the ranks that hold one more row, one for the others.
        """
        each, extra = divmod(self.shapes[i][0], self.ranks)
        size = prod(self.shapes[i][1:])
        start, pairs, at = self.starts[i], [], 0
        for first, last, length in ((0, extra, (each + 1) * size), (extra, self.ranks, each * size)):
            if total := (last - first) * length:
                block = flat[at : at + total].view(last - first, length)
                pairs.append((matrix[first:last, start : start + length], block))
                at += total
        return pairs


def _divides(ranks: int, shape: Sequence[int]) -> bool:
    """Return True if each rank holds the same number of rows."""
    return bool(shape) and shape[0] % ranks == 0


# torch 2.13 has new names for both, and warns about the old ones.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_in_two_levels = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(
    flat: Tensor, canary: int | None, group: dist.ProcessGroup | None, levels: LevelGroups | None
) -> dist.Work | TwoLevelSum:
    """Start to sum `flat` over `group`, in two levels if `levels` is given. canary: see TwoLevelSum."""
    if levels is not None:
        return TwoLevelSum(flat, canary, levels)
    work: dist.Work = dist.all_reduce(flat, group=group, async_op=True)
    return work


class TwoLevelSum:
    """A running all-reduce of a one-dimensional `flat`: a reduce-scatter, an all-reduce, an all-gather.

    Each operation needs the result of the previous one. `advance` waits for it and starts the next. All ranks must
    begin and advance their sums in the same order, because all ranks of a group must issue its operations in the same
    order.

    The part of each rank of a node has a canary. It is 2 if all three operations were completed, and less if one was
    aborted. On a GPU nothing else shows this. Element `canary` of `flat` is summed like the others, and then replaced
    by the least canary if that is smaller; None if there is no such element.
    """

    def __init__(self, flat: Tensor, canary: int | None, levels: LevelGroups) -> None:
        self.flat, self.canary, self.levels = flat, canary, levels
        index, ranks = levels.within.rank(), levels.within.size()
        self.packing = Packing.of([flat.shape], ranks, flat)
        self._end = self.packing.width
        matrix = flat.new_zeros(ranks, aligned(self._end + 1, flat))
        self.packing.pack(matrix[:, : self._end], [flat])
        matrix[:, self._end] = 1 if index < 2 else 0
        self._row, self._within, self._matrix = matrix[index], torch.empty(0), matrix
        self._work = reduce_scatter(self._row, matrix.view(-1), group=levels.within, async_op=True)
        self._next = [self._between, self._gather, self._unpack]

    def advance(self) -> None:
        """Wait for the running operation and start the next one. Do nothing if all are done."""
        if self._next:
            self._work.wait()
            self._next.pop(0)()

    def wait(self) -> None:
        """Order later work after the sum."""
        while self._next:
            self.advance()

    def _between(self) -> None:
        self._within = self._row[self._end].clone()
        self._row[self._end].mul_(0.5 if self.levels.between.rank() < 2 else 0)
        self._work = dist.all_reduce(self._row, group=self.levels.between, async_op=True)

    def _gather(self) -> None:
        row = self._row.clone()  # a view of the matrix, which the all-gather fills
        row[self._end] = torch.minimum(row[self._end], self._within)
        self._matrix[:, self._end] = 0
        self._work = all_gather_in_two_levels(self._matrix.view(-1), row, group=self.levels.within, async_op=True)

    @torch.no_grad()
    def _unpack(self) -> None:
        self.packing.unpack(self._matrix[:, : self._end], [self.flat])
        if self.canary is not None:
            self.flat[self.canary] = torch.minimum(self.flat[self.canary], self._matrix[:, self._end].min())
        del self._matrix, self._row


@dataclass(frozen=True)
class Links:
    """The position of this rank: `index` of `ranks` that share one copy; `replica` among the holders of the same
    part."""

    group: dist.ProcessGroup | None
    ranks: int
    index: int
    across: dist.ProcessGroup | None
    replica: int
    levels: LevelGroups | None = None
    """The two levels of the all-reduce across replicas."""

    @classmethod
    def of(cls, axes: Axes) -> Links:
        """Return the links along the data axis."""
        return cls(
            axes.group("shard"),
            axes.size("shard"),
            axes.index("shard"),
            axes.group("replicate"),
            axes.index("replicate"),
            axes.levels("replicate"),
        )


def all_gather(row: Tensor, links: Links, matrix: Tensor | None = None) -> tuple[Tensor, dist.Work]:
    """Return (matrix with the rows of all ranks, the work that fills it).

    matrix: the matrix in which `row` is the row of this rank, or None to allocate one.
    """
    if matrix is None:
        matrix = row.new_empty(links.ranks, row.numel())
    return matrix, all_gather_in_two_levels(matrix.view(-1), row, group=links.group, async_op=True)


class Reduction:
    """The reduction of one bucket of gradients.

    In each row, the gradients are followed by one count per parameter: the number of ranks that have a gradient of it.
    The last element is the canary. Ranks 0 and 1 of a group contribute 1, the others 0. So it is 2 if the sum was
    completed, and less if it was not.
    """

    def __init__(self, packing: Packing, links: Links, like: Tensor) -> None:
        self.packing, self.links, self._like = packing, links, like.new_empty(0)
        self.unused: set[int] = set()
        self._end = 0
        self.forget()

    def forget(self) -> None:
        """Drop any running operation."""
        self._work: dist.Work | TwoLevelSum | None = None
        self._row: Tensor | None = None
        self._within: Tensor | None = None

    def send(self, grads: list[Tensor | None]) -> None:
        """Start the reduction. `grads` are in the order of the packing. None counts as zeros.

        The list is emptied. If nothing else refers to the gradients, they are freed before the result takes memory.
        """
        # Otherwise a reduction that was aborted during a wait would count as already sent across replicas.
        self.forget()
        links, width = self.links, self.packing.width
        self._end = width + len(grads)
        matrix = self._like.new_empty(links.ranks, aligned(self._end + 1, self._like))
        self.packing.pack(matrix[:, :width], grads)
        self.unused = {i for i, grad in enumerate(grads) if grad is None}
        grads.clear()
        matrix[:, width:].fill_(1)
        for i in self.unused:
            matrix[:, width + i] = 0
        if links.index > 1:
            matrix[:, self._end] = 0
        self._row = matrix[links.index]
        self._work = reduce_scatter(self._row, matrix.view(-1), group=links.group, async_op=True)

    def cross(self) -> None:
        """Wait for the sum within the group, and start the sum across replicas if there is one.

        If the sum across replicas has two levels and is running, start its next level.
        """
        if isinstance(self._work, TwoLevelSum):
            self._work.advance()
        if self.links.across is None or self._within is not None:
            return
        assert self._work is not None and self._row is not None
        self._work.wait()
        self._within = self._row[self._end].clone()
        self._row[self._end].mul_(0.5 if self.links.replica < 2 else 0)
        self._work = all_reduce(self._row, self._end, self.links.across, self.links.levels)

    def receive(self) -> tuple[Tensor, Tensor]:
        """Return views of (the sums of this rank followed by the counts, the canary).

        Later work on both is ordered after the reduction.
        """
        self.cross()
        assert self._work is not None and self._row is not None
        self._work.wait()
        row, within, canary = self._row, self._within, self._row[self._end]
        self.forget()
        return row[: self._end], canary if within is None else torch.minimum(canary, within)


class InFlight:
    """A queue of at most two running reductions. Before a third one starts, the oldest is received and freed."""

    def __init__(self) -> None:
        self._queue: list[tuple[Reduction, Callable[[Tensor], None]]] = []
        self.canary: Tensor | None = None

    def send(self, reduction: Reduction, grads: list[Tensor | None], landed: Callable[[Tensor], None]) -> None:
        """Start `reduction` of `grads`. `landed` is called later with the result."""
        for earlier, _ in self._queue:
            earlier.cross()
        while len(self._queue) > 1:
            self._land()
        reduction.send(grads)
        self._queue.append((reduction, landed))

    def land(self) -> None:
        """Wait for all running reductions."""
        while self._queue:
            self._land()

    def forget(self) -> None:
        """Drop all reductions after a step was aborted."""
        for reduction, _ in self._queue:
            reduction.forget()
        self._queue.clear()
        self.canary = None

    def _land(self) -> None:
        reduction, landed = self._queue.pop(0)
        row, canary = reduction.receive()
        if not self._queue:
            self.canary = canary.clone()  # a view would keep the whole matrix
        landed(row)
