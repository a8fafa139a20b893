"""The output of a vocabulary-parallel head: every rank holds the logits of its part of the vocabulary.

A `VocabShard` looks like the whole tensor (sharded_tensor.py), so that a loss written for one process runs on it. What
losses do on the way (views, slices, casts, scaling, transposing) keeps it in parts. `F.cross_entropy` is then computed
in place: per position three numbers go over the wire instead of a row of the vocabulary (one all-reduce of the
maxima, one of exponent sums and target logits). Anything else gathers the whole first, with the right gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from nbkit.rank.parallel.tensor.collectives import copy_to
from nbkit.rank.parallel.tensor.cross_entropy import split_cross_entropy
from nbkit.rank.parallel.tensor.sharded_tensor import InParts, named


class VocabShard(InParts):
    """Logits whose dim `along` (mostly the last) is spread over `group`."""

    called, to_gather = "logits", "logits = logits + 0"
    way_out = "logits = logits + 0 first, which gathers them; or tp_plan={'<the head>': 'colwise_gather'}"

    @staticmethod
    def __new__(cls, part: Tensor, group: dist.ProcessGroup, total: int, along: int = -1) -> VocabShard:
        return InParts.__new__(cls, part, group, total, along)

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """What losses do on the way."""
        handler = _HANDLERS.get(func) if args and isinstance(args[0], VocabShard) else None
        return NotImplemented if handler is None else handler(func, *args, **kwargs)


def _at_end(shard: VocabShard) -> bool:
    return shard.along == shard.ndim - 1


def _elementwise(func: Any, shard: VocabShard, *args: Any, **kwargs: Any) -> Any:
    return shard.like(func(shard.part, *args, **kwargs))


def _scaled(func: Any, shard: VocabShard, *args: Any, **kwargs: Any) -> Any:
    plain = (int, float)
    if kwargs or not all(isinstance(arg, plain) or (isinstance(arg, Tensor) and arg.ndim == 0) for arg in args):
        return NotImplemented
    # A learned scale gets a part of its gradient from each part of the vocabulary.
    shared = [copy_to(arg, shard.group) if isinstance(arg, Tensor) and arg.requires_grad else arg for arg in args]
    return shard.like(func(shard.part, *shared))


def _reshape(func: Any, shard: VocabShard, *shape: Any, **kwargs: Any) -> Any:
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = tuple(shape[0]) if isinstance(shape[0], tuple | list) else ()
    if kwargs or not shape or not _at_end(shard):
        return NotImplemented
    known = prod(n for n in shape if n != -1)
    full = [shard.numel() // max(known, 1) if n == -1 else n for n in shape]
    if full[-1] != shard.total:
        return NotImplemented
    return shard.like(shard.part.reshape(*full[:-1], shard.part.shape[-1]), len(full) - 1)


def _flatten(func: Any, shard: VocabShard, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not _at_end(shard) or end_dim % shard.ndim == shard.ndim - 1:
        return NotImplemented
    part = shard.part.flatten(start_dim, end_dim)
    return shard.like(part, part.ndim - 1)


def _index(func: Any, shard: VocabShard, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if not _at_end(shard) or any(isinstance(item, list) for item in items):
        return NotImplemented
    used = [item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1 for item in items]
    used = [0 if item is None or item is Ellipsis else n for item, n in zip(items, used, strict=True)]
    behind = any(item is Ellipsis for item in items) and items[-1] is not Ellipsis
    touches = behind or sum(used) == shard.ndim
    if touches and not (isinstance(items[-1], slice) and items[-1] == slice(None)):
        return NotImplemented
    part = shard.part[index]
    return shard.like(part, part.ndim - 1)


def _transpose(func: Any, shard: VocabShard, first: int, second: int) -> Any:
    first, second = first % shard.ndim, second % shard.ndim
    along = {first: second, second: first}.get(shard.along, shard.along)
    return shard.like(shard.part.transpose(first, second), along)


def _matrix_transpose(func: Any, shard: VocabShard) -> Any:
    return _transpose(func, shard, -2, -1)


def _permute(func: Any, shard: VocabShard, *dims: Any) -> Any:
    order = [dim % shard.ndim for dim in (dims[0] if isinstance(dims[0], tuple | list) else dims)]
    return shard.like(shard.part.permute(order), order.index(shard.along))


def _cross_entropy(
    func: Any,
    shard: VocabShard,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    of_classes = 0 if shard.ndim == 1 else 1
    if (
        shard.along != of_classes
        or weight is not None
        or target.is_floating_point()
        or size_average is not None
        or reduce is not None
    ):
        return NotImplemented
    logits = shard.part.movedim(of_classes, -1)
    losses = split_cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        shard.group,
        total=shard.total,
        ignore_index=ignore_index,
        smoothing=label_smoothing,
    )
    if not (shard.dtype.itemsize < 4 and torch.is_autocast_enabled(shard.device.type)):
        losses = losses.to(shard.dtype)
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


_ONE = ("float", "double", "half", "bfloat16", "to", "type_as", "contiguous", "detach", "clone", "cpu", "cuda", "tanh")

_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys(named(*_ONE), _elementwise),
    **dict.fromkeys(named("mul", "div", "__mul__", "__truediv__", "__rmul__"), _scaled),
    **dict.fromkeys(named("view", "reshape"), _reshape),
    **dict.fromkeys(named("flatten"), _flatten),
    Tensor.__getitem__: _index,
    **dict.fromkeys(named("transpose", "swapaxes"), _transpose),
    **dict.fromkeys(named("permute"), _permute),
    getattr(Tensor, "mT").__get__: _matrix_transpose,  # noqa: B009  mypy takes it for a tensor
}
