"""ZeRO 1 and 2: every rank holds whole parameters, and updates only its part of each.

Gradients are reduce-scattered bucket by bucket; the optimizer gets slices of the whole parameters; after its step the
updated slices are all-gathered into them, while the next forward computes (late_gather.py). Zero 1 keeps the buffers of
whole gradients, zero 2 gives them back bucket by bucket. See data_axis.py for bytes and bucket_collectives.py for what
travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.levers import BUCKET
from nbkit.rank.parallel.data_parallel.bucket_collectives import InFlight, Links, Reduction, all_gather
from nbkit.rank.parallel.data_parallel.bucket_packing import Packing, aligned, flat_with_views
from nbkit.rank.parallel.data_parallel.gradient_buckets import Bucket, BucketedAxis
from nbkit.rank.parallel.data_parallel.late_gather import LateGather, compiles, waiting
from nbkit.rank.parallel.module.meta_module import homes, parameter_like, replace
from nbkit.rank.parallel.reshard.resizable_storage import emptied
from nbkit.rank.torch_private import foreach_copy_
from nbkit.tensor_layout import Layout, bounds

_ANSWER_S = 3.0
"""How long a rank that was broken off in a step waits for what the others updated in the one before."""


class _Bucket(Bucket):
    """Neighbouring parameters of one dtype. grads: this rank's part of the gradient of each, once summed."""

    def __init__(
        self, wholes: list[nn.Parameter], held: list[nn.Parameter], links: Links, flight: InFlight, *, buffer: bool
    ) -> None:
        self.held, self.links, self.flight = held, links, flight
        like = wholes[0].detach()
        self.packing = Packing.of([p.shape for p in wholes], links.ranks, like)
        self.reduction = Reduction(self.packing, links, like)
        views: list[Tensor] = []
        if buffer:
            _, pieces = flat_with_views([p.shape for p in wholes], like)
            views = [piece.view(p.shape) for piece, p in zip(pieces, wholes, strict=True)]
            rows = [self.packing.rows(i, links.index) if p.dim() else ... for i, p in enumerate(wholes)]
            self.grads = [view[row] for view, row in zip(views, rows, strict=True)]
        else:
            row = like.new_zeros(self.packing.width)
            self.grads = self.packing.shards(row, links.index)
        emptied(self.grads[0])
        super().__init__(wholes, views)
        self.counts: Tensor | None = None

    def send(self) -> None:
        # From where autograd has put them, which is not the buffer where the step has one backward pass.
        grads = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None
        self.flight.send(self.reduction, grads, self._landed)

    def _landed(self, row: Tensor) -> None:
        width = self.packing.width
        foreach_copy_(self.grads, self.packing.shards(row, self.links.index))
        self.counts = row[width:].clone() if self.reduction.unused else None

    def give(self) -> None:
        """The optimizer gets the sums. Only a rank that left a parameter unused looks at the counts."""
        counts = self.counts.tolist() if self.counts is not None else []
        for i, (p, grad) in enumerate(zip(self.held, self.grads, strict=True)):
            p.grad = None if i in self.reduction.unused and counts[i] == 0 else grad

    @torch.no_grad()
    def gather(self) -> tuple[Tensor, dist.Work]:
        """Start to bring the updated parts together."""
        like = self.params[0].detach()
        matrix = like.new_empty(self.links.ranks, aligned(self.packing.width, like))
        row = matrix[self.links.index]
        mine = self.packing.shards(row, self.links.index)
        foreach_copy_(mine, [p.detach() for p in self.held])
        return all_gather(row, self.links, matrix)

    @torch.no_grad()
    def spread(self, matrix: Tensor) -> None:
        """Put what has come into the whole parameters."""
        self.packing.unpack(matrix[:, : self.packing.width], [p.detach().view(-1) for p in self.params])


class ShardedOptimizer(BucketedAxis[_Bucket]):
    """Zero 1 or 2 of `module`, a skeleton; see data_axis."""

    def __init__(
        self, module: nn.Module, layouts: Mapping[str, Layout], links: Links, *, zero: int, bucket: int = BUCKET
    ) -> None:
        wholes: dict[str, nn.Parameter] = {}
        found = homes(module)
        for name, places in found.items():
            old = getattr(*places[0])
            wholes[name] = parameter_like(torch.empty(layouts[name].local, dtype=old.dtype, device=old.device), old)
            replace(places, wholes[name])
        super().__init__(wholes, bucket=bucket)
        self.links, self.zero, self._module = links, zero, module
        self._late, self._first = LateGather(links.group), -1
        for name, whole in wholes.items():
            layout, part, mine = layouts[name], layouts[name], whole.data
            if layout.local:
                part = layout.part(0, links.ranks, links.index)
                mine = mine[slice(*bounds(layout.local[0], links.ranks, links.index))]
            self._add(name, parameter_like(mine, whole), part, (whole.data, layout), whole, found[name])
            emptied(whole.data)
        self._flight = InFlight()
        self.begin_again()

    def let_go(self) -> None:
        self.settle()
        super().let_go()
        self._flight.forget()
        for p in self.held.values():
            p.grad = None

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield from self._params.values()

    def reset(self, *, passes: int = 1) -> None:
        self._flight.forget()
        for p in self._params.values():
            p.grad = None
        super().reset()

    def finish(self) -> Tensor | None:
        self._send_rest()
        self._flight.land()
        for bucket in self._buckets:
            bucket.give()
        return self._flight.canary

    def after_step(self) -> None:
        """Begin to bring the updated parts together: an all-gather of each bucket, what forward needs first."""
        buckets = self._buckets[::-1]
        numbers = {id(p): number for number, bucket in enumerate(buckets) for p in bucket.params}
        late, self._first = waiting(self._module, numbers)
        self._late.begin(buckets, late)

    def settle(self) -> None:
        self._late.wait()

    def break_off(self, *, broken: bool) -> bool:
        return self._late.end(0.0 if broken else _ANSWER_S)

    @contextmanager
    def computing(self, *, autocast: bool = False) -> Iterator[None]:
        self._late.wait(None if compiles() else self._first)
        yield

    def start(self) -> None:
        self.settle()
        super().start()

    def absent(self, *, backward: bool = False) -> None:
        self.settle()

    def _build(self, order: Sequence[str]) -> None:
        self.settle()
        for name, whole in self._params.items():
            self.held[name].requires_grad_(whole.requires_grad)
        super()._build(order)

    def _bucket(self, names: Sequence[str]) -> _Bucket:
        wholes, held = [self._params[name] for name in names], [self.held[name] for name in names]
        return _Bucket(wholes, held, self.links, self._flight, buffer=self.zero == 1)
