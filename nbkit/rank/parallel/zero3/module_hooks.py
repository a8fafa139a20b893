"""The hooks by which ZeRO 3 hears what runs: a block is called, a block returns, a gradient is made.

They live as long as the module, and that may be the user's: they must not hold the axis, nor its memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nbkit.rank.parallel.zero3.unit import Unit


class _Hears(Protocol):
    def before(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def after(self, number: int, output: Any) -> None: ...

    def arrive(self, number: int, name: str, param: Tensor) -> None: ...


def watch(axis: _Hears, units: Sequence[Unit], blocks: Sequence[nn.Module]) -> list[RemovableHandle]:
    """Tell `axis` of what happens to unit `number`, which is blocks[number]; -1, -2, ... is what the root wraps."""
    itself = weakref.ref(axis)
    hooks: list[RemovableHandle] = []
    wrapped = [(-depth, inner) for depth, inner in enumerate(_wrapped(units, blocks), start=1)]
    for number, block in [*enumerate(blocks), *wrapped]:
        before, after = _around(itself, number)
        hooks.append(block.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        hooks.append(block.register_forward_hook(after))
    for number, unit in enumerate(units):
        for slot in unit.slots:
            if slot.whole.is_floating_point() or slot.whole.is_complex():
                # Frozen ones too: they may be thawed.
                for param in slot.used:
                    param.requires_grad_(True)
                    hooks.append(param.register_post_accumulate_grad_hook(_arriving(itself, number, slot.name)))
    return hooks


def _wrapped(units: Sequence[Unit], blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The model in a wrapper (of adapters, say), in another ...: what holds all parameters may be called by itself."""
    needed = {id(part) for unit in units for slot in unit.slots for part, _ in slot.places} | set(map(id, blocks[1:]))
    inner, found = blocks[0], []
    while (
        inside := next((child for child in inner.children() if needed <= set(map(id, child.modules()))), None)
    ) is not None and not any(inside is block for block in blocks):
        inner = inside
        found.append(inner)
    return found


def _around(itself: weakref.ref[_Hears], number: int) -> tuple[Callable[..., Any], Callable[..., None]]:
    def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if (axis := itself()) is None else axis.before(number, block, args, kwargs)

    def after(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (axis := itself()) is not None:
            axis.after(number, output)

    return before, after


def _arriving(itself: weakref.ref[_Hears], number: int, name: str) -> Callable[[Tensor], None]:
    def arrived(param: Tensor) -> None:
        if (axis := itself()) is not None:
            axis.arrive(number, name, param)

    return arrived


def weakly(method: Callable[..., None], unit: Unit) -> Callable[..., None]:
    """A hook for autograd that calls `method` with `unit`, as long as the axis that the method is of lives."""
    itself = weakref.WeakMethod(method)

    def call(*_: Any) -> None:
        if (bound := itself()) is not None:
            bound(unit)

    return call
