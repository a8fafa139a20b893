"""ZeRO 1 and 2: every rank holds whole parameters, and updates only its part of each.

Gradients are reduce-scattered while backward runs, bucket by bucket; the optimizer gets slices of the whole parameters;
after its step the updated slices are all-gathered into them. Zero 1 keeps the buffers of whole gradients, zero 2 gives
them back bucket by bucket. See shard.py for bytes and scatter.py for what travels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.rank.parallel.data_parallel.base import DataAxis, fresh
from nbkit.rank.parallel.data_parallel.bucket_collectives import InFlight, Links, Reduction, all_gather
from nbkit.rank.parallel.data_parallel.bucket_packing import Packing
from nbkit.rank.parallel.data_parallel.ddp import came_twice, chunks, refuse_sparse
from nbkit.rank.parallel.module.meta_module import homes, replace
from nbkit.rank.parallel.reshard.resizable_storage import emptied
from nbkit.tensor_layout import Layout

__all__ = ["ShardedOptimizer"]


class _Bucket:
    """Neighbouring parameters of one dtype. grads: this rank's part of the gradient of each, once summed."""

    def __init__(self, wholes: list[nn.Parameter], held: list[nn.Parameter], links: Links, *, buffer: bool) -> None:
        self.wholes, self.held, self.links = wholes, held, links
        self.packing = Packing.of([p.shape for p in wholes], links.ranks)
        like = wholes[0].detach()
        self.reduction = Reduction(self.packing, links, like)
        self.views: list[Tensor] = []
        if buffer:
            sizes = [p.numel() for p in wholes]
            pieces = like.new_zeros(sum(sizes)).split(sizes)
            self.views = [piece.view(p.shape) for piece, p in zip(pieces, wholes, strict=True)]
            rows = [self.packing.rows(i, links.index) if p.dim() else ... for i, p in enumerate(wholes)]
            self.grads = [view[row] for view, row in zip(self.views, rows, strict=True)]
        else:
            row = like.new_zeros(self.packing.width)
            self.grads = [self.packing.shard(row, i, links.index) for i in range(len(wholes))]
        emptied(self.grads[0])
        self.missing = len(wholes)
        self.counts: Tensor | None = None

    def adopt(self) -> None:
        """Move every gradient that autograd put elsewhere into its buffer."""
        for p, view in zip(self.wholes, self.views, strict=False):
            if p.grad is not None and p.grad is not view:
                view.copy_(p.grad)
                p.grad = view

    def send(self, flight: InFlight) -> None:
        self.adopt()
        flight.send(self.reduction, [p.grad for p in self.wholes], self._landed)
        for p in self.wholes:
            p.grad = None

    def _landed(self, row: Tensor) -> None:
        width = self.packing.width
        parts = [self.packing.shard(row, i, self.links.index) for i in range(len(self.wholes))]
        torch._foreach_copy_(self.grads, parts)
        self.counts = row[width:].clone() if self.reduction.unused else None

    def give(self) -> None:
        """The optimizer gets the sums. Only a rank that left a parameter unused looks at the counts."""
        counts = self.counts.tolist() if self.counts is not None else []
        for i, (p, grad) in enumerate(zip(self.held, self.grads, strict=True)):
            p.grad = None if i in self.reduction.unused and counts[i] == 0 else grad

    @torch.no_grad()
    def gather(self) -> tuple[Tensor, dist.Work]:
        """Start to bring the updated parts together."""
        row = self.wholes[0].detach().new_empty(self.packing.width)
        mine = [self.packing.shard(row, i, self.links.index) for i in range(len(self.held))]
        torch._foreach_copy_(mine, [p.detach() for p in self.held])
        return all_gather(row, self.links)

    def spread(self, matrix: Tensor, work: dist.Work) -> None:
        """Put what has come into the whole parameters."""
        work.wait()
        self.packing.unpack(matrix, [p.detach().view(-1) for p in self.wholes])


class ShardedOptimizer(DataAxis):
    """Zero 1 or 2 of `module`, a skeleton; see data_axis."""

    def __init__(self, module: nn.Module, layouts: Mapping[str, Layout], links: Links, *, zero: int) -> None:
        super().__init__()
        self.links, self.zero = links, zero
        self._wholes: dict[str, nn.Parameter] = {}
        for name, places in homes(module).items():
            layout, old = layouts[name], getattr(*places[0])
            whole = fresh(torch.empty(layout.local, dtype=old.dtype, device=old.device), old)
            replace(places, whole)
            self._wholes[name] = whole
            part, mine = layout, whole.data
            if layout.local:
                part = layout.part(0, links.ranks, links.index)
                mine = mine[Packing.of([layout.local], links.ranks).rows(0, links.index)]
            self._add(name, fresh(mine, old), part, (whole.data, layout))
            emptied(whole.data)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._flight = InFlight()
        self.begin_again()

    def begin_again(self) -> None:
        self._trained = tuple(p.requires_grad for p in self._wholes.values())
        self._build()
        self.reset()

    def let_go(self) -> None:
        self.close()
        self._flight.forget()
        self._buckets.clear()
        for p in (*self._wholes.values(), *self.held.values()):
            p.grad = None

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield from self._wholes.values()

    def reset(self, *, passes: int = 1) -> None:
        self._armed, self._next = False, 0
        self._flight.forget()
        for p in self._wholes.values():
            p.grad = None
        # A live cell may freeze and unfreeze.
        if (trained := tuple(p.requires_grad for p in self._wholes.values())) != self._trained:
            self._trained = trained
            self._build()

    def hold(self) -> None:
        for name, p in self._wholes.items():
            refuse_sparse(name, p)
        for bucket in self._buckets:
            bucket.adopt()

    def start(self) -> None:
        self._next, self._armed = 0, True
        for bucket in self._buckets:
            bucket.missing = len(bucket.wholes)

    def finish(self) -> Tensor | None:
        self._armed = False
        while self._next < len(self._buckets):
            self._send_next()
        self._flight.land()
        for bucket in self._buckets:
            bucket.give()
        return self._flight.canary

    def after_step(self) -> None:
        """Bring the updated parts together: an all-gather of each bucket, two under way, what forward needs first."""
        under_way: list[tuple[_Bucket, Tensor, dist.Work]] = []
        for bucket in reversed(self._buckets):
            if len(under_way) > 1:
                earlier, matrix, work = under_way.pop(0)
                earlier.spread(matrix, work)
            under_way.append((bucket, *bucket.gather()))
        for earlier, matrix, work in under_way:
            earlier.spread(matrix, work)

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _build(self) -> None:
        self.close()
        self._buckets: list[_Bucket] = []
        self._next = 0
        for name, whole in self._wholes.items():
            self.held[name].requires_grad_(whole.requires_grad)
        # Backward finishes what forward used last.
        trained = [(i, p) for i, p in enumerate(self._wholes.values()) if p.requires_grad][::-1]
        names = list(self._wholes)
        for numbers in chunks(trained):
            wholes = [self._wholes[names[i]] for i in numbers]
            held = [self.held[names[i]] for i in numbers]
            bucket = _Bucket(wholes, held, self.links, buffer=self.zero == 1)
            self._buckets.append(bucket)
            for i, whole in zip(numbers, wholes, strict=True):
                self._hooks.append(whole.register_post_accumulate_grad_hook(self._hook(names[i], bucket)))

    def _hook(self, name: str, bucket: _Bucket) -> Callable[[Tensor], None]:
        # The hooks live as long as the parameters: they must not hold the buckets.
        itself, home = weakref.ref(self), weakref.ref(bucket)

        def arrived(param: Tensor) -> None:
            axis, bucket = itself(), home()
            if axis is not None and bucket is not None and axis._armed:
                refuse_sparse(name, param)
                axis._arrive(name, bucket)

        return arrived

    def _arrive(self, name: str, bucket: _Bucket) -> None:
        if bucket.missing == 0:
            raise came_twice(name)
        bucket.missing -= 1
        # In order, so that every rank issues the same collectives whatever its autograd does first.
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.missing = 0
        bucket.send(self._flight)
