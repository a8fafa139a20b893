"""Data parallelism: every rank holds the whole model, gradients are summed over the ranks while backward runs.

On the wire, per step: one all-reduce of each bucket, together the bytes of all gradients; over several nodes in two
levels (two_levels.py). compressed.py sends fewer.

Simpler than torch's DistributedDataParallel, and right where that is not: it *sums* (the loss carries the weights, so
ragged batches and masks average as on one process), a rank without rows and parameters without gradient take part with
zeros, and a backward pass that was broken off leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.levers import BUCKET
from nbkit.rank.parallel.data_parallel.gradient_buckets import Bucket, BucketedAxis
from nbkit.rank.parallel.data_parallel.two_levels import TwoLevelSum, all_reduce
from nbkit.rank.parallel.device_mesh import LevelGroups
from nbkit.rank.parallel.module.meta_module import homes
from nbkit.rank.parallel.reshard.resizable_storage import emptied
from nbkit.tensor_layout import Layout

ALIVE = 2.0
"""What the canary of a finished reduction holds, in any dtype and for any number of ranks."""


class GradientBucket(Bucket):
    """Gradients of neighbouring parameters in one flat tensor.

    Behind the gradients, `used[i]` counts the ranks on which parameter i has one: what no rank used keeps `grad`
    None, as on one process, so that weight decay leaves it alone. The last element is the canary: ranks 0 and 1
    give 1, the others 0, so that it is ALIVE when the sum was made and 1 or 0 when it was broken off.
    """

    def __init__(
        self, params: list[nn.Parameter], group: dist.ProcessGroup | None, levels: LevelGroups | None = None
    ) -> None:
        self.group, self.levels = group, levels
        sizes = [p.numel() for p in params]
        # All of it is written before it is sent.
        self.flat = torch.empty(sum(sizes) + len(sizes) + 1, dtype=params[0].dtype, device=params[0].device)
        *pieces, self.used = self.flat.split([*sizes, len(sizes) + 1])
        super().__init__(params, [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)])
        emptied(self.flat)
        self.unused: list[int] = []
        self.work: dist.Work | TwoLevelSum | None = None

    def send(self) -> None:
        self.adopt()
        self.used.fill_(1)
        if (dist.get_rank() if self.group is None else self.group.rank()) > 1:
            self.used[-1].fill_(0)  # a number that is assigned to an element is a copy from the host, which waits
        self.unused = [i for i, p in enumerate(self.params) if p.grad is None]
        for i in self.unused:
            self.used[i].fill_(0)
            self.params[i].grad = self.views[i].zero_()
        self.launch()

    def launch(self) -> None:
        """Start the sum of `flat`."""
        self.work = all_reduce(self.flat, -1, self.group, self.levels)

    def advance(self) -> None:
        """Where the sum takes several operations, start the next one."""
        if isinstance(self.work, TwoLevelSum):
            self.work.advance()

    def land(self) -> None:
        """Order what follows behind it."""
        assert self.work is not None
        self.work.wait()

    def receive(self) -> None:
        """Order what follows behind the all-reduce. Only a rank that left a parameter unused looks at the counts."""
        self.land()
        self.work = None
        counts = self.used.tolist() if self.unused else []
        for i in self.unused:
            if counts[i] == 0:
                self.params[i].grad = None


class Replicas(BucketedAxis[GradientBucket]):
    """Sums the gradients of `model` over the ranks of a group: `world_size` of them, None is the world.

    levels: of that group, where it has two. On one rank it does nothing, and gradients stay where autograd puts them.
    """

    _takes_memory = True

    def __init__(
        self,
        model: nn.Module,
        *,
        world_size: int,
        group: dist.ProcessGroup | None = None,
        levels: LevelGroups | None = None,
        bucket: int = BUCKET,
    ) -> None:
        super().__init__(dict(model.named_parameters()), bucket=bucket)
        self._homes = homes(model)
        self.world_size, self.group, self.levels = world_size, group, levels
        self.begin_again()

    def lay_out(self, layouts: Mapping[str, Layout]) -> None:
        """Every rank holds every parameter, of which it has what `layouts` say."""
        for name, param in self._params.items():
            self._add(name, param, layouts[name], (param.data, layouts[name]), param, self._homes[name])

    def begin_again(self) -> None:
        # Ranks that were interrupted may have other buckets than these.
        self._arrived: list[str] | None = []
        super().begin_again()

    def start(self) -> None:
        super().start()
        for bucket in self._buckets:
            bucket.work = None

    def finish(self) -> Tensor | None:
        """Returns the canary of the last reduction, on the device: ALIVE when it was made, and with it all before it.

        On a GPU nothing else tells, since an aborted reduction raises nothing here. None when nothing is reduced.
        """
        self._send_rest()
        for i, bucket in enumerate(self._buckets):
            for under_way in self._buckets[i:]:
                under_way.advance()
            bucket.receive()
        canary = self._buckets[-1].used[-1] if self._buckets else None
        self._follow_arrival()
        return canary

    def _bucket(self, names: Sequence[str]) -> GradientBucket:
        return GradientBucket([self._params[name] for name in names], self.group, self.levels)

    def _build(self, order: Sequence[str]) -> None:
        super()._build(order if self.world_size > 1 else ())

    def _send_next(self) -> None:
        # In one order on all ranks: what follows of a bucket leaves before the next bucket does.
        for earlier in self._buckets[: self._next]:
            earlier.advance()
        super()._send_next()

    def _arrive(self, name: str) -> None:
        super()._arrive(name)
        if self._arrived is not None:
            self._arrived.append(name)

    def _follow_arrival(self) -> None:
        """After the first step, once: buckets in the order in which its first rank's gradients arrived."""
        if self._arrived is None or self.world_size == 1:
            return
        seen, self._arrived = self._arrived, None
        names = list(self._params)
        order = [names.index(name) for name in dict.fromkeys([*seen, *self._backward_order()])]
        agreed = torch.tensor(order, dtype=torch.int64, device=self._params[names[0]].device)
        dist.broadcast(agreed, group_src=0, group=self.group)
        grads = [p.grad for p in self._params.values()]
        self._build([names[i] for i in agreed.tolist()])
        for p, grad in zip(self._params.values(), grads, strict=True):
            p.grad = grad


def broadcast_from_first(model: nn.Module, *, world_size: int) -> None:
    """Give every rank rank 0's parameters and buffers. Raises TrainingError when the ranks built different models."""
    if world_size == 1:
        return
    tensors = list(chain(model.named_parameters(), model.named_buffers()))
    described = [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors]
    everyone: list[list[tuple[str, tuple[int, ...], str]]] = [[] for _ in range(world_size)]
    dist.all_gather_object(everyone, described)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            first = next((pair for pair in zip(everyone[0], theirs, strict=False) if pair[0] != pair[1]), None)
            raise TrainingError(
                f"Rank {rank} built another model than rank 0.",
                numbers=f"rank 0: {first[0]}, rank {rank}: {first[1]}"
                if first
                else f"tensors: {len(everyone[0])} on rank 0, {len(theirs)} on rank {rank}",
                hint="build the same model on every rank: nothing in it may depend on the rank",
            )
    broadcast(model, src=0)


@torch.no_grad()
def broadcast(model: nn.Module, *, src: int) -> None:
    """Give every rank the parameters and buffers of rank `src`."""
    for tensor in chain(model.parameters(), model.buffers()):
        # As bytes: gloo knows neither bool nor every float.
        raw = tensor.detach().contiguous()
        dist.broadcast(raw.reshape(-1).view(torch.uint8), src=src)
        if raw.data_ptr() != tensor.data_ptr():
            tensor.copy_(raw)
