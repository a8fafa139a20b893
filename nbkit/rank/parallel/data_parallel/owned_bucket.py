"""Buckets of whole tensors that ranks own, for ZeRO 1 and 2 with an optimizer that needs whole tensors.

If each element can be updated separately, a rank keeps a part of every tensor, and gradients are reduce-scattered
(buckets.py). Here a rank keeps some tensors whole, and nothing of the others. The parts differ in size, so an
all-to-all replaces the reduce-scatter: each rank sends every owner the gradients of its tensors, and the owner adds
them. A second all-to-all replaces the all-gather: each owner sends its updated tensors to all ranks. The bytes are the
same: with gradients of S bytes and n ranks, a rank sends (n - 1) / n S bytes on average in each of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.rank.parallel.data_parallel.buckets import Bucket, InFlight, Links, Reduction, flat_with_views
from nbkit.rank.parallel.reshard.redistribute import emptied
from nbkit.rank.torch_private import foreach_copy_


class _SumOfRows(dist.Work):
    """A work that waits for `work`, which fills `arriving`, and then writes the sum of its rows into `row`."""

    def __init__(self, work: dist.Work, arriving: Tensor, row: Tensor) -> None:
        super().__init__()
        self._work, self._arriving, self._row = work, arriving, row

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        torch.sum(self._arriving, 0, out=self._row)
        return True


class OwnedReduction(Reduction):
    """The reduction of a bucket to owners. owners: position in the group of the owner of each tensor.

    An owner receives from each rank the gradients of its tensors, a flag per tensor that says whether the rank has its
    gradient, and the canary of `Reduction`.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], owners: Sequence[int], links: Links, like: Tensor) -> None:
        self.links, self.unused, self._like = links, set(), like.new_empty(0)
        self.sizes = [prod(shape) for shape in shapes]
        self.of_rank = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(links.ranks)]
        self._widths = [sum(self.sizes[i] + 1 for i in mine) + 1 for mine in self.of_rank]
        self._end = self._widths[links.index] - 1
        self.forget()

    def send(self, grads: list[Tensor | None]) -> None:
        self.forget()
        self.unused = {i for i, grad in enumerate(grads) if grad is None}
        pieces: list[Tensor] = []
        alive = self._like.new_full((1,), float(self.links.index < 2))
        for mine in self.of_rank:
            for i in mine:
                grad = grads[i]
                pieces.append(self._like.new_zeros(self.sizes[i]) if grad is None else grad.reshape(-1))
            pieces += [self._like.new_tensor([float(i not in self.unused) for i in mine]), alive]
        leaving = torch.cat(pieces)
        pieces.clear()
        grads.clear()
        ranks, width = self.links.ranks, self._end + 1
        arriving = leaving.new_empty(ranks, width)
        arriving[:, self._end] = 0  # a device does not report that nothing has arrived
        work = dist.all_to_all_single(
            arriving.view(-1), leaving, [width] * ranks, self._widths, group=self.links.group, async_op=True
        )
        self._row = leaving.new_empty(width)
        self._work = _SumOfRows(work, arriving, self._row)


class OwnedBucket(Bucket):
    """Neighbouring tensors of one dtype, each with an owner.

    held: the tensors that the optimizer of this rank updates. buffer: True to keep whole gradients between
    micro-batches.
    """

    def __init__(
        self,
        wholes: list[nn.Parameter],
        held: list[nn.Parameter],
        owners: Sequence[int],
        links: Links,
        flight: InFlight,
        *,
        buffer: bool,
    ) -> None:
        self.held, self.links, self.flight = held, links, flight
        shapes = [p.shape for p in wholes]
        like = wholes[0].detach()
        self.reduction = OwnedReduction(shapes, owners, links, like)
        self.mine = self.reduction.of_rank[links.index]
        flat, pieces = flat_with_views(shapes if buffer else [shapes[i] for i in self.mine], like)
        emptied(flat)
        kept = [pieces[i] for i in self.mine] if buffer else pieces
        self.grads = [piece.view(shapes[i]) for piece, i in zip(kept, self.mine, strict=True)]
        views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)] if buffer else []
        super().__init__(wholes, views)
        self.counts: Tensor | None = None

    def send(self) -> None:
        grads = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None
        self.flight.send(self.reduction, grads, self._landed)

    def _landed(self, row: Tensor) -> None:
        if self.mine:
            *sums, counts = row.split([*(self.reduction.sizes[i] for i in self.mine), len(self.mine)])
            foreach_copy_(self.grads, [part.view(grad.shape) for part, grad in zip(sums, self.grads, strict=True)])
            self.counts = counts.clone() if self.reduction.unused.intersection(self.mine) else None

    def give(self) -> None:
        """Give the summed gradients of this rank's tensors to the optimizer."""
        counts = self.counts.tolist() if self.counts is not None else []
        for n, (i, p, grad) in enumerate(zip(self.mine, self.held, self.grads, strict=True)):
            p.grad = None if i in self.reduction.unused and counts[n] == 0 else grad

    @torch.no_grad()
    def gather(self) -> tuple[Tensor, dist.Work]:
        """Start to send the tensors that this rank owns to all other ranks, and to receive theirs."""
        sizes = [sum(self.reduction.sizes[i] for i in mine) for mine in self.reduction.of_rank]
        like = self.params[0].detach()
        own = [self.params[i].detach().reshape(-1) for i in self.mine]
        leaving = torch.cat(own * self.links.ranks) if own else like.new_empty(0)
        arriving = like.new_empty(sum(sizes))
        work = dist.all_to_all_single(
            arriving,
            leaving,
            sizes,
            [sizes[self.links.index]] * self.links.ranks,
            group=self.links.group,
            async_op=True,
        )
        return arriving, work

    @torch.no_grad()
    def spread(self, matrix: Tensor) -> None:
        """Copy the received tensors into those of other owners."""
        order = [i for mine in self.reduction.of_rank for i in mine]
        parts = dict(zip(order, matrix.split([self.reduction.sizes[i] for i in order]), strict=True))
        others = [i for i in order if i not in self.mine]
        if others:
            targets = [self.params[i].data for i in others]
            foreach_copy_(targets, [parts[i].view(target.shape) for i, target in zip(others, targets, strict=True)])
