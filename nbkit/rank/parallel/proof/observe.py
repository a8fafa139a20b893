"""Tools for proofs: compare tensors, watch calls of modules, use the autograd graph, and track memory.

Two tensors are the same except for rounding if they differ by at most a tolerance times the largest value. The right
tolerance depends on the operations between the two. Each proof sets its own and gives the reason.

Calls of modules are watched while a model runs. Keys identify calls that compute the same.

Tensors are identified by their memory, because a model may get them from an attribute, a list, or a view.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, device, dtype, nn, ops
from torch.multiprocessing.reductions import StorageWeakRef

from nbkit.rank.torch_private import pytree
from nbkit.rank.watching_mode import WatchingMode

_SMALL = 1 << 16
"""Tensors in modules with up to this many elements are compared by value."""


@contextmanager
def watched(
    module: nn.Module,
    enter: Callable[..., Any] | None = None,
    leave: Callable[..., Any] | None = None,
    *,
    names: Iterable[str] | None = None,
) -> Iterator[None]:
    """Watch the calls of the modules in `module`.

    Each call begins with enter(name, module, args, kwargs), before all other hooks, and ends with leave(name, module,
    args, kwargs, output). Both may return a replacement, as hooks do.

    names: names of the modules to watch; all by default.
    """
    parts = dict(module.named_modules())
    with ExitStack() as hooks:
        for name in parts if names is None else names:
            if enter is not None:
                hook = functools.partial(enter, name)
                hooks.callback(parts[name].register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
            if leave is not None:
                hooks.callback(
                    parts[name].register_forward_hook(functools.partial(leave, name), with_kwargs=True).remove
                )
        yield


def call_counts(module: nn.Module, call: Callable[[], Any]) -> Counter[str]:
    """Return how often `call` calls each module in `module`, in the order of the first calls."""
    counts: Counter[str] = Counter()
    with watched(module, lambda name, *_: counts.update([name])):
        call()
    return counts


def key_of(value: Any) -> Hashable:
    """Return a key that is equal for two values with which a module computes the same. Unknown objects use identity."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(map(key_of, value))
    if isinstance(value, dict):
        return type(value), tuple((key_of(key), key_of(each)) for key, each in value.items())
    if isinstance(value, functools.partial):
        return key_of(value.func), key_of(value.args), key_of(value.keywords)
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_meta:
            return tuple(value.shape), value.dtype, value.item()
        content = (
            hash(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()) if _plain(value) else id(value)
        )
        return tuple(value.shape), value.dtype, content
    return id(value)


def _plain(value: Tensor) -> bool:
    return value.layout == torch.strided and not value.is_meta and 0 < value.numel() <= _SMALL and value.ndim > 0


def gradients(
    of: Sequence[Tensor], wanted: Sequence[Tensor], cotangents: Sequence[Tensor | None] | None = None
) -> list[Tensor | None]:
    """Return the gradients of the sum of all `of` times their cotangents, for each of `wanted`; None for unused
    tensors.

    Without cotangents the tensors must be scalars. The graph is kept.
    """
    given = cotangents if cotangents is not None else [None] * len(of)
    used = [(x, cotangent) for x, cotangent in zip(of, given, strict=True) if x.requires_grad]
    if not used or not wanted:
        return [None] * len(wanted)
    outputs = [x if cotangent is None else _weighed(x, cotangent) for x, cotangent in used]
    return list(torch.autograd.grad(outputs, list(wanted), retain_graph=True, allow_unused=True))


def run_backward(of: Sequence[Tensor]) -> None:
    """Run the backward pass of all tensors in `of`, which require gradients, with gradients of ones."""
    torch.autograd.backward([_weighed(x, torch.ones_like(x)) for x in of])


def _weighed(x: Tensor, cotangent: Tensor) -> Tensor:
    """Return a scalar whose gradient is `cotangent`. Other shapes make torch import symbolic shapes, which is slow."""
    found = x * cotangent.conj()
    return torch.view_as_real(found)[..., 0].sum() if found.is_complex() else found.sum()


def nodes_behind(tensors: Iterable[Tensor], leave_out: Callable[[Any], bool] = lambda _: False) -> Iterator[Any]:
    """Yield every node of the graphs of `tensors` once, those near to them first.

    The attribute `variable` of a node is its leaf tensor. leave_out: the nodes that are not followed.
    """
    seen = set[Any]()
    waiting = deque(x.grad_fn for x in tensors if x.grad_fn is not None)
    while waiting:
        node = waiting.popleft()
        if node in seen or leave_out(node):
            continue
        seen.add(node)
        yield node
        waiting += [before for before, _ in node.next_functions if before is not None]


Memory = StorageWeakRef
T = TypeVar("T")

_SINGLE = frozenset({Tensor, nn.Parameter, int, float, bool, str, type(None), dtype, device})

SHAPE_ONLY = {
    getattr(ops.aten, name)
    for name in (
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"),
    )
}
"""Operations that use a tensor's shape, dtype or device, but none of its values."""


def memory_of(tensor: Tensor) -> Memory:
    """Return a key for the memory of a tensor. While the key is kept, no other memory has an equal key."""
    return StorageWeakRef(tensor.untyped_storage())


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a tree, in output objects, and in plain objects."""
    found: list[Tensor] = []
    for leaf in _leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):  # of a class that torch does not know
            found += [part for part in _leaves(dict(leaf)) if isinstance(part, Tensor)]
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            found += [part for part in _leaves(vars(leaf)) if isinstance(part, Tensor)]
    return found


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves like `pytree.tree_leaves`, in a quarter of the time for common arguments of operations."""
    kind = type(value)
    if kind is tuple or kind is list:
        for part in value:
            yield from _leaves(part)
    elif kind is dict:
        for part in value.values():
            yield from _leaves(part)
    elif kind in _SINGLE:
        yield value
    else:
        yield from pytree.tree_leaves(value)


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    """Yield the tensors that an operation changes in place."""
    if not func._schema.is_mutable:
        return
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            yield from tensors_in(value)


class MemoryUses(WatchingMode, Generic[T]):
    """Calls note(homes[memory], tensor, operation, whether it is changed) before an operation on memory in `homes`.

    It costs microseconds per operation, so use it only for work that happens once, before the first step.
    """

    def __init__(self, homes: Mapping[Memory, T], note: Callable[[T, Tensor, str, bool], None]) -> None:
        super().__init__()
        self._homes, self._note = homes, note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in SHAPE_ONLY and func.namespace != "c10d":
            changed = {id(tensor) for tensor in written_by(func, args, kwargs)}
            for tensor in tensors_in((args, kwargs)):
                if (home := self._homes.get(memory_of(tensor))) is not None:
                    self._note(home, tensor, str(func.overloadpacket), id(tensor) in changed)
        return func(*args, **kwargs)


def gap(whole: Tensor, other: Tensor, scale: float = 0.0) -> float:
    """Return the largest difference, relative to the largest value (or to `scale`, if that is larger).

    Return inf for different shapes, for NaN, and for different values of other dtypes than floats.
    """
    if whole.shape != other.shape:
        return float("inf")
    if not whole.numel():
        return 0.0
    if not (whole.is_floating_point() or whole.is_complex()):
        return 0.0 if torch.equal(whole, other) else float("inf")
    a, b = whole.detach(), other.detach()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    apart = (a - b).abs().masked_fill(same, 0).max()
    largest = a.abs().masked_fill(~a.isfinite(), 0).max()
    found = float(apart) / max(float(largest), scale, 1e-30)
    return found if found == found else float("inf")


def unlike(x: Tensor, expected: Tensor, *, by_row: bool = False, least: float = 0.0) -> str:
    """Return how `x` differs from `expected`, or "" if only by rounding. least: the minimum scale."""
    if x.shape != expected.shape:
        return f"shape {tuple(x.shape)} instead of {tuple(expected.shape)}"
    if not expected.is_floating_point():
        return "" if torch.equal(x, expected) else "other values"
    x, expected = x.detach(), expected.detach()
    tolerance = (1e-3 if by_row else 1e-5) if expected.dtype == torch.float64 else 1e-3
    tolerance = 3e-2 if expected.dtype.itemsize < 4 else tolerance
    if not by_row and expected.numel():
        most, off = torch.stack([expected.abs().max(), (x - expected).abs().max()]).tolist()
        if off <= tolerance * max(most, least) < float("inf"):
            return ""
    known = expected.isfinite()
    if not torch.equal(known, x.isfinite()) or not expected.numel():
        return "other values" if expected.numel() else ""
    size = expected.abs().where(known, 0)
    scale = size.amax(-1, keepdim=True) if by_row and size.ndim else size.max()
    off = (x - expected).abs().where(known, 0)
    bad = off > tolerance * scale.clamp(min=least)
    return f"differs by {float(off.max()):.3g}, of {float(size.max()):.3g}" if bool(bad.any()) else ""
