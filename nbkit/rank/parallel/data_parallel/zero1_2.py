"""ZeRO 1 and 2: every rank holds whole parameters, and updates only its part of each.

Gradients are reduce-scattered bucket by bucket. A tensor that the optimizer needs whole has an owner rank instead of
parts: see owned_bucket.py. The optimizer gets slices of the whole parameters. After its step, the updated slices are
all-gathered while the next forward computes. ZeRO 1 keeps the buffers of whole gradients, ZeRO 2 frees them bucket by
bucket. data_axis.py lists the bytes, and buckets.py describes the messages.

After the optimizer's step, a rank has the new values of its own parts only. The parts of other ranks arrive bucket by
bucket, with two buckets in flight, in the order in which they are sent. Until then, a module has a stand-in for its
dict of parameters. Reading from it waits for the parameters, whether the reader is the module's own forward, another
module's forward, or a user's hook. So no code has to know which module reads which parameter, and no parameter is read
before it has arrived.

The slices are gathered in the dtype of the parameters, also under autocast, although ZeRO 3 then gathers most weights
in 16 bits (zero3/unit.py). With ZeRO 1 and 2, a rank may use its weights between two steps without the other ranks. It
may call the model outside of autocast, read `state_dict()`, or compute the norm of a weight in a callback. After a
gather in 16 bits, every rank but the owner would read rounded values, and ranks would read different ones. A later
gather in float32 would need all ranks. A switch to ddp sends no weights for the same reason: every rank has them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.data_parallel.buckets import (
    Bucket,
    BucketedAxis,
    InFlight,
    Links,
    Packing,
    Reduction,
    aligned,
    all_gather,
    flat_with_views,
)
from nbkit.rank.parallel.data_parallel.owned_bucket import OwnedBucket
from nbkit.rank.parallel.module.copies import aliased, homes, parameter_like, replace_submodule
from nbkit.rank.parallel.reshard.redistribute import emptied
from nbkit.rank.torch_private import foreach_copy_
from nbkit.techniques.exchange import BUCKET
from nbkit.tensor_layout import Layout, bounds

_UNDER_WAY = 2  # buckets; they need memory in addition to the parameters


class ParameterBucket(Protocol):
    """A bucket of parameters.

    gather: start to send the part of this rank. spread: copy the parts of all ranks into the parameters.
    """

    def gather(self) -> tuple[Tensor, dist.Work]: ...

    def spread(self, matrix: Tensor) -> None: ...


Waiting = Mapping[int, Sequence[nn.Module]]
"""Number of a bucket -> the modules whose parameters are complete when this bucket has arrived."""


class LateGather:
    """The parameter buckets of one step, until they have arrived. Any thread may wait for them.

    missing: the number of buckets that have not arrived. group: the group that sends them.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.missing = group, 0
        self._inner: Any = None
        self._left: deque[ParameterBucket] = deque()
        self._under_way: deque[tuple[ParameterBucket, Tensor, dist.Work]] = deque()
        self._number = 0  # the bucket that arrives next
        self._stand_ins: dict[int, list[_StandIn]] = {}
        self._lock = threading.RLock()

    def begin(self, buckets: Sequence[ParameterBucket], waiting: Waiting) -> None:
        """Send `buckets`, in this order."""
        with self._lock:
            self.missing, self._number, self._left = len(buckets), 0, deque(buckets)
            self._inner = getattr(self.group, "inner", None)
            for _ in range(_UNDER_WAY):
                self._send()
            for number, modules in waiting.items():
                self._stand_ins[number] = [_StandIn(module, self, number) for module in modules]

    def wait(self, number: int | None = None, *, until: float | None = None) -> None:
        """Return when buckets up to `number` (None: all) have arrived. until: deadline, as time.monotonic()."""
        if not self.missing:
            return
        with self._lock:
            while self._under_way and (number is None or self._number <= number):
                bucket, matrix, work = self._under_way[0]
                work.wait(*([] if until is None else [timedelta(seconds=max(until - time.monotonic(), 0.001))]))
                bucket.spread(matrix)
                del matrix
                # If this is interrupted before the next line, it is repeated.
                self._under_way.popleft()
                self.missing -= 1
                for stand_in in self._stand_ins.pop(self._number, ()):
                    stand_in.leave()
                self._number += 1
                self._send()

    def end(self, seconds: float) -> bool:
        """Drop the buckets in flight. Return True if all buckets have arrived.

        First wait for up to `seconds`, if the group still works. A rank that failed in its update sends nothing.
        """
        # A device does not report that an aborted all-gather never arrived.
        if seconds and getattr(self.group, "inner", None) is self._inner:
            with suppress(RuntimeError, TrainingError):
                self.wait(until=time.monotonic() + seconds)
        whole = not self.missing
        self._forget()
        return whole

    def _send(self) -> None:
        if self._left:
            bucket = self._left.popleft()
            self._under_way.append((bucket, *bucket.gather()))

    def _forget(self) -> None:
        self.missing = 0
        self._left.clear()
        self._under_way.clear()
        for stand_in in [one for some in self._stand_ins.values() for one in some]:
            stand_in.leave()
        self._stand_ins.clear()


class _StandIn(dict[str, Any]):
    """Replaces a module's dict of parameters until bucket `number` has arrived.

    The dict itself is empty. Code that bypasses its methods, as C code can, finds nothing instead of old numbers.
    """

    def __init__(self, module: nn.Module, late: LateGather, number: int) -> None:
        super().__init__()
        self.attributes, self.late, self.number = vars(module), late, number
        self.real: dict[str, Any] = self.attributes["_parameters"]
        self.attributes["_parameters"] = self

    def leave(self) -> None:
        """Give the module its own dict again."""
        if self.attributes["_parameters"] is self:
            self.attributes["_parameters"] = self.real

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.late.wait(self.number)
        return dict, (dict(self.real),)


def _waiting(name: str) -> Callable[..., Any]:
    def look(self: _StandIn, *args: Any, **kwargs: Any) -> Any:
        self.late.wait(self.number)
        return getattr(self.real, name)(*args, **kwargs)

    look.__name__ = name
    return look


for _name in (
    "__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__",
    "__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem",
    "setdefault", "update", "values",
):  # fmt: skip
    setattr(_StandIn, _name, _waiting(_name))


def compiles() -> bool:
    """Return True if torch.compile has compiled anything: it would compile again after a module's dict is replaced."""
    found = sys.modules.get("torch._dynamo.utils")
    return found is not None and bool(found.counters["stats"]["unique_graphs"])


def waiting(module: nn.Module, numbers: Mapping[int, int]) -> tuple[dict[int, list[nn.Module]], int]:
    """Return (the `waiting` of LateGather.begin, the last bucket that must arrive before anything runs, or -1).

    numbers: id of a parameter -> its bucket. A parameter that is also held outside a module's dict of parameters is
    needed at once, because a read there would not be noticed.
    """
    found: dict[int, list[nn.Module]] = {}
    first, seen, ahead = -1, set[nn.Module](), [module]
    # Search again in every step, because the user may have replaced a module.
    while ahead:
        part = ahead.pop()
        if part in seen:
            continue
        seen.add(part)
        ahead += [child for child in part._modules.values() if child is not None]
        own = part._parameters
        last = max([numbers.get(id(p), -1) for p in own.values()], default=-1)
        if last < 0:
            continue
        found.setdefault(last, []).append(part)
        if type(own) is not dict or isinstance(part, nn.RNNBase):
            first = max(first, last)
        for name in aliased(part):
            first = max(first, numbers.get(id(own.get(name)), -1))
    return found, first


_ANSWER_S = 3.0
"""Seconds for which a rank that was aborted in a step waits for the other ranks' updates of the previous step."""


class ShardBucket(Bucket):
    """Neighbouring parameters of one dtype. grads: this rank's part of each summed gradient."""

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
        # Take the gradients from where autograd has put them. With one backward pass, this is not the buffer.
        grads = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None
        self.flight.send(self.reduction, grads, self._landed)

    def _landed(self, row: Tensor) -> None:
        width = self.packing.width
        foreach_copy_(self.grads, self.packing.shards(row, self.links.index))
        self.counts = row[width:].clone() if self.reduction.unused else None

    def give(self) -> None:
        """Give the summed gradients to the optimizer. The counts are read only if this rank did not use a parameter."""
        counts = self.counts.tolist() if self.counts is not None else []
        for i, (p, grad) in enumerate(zip(self.held, self.grads, strict=True)):
            p.grad = None if i in self.reduction.unused and counts[i] == 0 else grad

    @torch.no_grad()
    def gather(self) -> tuple[Tensor, dist.Work]:
        """Start to gather the updated parts."""
        like = self.params[0].detach()
        matrix = like.new_empty(self.links.ranks, aligned(self.packing.width, like))
        row = matrix[self.links.index]
        mine = self.packing.shards(row, self.links.index)
        foreach_copy_(mine, [p.detach() for p in self.held])
        return all_gather(row, self.links, matrix)

    @torch.no_grad()
    def spread(self, matrix: Tensor) -> None:
        """Copy the gathered parts into the whole parameters. Their versions count only what a user changes."""
        self.packing.unpack(matrix[:, : self.packing.width], [p.data.view(-1) for p in self.params])


class ShardedOptimizer(BucketedAxis[ShardBucket | OwnedBucket]):
    """The data axis of ZeRO 1 or 2 for `module`, a skeleton; see data_axis.

    owners: name of a tensor -> position in the group of the rank that updates the whole tensor.
    """

    def __init__(
        self,
        module: nn.Module,
        layouts: Mapping[str, Layout],
        links: Links,
        *,
        zero: int,
        bucket: int = BUCKET,
        owners: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        wholes: dict[str, nn.Parameter] = {}
        found = homes(module)
        for name, places in found.items():
            old = getattr(*places[0])
            wholes[name] = parameter_like(torch.empty(layouts[name].local, dtype=old.dtype, device=old.device), old)
            replace_submodule(places, wholes[name])
        super().__init__(wholes, bucket=bucket)
        self.links, self.zero, self._module, self._owners = links, zero, module, owners
        self._late, self._first = LateGather(links.group), -1
        for name, whole in wholes.items():
            layout, part = layouts[name], layouts[name]
            mine: Tensor | None = whole.data
            if name in owners:
                mine = mine if owners[name] == links.index else None
            elif layout.local:
                part = layout.part(0, links.ranks, links.index)
                mine = whole.data[slice(*bounds(layout.local[0], links.ranks, links.index))]
            held = None if mine is None else parameter_like(mine, whole)
            self._add(name, held, part, (whole.data, layout), whole, found[name])
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
        """Start to gather the updated parts: an all-gather per bucket, in the order in which forward needs them."""
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
        for name, held in self.held.items():
            held.requires_grad_(self._params[name].requires_grad)
        super()._build(order)

    def _chunks(self, trained: Sequence[tuple[str, nn.Parameter]]) -> Iterable[list[str]]:
        at = {name: number for number, (name, _) in enumerate(trained)}
        parts = [each for each in trained if each[0] not in self._owners]
        found = [*super()._chunks(parts), *super()._chunks([each for each in trained if each[0] in self._owners])]
        return sorted(found, key=lambda names: at[names[-1]])

    def _bucket(self, names: Sequence[str]) -> ShardBucket | OwnedBucket:
        wholes, buffer = [self._params[name] for name in names], self.zero == 1
        if names[0] in self._owners:
            owners = [self._owners[name] for name in names]
            mine = [self.held[name] for name in names if name in self.held]
            return OwnedBucket(wholes, mine, owners, self.links, self._flight, buffer=buffer)
        held = [self.held[name] for name in names]
        return ShardBucket(wholes, held, self.links, self._flight, buffer=buffer)
