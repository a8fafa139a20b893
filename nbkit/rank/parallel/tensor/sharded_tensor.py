"""Tensors that are split over a group but look like the whole tensor.

The `shape` and `size()` of a `ShardedTensor` are those of the whole tensor, so code for one process runs on it.
Operations that a subclass can do on parts keep it split. Any other operation first gathers the whole tensor, with the
correct gradient. This is always correct but costs an all-gather. All ranks take part in it, because all ranks run the
same code.

`PositionShard`: hidden states between the blocks of a sequence-parallel model. Each rank holds some positions, from a
vocabulary-parallel embedding to a vocabulary-parallel head (Korthikanti et al. 2022, 4.2). Operations that treat each
position independently keep it split: sums and products (a whole operand is reduced to this rank's positions), norms
over features, dropout, activations and casts. Parameters that are used in between, such as the position table or the
weights of a norm, are whole. Their gradients are completed at once: by an all-gather if they have positions, else by an
all-reduce. Both are smaller than the hidden states by a factor of the batch size.

`VocabShard`: logits of a vocabulary-parallel head. Each rank holds the logits of its part of the vocabulary. The usual
steps of a loss (views, slices, casts, scaling, transposing) keep them split. `F.cross_entropy` is computed on the parts
(Shoeybi et al. 2019, 3). It sends three numbers per position instead of a row of the vocabulary: one all-reduce of the
maxima, and one of exponent sums and target logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.errors import TrainingError
from nbkit.rank.device import kind_names
from nbkit.rank.parallel.tensor.collectives import copy_to, gather_from, gather_seq, split_to
from nbkit.rank.torch_private import assert_async, tree_leaves, tree_map_only, without_subclasses
from nbkit.tensor_layout import bounds


class ShardedTensor(Tensor):
    """A tensor split over `group` along the dim `along`.

    part: this rank's part, an ordinary tensor with its graph. total: length of the whole tensor along that dim.
    borrowed: parameters with which it will be multiplied. The object itself has no graph. Passing it to a
    torch.autograd.Function raises TrainingError.
    """

    _part: Tensor
    _copies: list[tuple[Tensor, int]]
    group: dist.ProcessGroup
    total: int
    along: int
    borrowed: tuple[Tensor, ...] = ()

    called: ClassVar[str] = "tensor"
    way_out: ClassVar[str] = ""
    to_gather: ClassVar[str] = ""
    """Texts for errors: the name for users, how to avoid the error, and how to gather the tensor."""

    @staticmethod
    def __new__(
        cls, part: Tensor, group: dist.ProcessGroup, total: int, along: int, dtype: torch.dtype | None = None
    ) -> Self:
        along %= part.ndim
        shape = [total if dim == along else length for dim, length in enumerate(part.shape)]
        with_graph = part.requires_grad and torch.is_grad_enabled()
        itself: Self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype or part.dtype, device=part.device, requires_grad=with_graph
        )
        itself._part, itself.group, itself.total, itself.along = part, group, total, along
        itself._copies = []
        if with_graph:
            # Gradients go to the part. A gradient that arrives here comes from a torch.autograd.Function.
            with without_subclasses():
                itself.register_hook(lambda _: cls._refuse_function("torch.autograd.Function"))
        return itself

    @property
    def part(self) -> Tensor:
        """Return this rank's part."""
        with without_subclasses():
            foreign = self.grad_fn
        if foreign is not None:
            self._refuse_function(foreign.name())
        if any(counter._version != seen for counter, seen in self._copies):
            # For example logits[..., 50257:].fill_(-inf), which changes the tensor itself in one process.
            self._refuse("in place, on a view of them")
        return self._part

    def like(self, part: Tensor, along: int | None = None) -> Self:
        """Return a new tensor around `part`, split in the same way."""
        return type(self)(part, self.group, self.total, self.along if along is None else along)

    def gathered(self) -> Tensor:
        """Return the whole tensor, the same on every rank. All ranks of the group must call it."""
        made = gather_from(self.part, self.group, self.along, self.total)
        if not made.is_inference():  # inference tensors have no version counter
            self._copies.append((_counter(made), made._version))
        return made

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of `func` on the parts, or NotImplemented if it needs the whole tensor."""
        return NotImplemented

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        start, stop = bounds(self.total, self.group.size(), self.group.rank())
        kind = type(self).__name__
        return f"{kind}(shape={tuple(self.shape)}, dtype={self.dtype}, holds {start}:{stop} of dim {self.along})"

    def __str__(self) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_WRAPPER:
            with without_subclasses():
                return func(*args, **kwargs)
        if func in _OF_PART:
            return func(args[0].part)
        answer = cls.answer(func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        name = getattr(func, "__name__", "")
        changes = name in _REFUSED or (name.endswith("_") and not name.endswith("__"))
        # A function that changes an ordinary tensor may gather its other arguments.
        if (changes and not _is_plain(args[0] if args else None)) or isinstance(kwargs.get("out"), ShardedTensor):
            cls._refuse(name)
        plain_args, plain_kwargs = tree_map_only(ShardedTensor, whole, (list(args), kwargs))
        return func(*plain_args, **plain_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls._refuse(str(func))

    @classmethod
    def _refuse(cls, name: str) -> NoReturn:
        raise TrainingError(
            f"The {cls.called} are split over the ranks of the tensor axis, and this operation would change only one "
            "part.",
            numbers=f"operation {name}",
            hint=cls.way_out,
        )

    @classmethod
    def _refuse_function(cls, name: str) -> NoReturn:
        raise TrainingError(
            f"The {cls.called} are split over the ranks of the tensor axis, and a torch.autograd.Function that takes "
            "them would lose their gradient.",
            numbers=name,
            hint=f"{cls.to_gather} before it, which gathers them; in checkpoint(...): use_reentrant=False",
        )


def whole(x: Tensor) -> Tensor:
    """Return `x`, gathered if it is split."""
    return x.gathered() if isinstance(x, ShardedTensor) else x


def _counter(x: Tensor) -> Tensor:
    """Return an empty tensor whose `_version` counts the in-place changes of `x`, including those through views."""
    alias = x.detach()
    alias.data = x.new_empty(0)
    return alias


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, ShardedTensor)


_REFUSED = {
    "__setitem__",
    "__set__",
    "register_hook",
    "retain_grad",
    "requires_grad_",
    "register_post_accumulate_grad_hook",
}


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


_OF_WRAPPER: set[Any] = {
    *_getters(
        "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_quantized", "is_nested", "is_cpu"
    ),
    *_getters("itemsize", "nbytes"),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.is_floating_point),
    *(Tensor.is_complex, Tensor.element_size, Tensor.get_device, Tensor.ndimension, torch.numel),
    *(torch.is_floating_point, torch.is_complex, Tensor.__hash__),
}

_OF_PART: set[Any] = {*_getters("requires_grad", "grad_fn", "is_leaf")}


def named(*names: str) -> list[Any]:
    """Return the functions with these names in torch, torch.Tensor and torch.nn.functional."""
    return [found for name in names for home in (torch, Tensor, F) if (found := getattr(home, name, None)) is not None]


class PositionShard(ShardedTensor):
    """Hidden states (B, T, ...) whose dim 1 is split over `group`."""

    called, way_out = "positions of the hidden states", "write x = f(x) instead of changing x in place"
    to_gather = "x = x[...]"

    _whole: tuple[bool, Tensor] | None = None

    @staticmethod
    def __new__(cls, part: Tensor, group: dist.ProcessGroup, total: int, along: int = 1) -> PositionShard:
        return ShardedTensor.__new__(cls, part, group, total, along)

    def gathered(self) -> Tensor:
        """Return the whole tensor. Repeated calls share one all-gather."""
        with_graph = torch.is_grad_enabled()
        if self._whole is None or self._whole[0] != with_graph:
            self._whole = with_graph, super().gathered()
        return self._whole[1]

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func` on the parts if it treats each position independently."""
        if "out" in kwargs or not args or (handler := _HANDLERS.get(func)) is None:
            return NotImplemented
        return handler(func, *args, **kwargs)


def for_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all positions of `x`, for a computation that is divided over ranks. Backward sums the ranks' gradients."""
    if isinstance(x, PositionShard):
        return gather_seq(x.part, x.group, x.along, x.total)
    return copy_to(whole(x), group)


def positions_of(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Return (this rank's positions of `x`, number of all positions), for a computation on independent positions."""
    if isinstance(x, PositionShard):
        return x.part, x.total
    return split_to(whole(x), group, 1), x.shape[1]


def give_whole(_: nn.Module, __: Any, output: Any) -> Any:
    """Gather hidden states in the output of the model. Used as a forward hook."""
    if not any(isinstance(leaf, PositionShard) for leaf in tree_leaves(output)):
        return None
    return tree_map_only(PositionShard, PositionShard.gathered, output)


def sendable(x: Tensor) -> Tensor:
    """Return the tensor to send to the next pipeline stage: this rank's positions, which `completed` wraps again there.

    A single position is sent whole, because otherwise the part has the shape of the whole on some rank.
    """
    if not isinstance(x, PositionShard):
        return x
    return x.part if x.total > 1 else x.gathered()


def completed(received: Tensor, whole: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the hidden states of the previous stage as a PositionShard if they are split. whole: their full shape."""
    if group is None or len(whole) < 3 or tuple(received.shape) == tuple(whole):
        return received
    start, stop = bounds(whole[1], group.size(), group.rank())
    if tuple(received.shape) != (whole[0], stop - start, *whole[2:]):
        return received
    return PositionShard(received, group, whole[1])


def _unary(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, PositionShard):
        return NotImplemented
    # Other tensors, as in type_as, only determine a dtype and device.
    args = tuple(arg.part if isinstance(arg, ShardedTensor) else arg for arg in args)
    return _of(x, func(x.part, *args, **kwargs))


def _of(x: PositionShard, part: Tensor) -> PositionShard:
    """Return a PositionShard with `part`: `x` itself if the operation changed its part in place."""
    if part is not x.part:
        return x.like(part)
    x._whole = None
    return x


def _together(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that is elementwise in all its tensors."""
    like = next((arg for arg in args if isinstance(arg, PositionShard)), None)
    if like is None or any(isinstance(value, Tensor) for value in kwargs.values()):
        return NotImplemented
    if func in _IN_PLACE and args[0] is not like:
        return NotImplemented  # an ordinary tensor needs the whole result
    parts = [_fitting(arg, like) if isinstance(arg, Tensor) else arg for arg in args]
    if any(part is None for part in parts):
        return NotImplemented
    part = func(*parts, **kwargs)
    first = args[0]
    return _of(first, part) if isinstance(first, PositionShard) else like.like(part)


def _fitting(x: Tensor, like: PositionShard) -> Tensor | None:
    """Return the part of `x` that broadcasts with this rank's positions of `like`; None if that is unclear."""
    if isinstance(x, PositionShard):
        alike = (x.ndim, x.along, x.total) == (like.ndim, like.along, like.total)
        return x.part if alike else None
    at = like.along - (like.ndim - x.ndim)
    if isinstance(x, ShardedTensor) or x.ndim > like.ndim:
        return None
    if at >= 0 and x.shape[at] == like.total:
        return split_to(x, like.group, at)
    if at >= 0 and x.shape[at] != 1:
        return None
    return copy_to(x, like.group) if x.requires_grad else x


def _norm(func: Any, x: Any, shape: Any, *learned: Any, **kwargs: Any) -> Any:
    """Run a norm over the last dims. Its parameters get gradients from the positions of all ranks."""
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
    """Return `x` if the index selects all of it, as in x[:, 0:, :]."""
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
    """Run a function that uses only the shape of a PositionShard, as in zeros_like or y.expand_as(x)."""
    if func is Tensor.expand_as and isinstance(args[0], PositionShard):
        return NotImplemented
    bare = [_blank(arg) if isinstance(arg, PositionShard) else arg for arg in args]
    return func(*bare, **kwargs)


def _blank(x: PositionShard) -> Tensor:
    return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)


_ONE = (
    *("float", "double", "half", "bfloat16", "to", "type_as", "contiguous", "clone", "detach", "cpu", *kind_names()),
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


def split_cross_entropy(
    logits: Tensor, target: Tensor, group: dist.ProcessGroup, *, total: int, ignore_index: int, smoothing: float
) -> Tensor:
    """Return losses (N,), the same on every rank, and zero where the target is `ignore_index`.

    logits: this rank's columns (N, V / n) of `total` columns, divided by `bounds`; half precision is computed in
    float32. target: ids (N,) in the whole vocabulary. smoothing: the label_smoothing of F.cross_entropy. A target
    outside of the vocabulary is a device-side assertion failure.
    """
    return _SplitCrossEntropy.apply(logits, target, group, total, ignore_index, smoothing)  # type: ignore[no-any-return]


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: dist.ProcessGroup, total: int, ignore: int, smoothing: float
    ) -> Tensor:
        x = logits.float() if logits.dtype.itemsize < 4 else logits
        start, stop = bounds(total, group.size(), group.rank())
        counted = target != ignore
        assert_async((~counted | ((target >= 0) & (target < total))).all(), "a target is outside of the vocabulary")
        highest = x.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = x - highest[:, None]
        here = counted & (target >= start) & (target < stop)
        column = torch.where(here, target - start, 0)[:, None]
        hit = torch.where(here, shifted.gather(1, column)[:, 0], 0)
        sums = [hit, shifted.sum(-1)] if smoothing else [hit]
        probability = shifted.exp_()
        parts = torch.stack([probability.sum(-1), *sums])
        dist.all_reduce(parts, group=group)
        log_sum = parts[0].log()
        losses = log_sum - parts[1]
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (log_sum - parts[2] / total)
        probability.div_(parts[0][:, None])
        ctx.save_for_backward(probability, column, here, counted)
        ctx.total, ctx.smoothing, ctx.dtype = total, smoothing, logits.dtype
        return torch.where(counted, losses, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # type: ignore[override]
        probability, column, here, counted = ctx.saved_tensors
        hit = (here.to(probability.dtype) * (1 - ctx.smoothing))[:, None]
        result = probability.scatter_add(1, column, -hit)
        if ctx.smoothing:
            result = result - ctx.smoothing / ctx.total
        result = result * torch.where(counted, grad, 0)[:, None]
        return result.to(ctx.dtype), None, None, None, None, None


class VocabShard(ShardedTensor):
    """Logits whose dim `along` (usually the last) is split over `group`."""

    called, to_gather = "logits", "logits = logits + 0"
    way_out = (
        "logits = logits + 0 first, which gathers them; or hints=nbkit.ModelHints(tp_plan={'<the head>': "
        "'colwise_gather'})"
    )

    @staticmethod
    def __new__(cls, part: Tensor, group: dist.ProcessGroup, total: int, along: int = -1) -> VocabShard:
        return ShardedTensor.__new__(cls, part, group, total, along)

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func` on the parts if it is one of the usual steps of a loss."""
        handler = _VOCAB_HANDLERS.get(func) if args and isinstance(args[0], VocabShard) else None
        return NotImplemented if handler is None else handler(func, *args, **kwargs)


def _at_end(shard: VocabShard) -> bool:
    return shard.along == shard.ndim - 1


def _elementwise(func: Any, shard: VocabShard, *args: Any, **kwargs: Any) -> Any:
    return shard.like(func(shard.part, *args, **kwargs))


def _scaled(func: Any, shard: VocabShard, *args: Any, **kwargs: Any) -> Any:
    plain = (int, float)
    if kwargs or not all(isinstance(arg, plain) or (isinstance(arg, Tensor) and arg.ndim == 0) for arg in args):
        return NotImplemented
    # Each part of the vocabulary contributes to the gradient of a learned scale.
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


def _vocab_index(func: Any, shard: VocabShard, index: Any) -> Any:
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


_ONE_TENSOR = (
    "float",
    "double",
    "half",
    "bfloat16",
    "to",
    "type_as",
    "contiguous",
    "detach",
    "clone",
    "cpu",
    *kind_names(),
    "tanh",
)

ELEMENTWISE = frozenset(named(*_ONE_TENSOR))
SCALING = frozenset(named("mul", "div", "__mul__", "__truediv__", "__rmul__"))
"""Steps of a loss that treat each logit independently. Those in SCALING also take a number."""

_VOCAB_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(SCALING, _scaled),
    **dict.fromkeys(named("view", "reshape"), _reshape),
    **dict.fromkeys(named("flatten"), _flatten),
    Tensor.__getitem__: _vocab_index,
    **dict.fromkeys(named("transpose", "swapaxes"), _transpose),
    **dict.fromkeys(named("permute"), _permute),
    getattr(Tensor, "mT").__get__: _matrix_transpose,  # noqa: B009  mypy takes it for a tensor
}
