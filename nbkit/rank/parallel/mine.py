"""The torch half of mine=: a user's class replaces nbkit's own code.

The class sees plain tensors and the default group. nbkit does the rest: it passes gradients in one order on all ranks,
keeps parts where checkpoints and switches look for them, and cleans up after an aborted step. nbkit/techniques/mine.py
lists the methods, and judge.py checks whether a class is correct.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import StrategyError
from nbkit.rank.parallel.data_parallel.buckets import Bucket, chunks
from nbkit.rank.parallel.data_parallel.ddp import Replicas, ReplicaSetup
from nbkit.rank.parallel.data_parallel.owned_bucket import OwnedBucket
from nbkit.rank.parallel.data_parallel.zero1_2 import ShardBucket, ShardedOptimizer
from nbkit.rank.parallel.tensor.layers import ColumnParallel, RowParallel
from nbkit.rank.parallel.tensor.plan.linear_types import core, feature_dims
from nbkit.rank.parallel.tensor.sharded_tensor import whole
from nbkit.tensor_layout import bounds


def own_replicas(own: type, setup: ReplicaSetup) -> ReplicaSetup:
    """Return `setup` with a user's class that makes the gradients equal on all ranks."""
    return replace(setup, axis_class=partial(OwnReplicas, own=own))


class _OneGradient(Bucket):
    """The gradient of one parameter, which is passed to a user's class when it is complete."""

    def __init__(self, param: nn.Parameter, axis: OwnReplicas) -> None:
        super().__init__([param], [])
        self.work, self._axis = None, weakref.ref(axis)

    def send(self) -> None:
        axis, (param,) = self._axis(), self.params
        if axis is None or axis.own is None:
            return
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        # nbkit's gradients are a rank's share of the batch mean. The class expects the mean over the rank's rows.
        param.grad.mul_(axis.world_size)
        axis.own.ready(param)

    def advance(self) -> None:
        pass


class OwnReplicas(Replicas):
    """Replicas whose gradients a user's class makes equal. own: its object, created again after an aborted step."""

    own: Any = None

    def __init__(self, model: nn.Module, setup: ReplicaSetup, *, own: type) -> None:
        self._model, self._class, self._filled = model, own, False
        super().__init__(model, setup)

    def begin_again(self) -> None:
        self.own, self._filled = None, False
        super().begin_again()
        self._arrived, self._filled = None, True

    def reset(self, *, passes: int = 1) -> None:
        super().reset(passes=passes)
        # Not before the first step, because the weights are filled after this axis is created.
        if self._filled and self.own is None and self.world_size > 1:
            self.own = self._class(self._model)

    def let_go(self) -> None:
        self.own = None
        super().let_go()

    def finish(self) -> Tensor | None:
        self._send_rest()
        if self.own is not None:
            self.own.finish()
        return None

    def _chunks(self, trained: Sequence[tuple[str, nn.Parameter]]) -> Iterable[list[str]]:
        return [[name] for name, _ in trained]

    def _bucket(self, names: Sequence[str]) -> Any:
        return _OneGradient(self._params[names[0]], self)


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class _OwnBucket(ShardBucket):
    """All gradients of one dtype, as a flat tensor for a user's class."""

    own: Any

    def send(self) -> None:
        grads, packing, links = [p.grad for p in self.params], self.packing, self.links
        for p in self.params:
            p.grad = None
        matrix = self._matrix(len(grads))
        packing.pack(matrix[:, : packing.width], grads)
        matrix[:, packing.width :] = torch.tensor([grad is not None for grad in grads])
        matrix.mul_(links.ranks)  # see _OneGradient
        row = self.own.reduce(matrix.view(-1))
        if not isinstance(row, Tensor) or row.numel() != matrix.shape[1]:
            _refuse("reduce", links.ranks, f"{_size(row)} elements for a part of {matrix.shape[1]}")
        self.reduction.unused = {i for i, grad in enumerate(grads) if grad is None}
        self._landed(row.view(-1))

    @torch.no_grad()
    def gather(self) -> tuple[Tensor, dist.Work]:
        """Let the class gather the updated parts. Before, the other parts have the values of the previous step."""
        matrix = self._matrix(0)
        self.packing.pack(matrix, [p.detach() for p in self.params])
        self.own.gather(matrix[self.links.index].clone(), matrix.view(-1))
        return matrix, _Done()

    def _matrix(self, more: int) -> Tensor:
        """Return zeros with a row for each rank, after checking which part the class assigns to this rank."""
        ranks, index, width = self.links.ranks, self.links.index, self.packing.width + more
        part = tuple(self.own.part(ranks * width, index, ranks))
        if part != (index * width, (index + 1) * width):
            _refuse("part", ranks, f"part({ranks * width}, {index}, {ranks}) is {part}")
        return self.params[0].detach().new_zeros(ranks, width)


class OwnShards(ShardedOptimizer):
    """ZeRO 1 in which a user's class sends gradients and updates. nbkit itself sends tensors with an owner."""

    def __init__(self, *args: Any, own: type, **kwargs: Any) -> None:
        self._own = own()
        super().__init__(*args, **kwargs)

    def _chunks(self, trained: Sequence[tuple[str, nn.Parameter]]) -> Iterable[list[str]]:
        parts: dict[Any, list[str]] = {}
        for name, p in trained:
            if name not in self._owners:
                parts.setdefault((p.dtype, p.device), []).append(name)
        return [*parts.values(), *chunks([each for each in trained if each[0] in self._owners])]

    def _bucket(self, names: Sequence[str]) -> ShardBucket | OwnedBucket:
        if names[0] in self._owners:
            return super()._bucket(names)
        wholes, held = [self._params[name] for name in names], [self.held[name] for name in names]
        bucket = _OwnBucket(wholes, held, self.links, self._flight, buffer=True)
        bucket.own = self._own
        return bucket


class OwnColumn(ColumnParallel):
    """A linear map with split outputs that a user's class computes."""

    _own: Any

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with self._link.before():
            y = self._own.column(whole(x), *_weights(self.module))
        self._link.begin()
        return y


class OwnRow(RowParallel):
    """A linear map with split inputs that a user's class computes."""

    _own: Any

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with self._link.after():
            y = self._own.row(x, *_weights(self.module))
        self._link.leave()
        return y


def _weights(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return (weight with a row for each output feature, bias) of this rank's part of a linear map."""
    itself: Any = core(module)
    return itself.weight if feature_dims(itself)[0] == 1 else itself.weight.t(), itself.bias


def own_linears(own: type, ranks: int, index: int) -> Any:
    """Return an object of a user's class for split linear maps, after checking the parts that it assigns."""
    made = own()
    for size in (ranks, 4 * ranks):
        if (part := tuple(made.part(size, index, ranks))) != bounds(size, ranks, index):
            _refuse("part", ranks, f"part({size}, {index}, {ranks}) is {part}")
    return made


def _refuse(method: str, ranks: int, numbers: str) -> NoReturn:
    raise StrategyError(
        f"The method {method} of your class does not return one of {ranks} equal parts.",
        numbers=numbers,
        hint="nbkit.lesson.judge(MyClass)",
    )


def _size(x: Any) -> str:
    return str(x.numel()) if isinstance(x, Tensor) else type(x).__name__
