"""Gradients sent bucket by bucket while backward runs: neighbouring parameters share a message.

Buckets follow the order in which backward finishes gradients, so that the first are on their way while the rest is
computed. They are sent in one order on all ranks, whatever a rank's autograd does first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.levers import BUCKET, FIRST_BUCKET
from nbkit.rank.parallel.data_parallel.base import DataAxis
from nbkit.rank.torch_private import foreach_copy_


class Bucket:
    """Parameters whose gradients travel together. missing: gradients that backward has not made yet.

    views: where in its buffer the gradient of each is to be; empty where it has none.
    """

    def __init__(self, params: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
        self.params, self.views = params, views
        self.missing = len(params)

    def adopt(self) -> None:
        """Move every gradient that autograd put elsewhere into its view."""
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
        """Start the reduction; a parameter without gradient takes part with zeros."""
        raise NotImplementedError


B = TypeVar("B", bound=Bucket)


class BucketedAxis(DataAxis, Generic[B]):
    """Sends the gradients of `params` (name -> parameter) in buckets of about `bucket` bytes that a subclass makes."""

    def __init__(self, params: Mapping[str, nn.Parameter], *, bucket: int = BUCKET) -> None:
        super().__init__()
        self._params, self._bytes = dict(params), bucket
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        # The hooks live as long as the parameters, and those may be the user's: they must not hold the buckets.
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._armed, self._next = False, 0

    def _bucket(self, names: Sequence[str]) -> B:
        """Of these parameters, which have one dtype and device."""
        raise NotImplementedError

    def begin_again(self) -> None:
        self._build(self._backward_order())
        self.reset()

    def let_go(self) -> None:
        self.close()
        self._buckets.clear()
        self._home.clear()
        for p in self._params.values():
            p.grad = None

    def reset(self, *, passes: int = 1) -> None:
        self._armed, self._next = False, 0
        self.follow()
        # A live cell may freeze and unfreeze.
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
        """Backward is over."""
        self._armed = False
        while self._next < len(self._buckets):
            self._send_next()

    def _backward_order(self) -> list[str]:
        """Backward finishes what forward used last."""
        return list(reversed(self._params))

    def _build(self, order: Sequence[str]) -> None:
        self.close()
        self._buckets: list[B] = []
        self._home: dict[str, B] = {}
        self._trains = [p.requires_grad for p in self._params.values()]
        trained = [(name, p) for name in order if (p := self._params[name]).requires_grad]
        for names in chunks(trained, self._bytes):
            bucket = self._bucket(names)
            self._buckets.append(bucket)
            for name in names:
                self._home[name] = bucket
                self._hooks.append(self._params[name].register_post_accumulate_grad_hook(self._hook(name)))

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
        # In order, so that every rank issues the same collectives whatever its autograd does first.
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


def chunks(params: Sequence[tuple[str, nn.Parameter]], bucket: int = BUCKET) -> Iterator[list[str]]:
    """Names of parameters, cut where dtype or device changes and where a bucket is full; the first one is small."""
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
