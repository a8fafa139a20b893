"""Data parallelism: every rank holds the whole model, and gradients are summed over the ranks while backward runs.

Each step sends one all-reduce of each bucket, in total the bytes of all gradients. Over several nodes an all-reduce has
two levels (buckets.py).

This is simpler than torch's DistributedDataParallel, and correct in more cases. It *sums*: the loss contains the
weights, so ragged batches and masks average as in one process. A rank without rows and a parameter without a gradient
contribute zeros. An aborted backward pass leaves nothing behind.

Keys of a strategy change how gradients are sent: the torch half of a key gets a `ReplicaSetup` and returns a changed
one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.data_parallel.buckets import Bucket, BucketedAxis, Links, TwoLevelSum, all_reduce
from nbkit.rank.parallel.device_mesh import LevelGroups
from nbkit.rank.parallel.module.copies import homes
from nbkit.rank.parallel.reshard.redistribute import emptied
from nbkit.techniques.exchange import BUCKET
from nbkit.tensor_layout import Layout


@dataclass(frozen=True)
class ReplicaSetup:
    """The setup of a data axis under which every rank holds the whole model.

    The torch half of a strategy's key is a function `apply(value, setup) -> ReplicaSetup`. It returns `setup` with
    another class of buckets or of the axis: `dataclasses.replace(setup, bucket_class=Mine)`.

    ranks, index: size of the group, and position of this rank in it. group: the process group, or None for the world.
    levels: the two levels of that group, if it has them. bucket: bytes of a bucket. adaptive: True if the size of the
    optimizer's steps does not grow with the gradients, as with Adam. bucket_class: called with (parameters, setup).
    axis_class: called with (model, setup).
    """

    ranks: int
    index: int = 0
    group: dist.ProcessGroup | None = None
    levels: LevelGroups | None = None
    bucket: int = BUCKET
    adaptive: bool = False
    bucket_class: Callable[[list[nn.Parameter], ReplicaSetup], GradientBucket] | None = None
    axis_class: Callable[[nn.Module, ReplicaSetup], Replicas] | None = None

    @property
    def links(self) -> Links:
        """Return the links of this rank to the others of the group."""
        return Links(self.group, self.ranks, self.index, None, 0)

    def build(self, model: nn.Module) -> Replicas:
        """Return the data axis of `model`."""
        return (self.axis_class or Replicas)(model, self)


ALIVE = 2.0
"""The canary of a completed reduction, in any dtype and for any number of ranks."""


class GradientBucket(Bucket):
    """Gradients of neighbouring parameters in one flat tensor.

    flat: the whole tensor. gradients: the part of `flat` with the gradients.

    In `flat`, counts follow the gradients: `used[i]` is the number of ranks that have a gradient of parameter i. If no
    rank used a parameter, its `grad` stays None, as in one process. So weight decay does not change the parameter. The
    last element, the canary, shows whether the sum was completed. Ranks 0 and 1 contribute 1 to it, the others 0. It is
    ALIVE (2) after a complete sum, and 1 or 0 after an interrupted one.
    """

    def __init__(self, params: list[nn.Parameter], setup: ReplicaSetup) -> None:
        self.setup, self.group, self.levels = setup, setup.group, setup.levels
        sizes = [p.numel() for p in params]
        # All elements are written before they are sent.
        self.flat = torch.empty(sum(sizes) + len(sizes) + 1, dtype=params[0].dtype, device=params[0].device)
        *pieces, self.used = self.flat.split([*sizes, len(sizes) + 1])
        self.gradients = self.flat[: sum(sizes)]
        super().__init__(params, [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)])
        emptied(self.flat)
        self.unused: list[int] = []
        self.work: dist.Work | TwoLevelSum | None = None

    def send(self) -> None:
        self.adopt()
        self.used.fill_(1)
        if (dist.get_rank() if self.group is None else self.group.rank()) > 1:
            self.used[-1].fill_(0)  # assigning a number to an element would copy from the host and wait
        self.unused = [i for i, p in enumerate(self.params) if p.grad is None]
        for i in self.unused:
            self.used[i].fill_(0)
            self.params[i].grad = self.views[i].zero_()
        self.launch()

    def launch(self) -> None:
        """Start the sum of `flat`. Called when backward has computed all gradients of the bucket."""
        self.sum_over_ranks(self.flat)

    def sum_over_ranks(self, sent: Tensor) -> None:
        """Start the sum of `sent`, whose last element is the canary."""
        self.work = all_reduce(sent, -1, self.group, self.levels)

    def advance(self) -> None:
        """Start the next operation of a sum that takes several operations."""
        if isinstance(self.work, TwoLevelSum):
            self.work.advance()

    def land(self) -> None:
        """Order later work after the sum. Raises TrainingError if `launch` did not start one."""
        if self.work is None:
            raise TrainingError(
                f"{type(self).__name__}.launch did not start a sum of the gradients.",
                numbers="self.work is None",
                hint="self.sum_over_ranks(self.flat)   in launch",
            )
        self.work.wait()

    def receive(self) -> None:
        """Order later work after the all-reduce. The counts are read only if this rank did not use a parameter."""
        self.land()
        self.work = None
        counts = self.used.tolist() if self.unused else []
        for i in self.unused:
            if counts[i] == 0:
                self.params[i].grad = None


class Replicas(BucketedAxis[GradientBucket]):
    """Sums the gradients of `model` over the ranks of a group, as described by `setup`.

    With one rank it does nothing, and gradients stay where autograd puts them.
    """

    _takes_memory = True

    def __init__(self, model: nn.Module, setup: ReplicaSetup) -> None:
        super().__init__(dict(model.named_parameters()), bucket=setup.bucket)
        self._homes = homes(model)
        self.setup, self.world_size, self.group = setup, setup.ranks, setup.group
        self.begin_again()

    def lay_out(self, layouts: Mapping[str, Layout]) -> None:
        """Register every parameter. Every rank holds all parameters, in the given `layouts`."""
        for name, param in self._params.items():
            self._add(name, param, layouts[name], (param.data, layouts[name]), param, self._homes[name])

    def begin_again(self) -> None:
        # Ranks that were interrupted may have different buckets.
        self._arrived: list[str] | None = []
        super().begin_again()

    def start(self) -> None:
        super().start()
        for bucket in self._buckets:
            bucket.work = None

    def finish(self) -> Tensor | None:
        """Return the canary of the last reduction, on the device, or None if nothing is reduced.

        It is ALIVE if this and all earlier reductions were completed. On a GPU nothing else shows this, because an
        aborted reduction raises no error here.
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
        return (self.setup.bucket_class or GradientBucket)([self._params[name] for name in names], self.setup)

    def _build(self, order: Sequence[str]) -> None:
        super()._build(order if self.world_size > 1 else ())

    def _send_next(self) -> None:
        # All ranks use one order: later operations of a bucket start before the next bucket is sent.
        for earlier in self._buckets[: self._next]:
            earlier.advance()
        super()._send_next()

    def _arrive(self, name: str) -> None:
        super()._arrive(name)
        if self._arrived is not None:
            self._arrived.append(name)

    def _follow_arrival(self) -> None:
        """Rebuild the buckets once, after the first step, in the order in which gradients arrived on the group's first
        rank."""
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


def broadcast_from_first(model: nn.Module, *, world_size: int, without: Collection[str] = ()) -> None:
    """Give every rank the parameters and buffers of rank 0. Raise TrainingError if the ranks built different models.

    without: the names of parameters that are equal already.
    """
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
                f"Rank {rank} built a different model than rank 0.",
                numbers=f"rank 0: {first[0]}, rank {rank}: {first[1]}"
                if first
                else f"tensors: {len(everyone[0])} on rank 0, {len(theirs)} on rank {rank}",
                hint="build the same model on every rank: it must not depend on the rank",
            )
    broadcast((tensor for name, tensor in tensors if name not in without), src=0)


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], *, src: int) -> None:
    """Give every rank the tensors of rank `src`."""
    for tensor in tensors:
        # Send bytes, because gloo supports neither bool nor every float.
        raw = tensor.detach().contiguous()
        dist.broadcast(raw.reshape(-1).view(torch.uint8), src=src)
        if raw.data_ptr() != tensor.data_ptr():
            tensor.copy_(raw)
