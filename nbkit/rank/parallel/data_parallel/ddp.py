"""Data parallelism: every rank holds the whole model, gradients are summed over the ranks while backward runs.

On the wire, per step: one all-reduce of each bucket, together the bytes of all gradients. Buckets follow the order in
which backward finishes gradients, so that the first are on their way while the rest is computed.

Simpler than torch's DistributedDataParallel, and right where that is not: it *sums* (the loss carries the weights, so
ragged batches and masks average as on one process), a rank without rows and parameters without gradient take part with
zeros, and a backward pass that was broken off leaves nothing behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.reshard.resizable_storage import emptied

__all__ = ["ALIVE", "Replicas", "broadcast", "broadcast_from_first", "came_twice", "chunks", "refuse_sparse"]

ALIVE = 2.0
"""What the canary of a finished reduction holds, in any dtype and for any number of ranks."""

_FIRST_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20


class _Bucket:
    """Gradients of neighbouring parameters in one flat tensor; `views[i]` is the gradient of `params[i]` in it.

    Behind the gradients, `used[i]` counts the ranks on which parameter i has one: what no rank used keeps `grad`
    None, as on one process, so that weight decay leaves it alone. The last element is the canary: ranks 0 and 1
    give 1, the others 0, so that it is ALIVE when the sum was made and 1 or 0 when it was broken off.
    """

    def __init__(self, params: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.params, self.group = params, group
        sizes = [p.numel() for p in params]
        self.flat = torch.zeros(sum(sizes) + len(sizes) + 1, dtype=params[0].dtype, device=params[0].device)
        *pieces, self.used = self.flat.split([*sizes, len(sizes) + 1])
        self.views = [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)]
        emptied(self.flat)
        self.missing = len(params)
        self.unused: list[int] = []
        self.work: dist.Work | None = None

    def adopt(self) -> None:
        """Move every gradient that autograd put elsewhere into its view."""
        fresh = [
            (p, view, p.grad)
            for p, view in zip(self.params, self.views, strict=True)
            if p.grad is not None and p.grad is not view
        ]
        if fresh:
            torch._foreach_copy_([view for _, view, _ in fresh], [grad for _, _, grad in fresh])
        for p, view, _ in fresh:
            p.grad = view

    def send(self) -> None:
        """Start the all-reduce; a parameter without gradient takes part with zeros."""
        self.adopt()
        self.used.fill_(1)
        if dist.get_rank(self.group) > 1:
            self.used[-1] = 0
        self.unused = [i for i, p in enumerate(self.params) if p.grad is None]
        for i in self.unused:
            self.used[i] = 0
            self.params[i].grad = self.views[i].zero_()
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def receive(self) -> None:
        """Order what follows behind the all-reduce. Only a rank that left a parameter unused looks at the counts."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        counts = self.used.tolist() if self.unused else []
        for i in self.unused:
            if counts[i] == 0:
                self.params[i].grad = None


class Replicas:
    """Sums the gradients of `model` over the ranks of a group: `world_size` of them, None is the world.

    A step: `reset`, then for every micro-batch but the last backward and `hold`, then `start`, backward, `finish`.
    On one rank it does nothing, and gradients stay where autograd puts them.
    """

    def __init__(self, model: nn.Module, *, world_size: int, group: dist.ProcessGroup | None = None) -> None:
        self.world_size, self.group = world_size, group
        self._every = [(name, p) for name, p in model.named_parameters()]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        # The hooks live as long as the parameters, and those may be the user's: they must not hold the buckets.
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._armed = False
        self._next = 0
        self.begin_again()

    def begin_again(self) -> None:
        """As at the beginning, on every rank alike: ranks that were interrupted may have other buckets than these."""
        self._arrived: list[int] | None = []
        self._trained = tuple(p.requires_grad for _, p in self._every)
        self._build(list(reversed(range(len(self._every)))))

    def let_go(self) -> None:
        """Give up the buckets, and the gradients in them, between two steps; no step before `begin_again`."""
        _remove(self._hooks)
        self._buckets.clear()
        self._home.clear()
        for _, p in self._every:
            p.grad = None

    def reset(self) -> None:
        """A step begins; the one before may have been broken off anywhere."""
        self._armed = False
        # A live cell may freeze and unfreeze.
        if (trained := tuple(p.requires_grad for _, p in self._every)) != self._trained:
            self._trained = trained
            self._build(list(reversed(range(len(self._every)))))

    def hold(self) -> None:
        """After a backward pass that another follows: autograd adds to the buckets in place from here on."""
        for i in self._home:
            refuse_sparse(*self._every[i])
        for bucket in self._buckets:
            bucket.adopt()

    def start(self) -> None:
        """Before the backward pass that completes the gradients: they are sent as they come."""
        self._next, self._armed = 0, self.world_size > 1
        for bucket in self._buckets:
            bucket.missing, bucket.work = len(bucket.params), None

    def finish(self) -> Tensor | None:
        """After that pass (on a rank without rows: instead of it): gradients are sums over all ranks.

        Returns the canary of the last reduction, on the device: ALIVE when it was made, and with it all before it.
        On a GPU nothing else tells, since an aborted reduction raises nothing here. None when nothing is reduced.
        """
        self._armed = False
        while self._next < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            bucket.receive()
        canary = self._buckets[-1].used[-1] if self._buckets else None
        self._follow_arrival()
        return canary

    def _build(self, order: Sequence[int]) -> None:
        _remove(self._hooks)
        self._buckets: list[_Bucket] = []
        self._home: dict[int, _Bucket] = {}
        if self.world_size == 1:
            return
        for numbers in chunks([(i, self._every[i][1]) for i in order if self._trained[i]]):
            bucket = _Bucket([self._every[i][1] for i in numbers], self.group)
            self._buckets.append(bucket)
            for i in numbers:
                self._home[i] = bucket
                self._hooks.append(self._every[i][1].register_post_accumulate_grad_hook(self._hook(i)))

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        itself = weakref.ref(self)

        def arrived(param: Tensor) -> None:
            if (replicas := itself()) is not None and replicas._armed:
                replicas._arrive(number, param)

        return arrived

    def _arrive(self, number: int, param: Tensor) -> None:
        bucket = self._home[number]
        refuse_sparse(self._every[number][0], param)
        if bucket.missing == 0:
            raise came_twice(self._every[number][0])
        bucket.missing -= 1
        if self._arrived is not None:
            self._arrived.append(number)
        # In order, so that every rank issues the same collectives whatever its autograd does first.
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.missing = 0
        bucket.send()

    def _follow_arrival(self) -> None:
        """After the first step, once: buckets in the order in which its first rank's gradients arrived."""
        if self._arrived is None or self.world_size == 1:
            return
        seen, self._arrived = self._arrived, None
        order = list(dict.fromkeys([*seen, *reversed(range(len(self._every)))]))
        agreed = torch.tensor(order, dtype=torch.int64, device=self._every[0][1].device)
        dist.broadcast(agreed, group_src=0, group=self.group)
        grads = [p.grad for _, p in self._every]
        self._build(agreed.tolist())
        for (_, p), grad in zip(self._every, grads, strict=True):
            p.grad = grad


def refuse_sparse(name: str, param: Tensor) -> None:
    """Raises TrainingError when the gradient of `param` is sparse."""
    if param.grad is not None and param.grad.is_sparse:
        raise TrainingError(
            f"The gradient of {name!r} is sparse; ranks sum dense ones.",
            numbers=f"shape {tuple(param.shape)}",
            hint="nn.Embedding(..., sparse=False)",
        )


def came_twice(name: str) -> TrainingError:
    """What to raise when a gradient arrives that has been sent."""
    return TrainingError(
        f"The gradient of {name!r} came twice in one backward pass.",
        numbers="it had been sent to the other ranks already",
        hint="torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    )


def _remove(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    while hooks:
        hooks.pop().remove()


def chunks(params: list[tuple[int, nn.Parameter]]) -> Iterator[list[int]]:
    """Numbers of parameters, cut where dtype or device changes and where a bucket is full; the first one is small."""
    chunk: list[int] = []
    size, limit, last = 0, _FIRST_BYTES, None
    for number, p in params:
        kind = (p.dtype, p.device)
        if chunk and (size >= limit or kind != last):
            yield chunk
            chunk, size, limit = [], 0, _BUCKET_BYTES
        chunk.append(number)
        size += p.numel() * p.element_size()
        last = kind
    if chunk:
        yield chunk


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
