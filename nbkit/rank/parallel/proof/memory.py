"""Tensors known by their memory, however a model came by them: as an attribute, from a list, through a view."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, device, dtype, nn, ops
from torch.multiprocessing.reductions import StorageWeakRef

from nbkit.rank.torch_private import pytree
from nbkit.rank.watching_mode import WatchingMode

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
"""Operations that ask a tensor for its shape, dtype or device, and read none of its values."""


def memory_of(tensor: Tensor) -> Memory:
    """Stands for the memory behind a tensor; while it is kept, no other memory equals it."""
    return StorageWeakRef(tensor.untyped_storage())


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a tree, of output objects and of plain objects that hold some."""
    found: list[Tensor] = []
    for leaf in _leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            found += [part for part in _leaves(vars(leaf)) if isinstance(part, Tensor)]
    return found


def _leaves(value: Any) -> Iterator[Any]:
    """As `pytree.tree_leaves`, in a quarter of the time for what the operations of a model are called with."""
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
    """The tensors that an operation changes in place."""
    if not func._schema.is_mutable:
        return
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            yield from tensors_in(value)


class MemoryUses(WatchingMode, Generic[T]):
    """Calls note(homes[memory], tensor, operation, whether it is changed) before an operation on memory in `homes`.

    Costs microseconds per operation: for what happens once, before the first step.
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
