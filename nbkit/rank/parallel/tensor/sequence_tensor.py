"""Hidden states of which every rank holds some positions: what goes between the blocks of a sequence-parallel model.

From a vocabulary-parallel embedding to a vocabulary-parallel head positions stay split (Korthikanti et al. 2022, 4.2).
The code between belongs to the model, and is not ours to rewrite: a `PositionShard` looks like the whole tensor (see
sharded_tensor.py) and does in parts what treats positions one by one: sums and products, with whole tensors too, of
which it takes its positions; norms over features; dropout; activations; casts. Anything else gathers it first.

What is learned and is used on the way (the positions' table, a norm's weights) is whole, and its gradient is made whole
at once: an all-gather of what has positions, an all-reduce of what has none. Both are a batch times smaller than the
hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.rank.parallel.tensor.collectives import copy_to, gather_seq, split_to
from nbkit.rank.parallel.tensor.sharded_tensor import InParts, named, whole
from nbkit.rank.torch_private import tree_leaves, tree_map_only
from nbkit.tensor_layout import bounds


class PositionShard(InParts):
    """Hidden states (B, T, ...) whose dim 1 is spread over `group`."""

    called, way_out = "positions of the hidden states", "write x = f(x) instead of changing x in place"
    to_gather = "x = x[...]"

    _whole: tuple[bool, Tensor] | None = None

    @staticmethod
    def __new__(cls, part: Tensor, group: dist.ProcessGroup, total: int, along: int = 1) -> PositionShard:
        return InParts.__new__(cls, part, group, total, along)

    def gathered(self) -> Tensor:
        """The whole. Several who need it share one all-gather."""
        with_graph = torch.is_grad_enabled()
        if self._whole is None or self._whole[0] != with_graph:
            self._whole = with_graph, super().gathered()
        return self._whole[1]

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """What treats every position by itself."""
        if "out" in kwargs or not args or (handler := _HANDLERS.get(func)) is None:
            return NotImplemented
        return handler(func, *args, **kwargs)


def for_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All positions of `x`, for a computation of which every rank does a part: the parts of the gradient are summed."""
    if isinstance(x, PositionShard):
        return gather_seq(x.part, x.group, x.along, x.total)
    return copy_to(whole(x), group)


def positions_of(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """(this rank's positions of `x`, how many there are in all), for a computation that treats them one by one."""
    if isinstance(x, PositionShard):
        return x.part, x.total
    return split_to(whole(x), group, 1), x.shape[1]


def give_whole(_: nn.Module, __: Any, output: Any) -> Any:
    """A forward hook of the model: who calls it gets hidden states whole."""
    if not any(isinstance(leaf, PositionShard) for leaf in tree_leaves(output)):
        return None
    return tree_map_only(PositionShard, PositionShard.gathered, output)


def sendable(x: Tensor) -> Tensor:
    """What goes to the next pipeline stage: this rank's positions, which `completed` makes the same of there.

    Of a single position the parts are not shorter than the whole on every rank, so it goes whole.
    """
    if not isinstance(x, PositionShard):
        return x
    return x.part if x.total > 1 else x.gathered()


def completed(received: Tensor, whole: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """What the stage before had, where its shape was `whole`."""
    if group is None or len(whole) < 3 or tuple(received.shape) == tuple(whole):
        return received
    start, stop = bounds(whole[1], group.size(), group.rank())
    if tuple(received.shape) != (whole[0], stop - start, *whole[2:]):
        return received
    return PositionShard(received, group, whole[1])


def _unary(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, PositionShard):
        return NotImplemented
    # The dtype and device of another tensor, as in type_as.
    args = tuple(arg.part if isinstance(arg, InParts) else arg for arg in args)
    return _of(x, func(x.part, *args, **kwargs))


def _of(x: PositionShard, part: Tensor) -> PositionShard:
    """Around `part`; what was changed in place stays the same object."""
    if part is not x.part:
        return x.like(part)
    x._whole = None
    return x


def _together(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation that is elementwise in all its tensors."""
    like = next((arg for arg in args if isinstance(arg, PositionShard)), None)
    if like is None or any(isinstance(value, Tensor) for value in kwargs.values()):
        return NotImplemented
    if func in _IN_PLACE and args[0] is not like:
        return NotImplemented  # an ordinary tensor is to have the whole
    parts = [_fitting(arg, like) if isinstance(arg, Tensor) else arg for arg in args]
    if any(part is None for part in parts):
        return NotImplemented
    part = func(*parts, **kwargs)
    first = args[0]
    return _of(first, part) if isinstance(first, PositionShard) else like.like(part)


def _fitting(x: Tensor, like: PositionShard) -> Tensor | None:
    """What `x` has for the positions of `like` on this rank, both being broadcast; None when there is no telling."""
    if isinstance(x, PositionShard):
        alike = (x.ndim, x.along, x.total) == (like.ndim, like.along, like.total)
        return x.part if alike else None
    at = like.along - (like.ndim - x.ndim)
    if isinstance(x, InParts) or x.ndim > like.ndim:
        return None
    if at >= 0 and x.shape[at] == like.total:
        return split_to(x, like.group, at)
    if at >= 0 and x.shape[at] != 1:
        return None
    return copy_to(x, like.group) if x.requires_grad else x


def _norm(func: Any, x: Any, shape: Any, *learned: Any, **kwargs: Any) -> Any:
    """A norm over the last dim: what is learned gets its gradient from the positions of all ranks."""
    if not isinstance(x, PositionShard) or len(shape) >= x.ndim - x.along:
        return NotImplemented

    def shared(value: Any) -> Any:
        return copy_to(value, x.group) if isinstance(value, Tensor) and value.requires_grad else value

    return x.like(func(x.part, shape, *map(shared, learned), **{key: shared(value) for key, value in kwargs.items()}))


def _over_features(func: Any, x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    dims = [dim] if isinstance(dim, int) else dim
    if not isinstance(x, PositionShard) or not dims or any(d % x.ndim <= x.along for d in dims):
        return NotImplemented
    return x.like(func(x.part, dim, keepdim, **kwargs))


def _index(func: Any, x: Any, index: Any) -> Any:
    """All of it, as in x[:, 0:, :]."""
    items = index if isinstance(index, tuple) else (index,)
    every = all(
        isinstance(item, slice) and item.start in (None, 0) and item.stop is item.step is None for item in items
    )
    return x if isinstance(x, PositionShard) and every else NotImplemented


def _same_shape(func: Any, x: Any, *shape: Any, **kwargs: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if not isinstance(x, PositionShard) or kwargs or not all(isinstance(n, int) for n in sizes):
        return NotImplemented
    known = prod(n for n in sizes if n != -1)
    full = tuple(x.numel() // max(known, 1) if n == -1 else n for n in sizes)
    return x if full == tuple(x.shape) else NotImplemented


def _shape_only(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Nothing of the values is used: of the last argument, where it says the shape of another one."""
    if func is Tensor.expand_as and isinstance(args[0], PositionShard):
        return NotImplemented
    bare = [_blank(arg) if isinstance(arg, PositionShard) else arg for arg in args]
    return func(*bare, **kwargs)


def _blank(x: PositionShard) -> Tensor:
    return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)


_ONE = (
    *("float", "double", "half", "bfloat16", "to", "type_as", "contiguous", "clone", "detach", "cpu", "cuda"),
    *("neg", "abs", "exp", "log", "sqrt", "rsqrt", "square", "tanh", "sigmoid", "relu", "gelu", "silu", "__neg__"),
    *("dropout", "requires_grad_"),
)
_SEVERAL = ("add", "sub", "mul", "div", "true_divide", "pow", "masked_fill", "where", "maximum", "minimum")
_SIGNS = ("add", "sub", "mul", "truediv", "pow")
_IN_PLACE = frozenset(named(*(f"{name}_" for name in _SEVERAL), *(f"__i{name}__" for name in _SIGNS)))

_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(named(*_ONE), _unary),
    **dict.fromkeys(named(*_SEVERAL, *(f"{name}_" for name in _SEVERAL)), _together),
    **dict.fromkeys(named(*(f"__{side}{name}__" for name in _SIGNS for side in ("", "r", "i"))), _together),
    **dict.fromkeys([F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm], _norm),
    **dict.fromkeys(named("mean", "sum"), _over_features),
    **dict.fromkeys(named("view", "reshape"), _same_shape),
    **dict.fromkeys(named("zeros_like", "ones_like", "empty_like", "full_like", "expand_as"), _shape_only),
    **dict.fromkeys(named("new_zeros", "new_ones", "new_empty", "new_full"), _shape_only),
    Tensor.__getitem__: _index,
}
