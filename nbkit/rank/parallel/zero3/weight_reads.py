"""Watches every operation for parameters of ZeRO 3 that are used while their unit does not run, and for changed ones.

Memory is followed instead of Python objects, so that a weight is known however the model came by it: as an attribute,
from a list, through a view, as what a block returned. Used once, before the first step: it costs microseconds per
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from nbkit.errors import TrainingError
from nbkit.rank.parallel.pipeline.trace_dataflow import SHAPE_ONLY, tensors_in, written_by
from nbkit.rank.parallel.zero3.placeholder import used_outside
from nbkit.rank.parallel.zero3.unit import Slot, Unit

__all__ = ["WeightUse", "changed_in_place", "refuse_use"]

Report = Callable[[Unit, Slot, str, bool], None]
"""(unit, parameter of it, operation, whether the operation changes it)"""


class WeightUse(TorchDispatchMode):
    """Inside, `report` is told of every operation on a parameter whose unit is not `there`, or that changes one."""

    def __init__(self, units: Sequence[Unit], report: Report, there: Callable[[Unit], bool]) -> None:
        super().__init__()
        self._report, self._there = report, there
        self._homes: dict[StorageWeakRef, list[tuple[int, Unit, Slot]]] = {}
        for unit in units:
            for slot in unit.slots:
                home = self._homes.setdefault(_memory(slot.whole), [])
                home.append((int(slot.whole.storage_offset()), unit, slot))
        for home in self._homes.values():
            home.sort(key=lambda entry: entry[0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in SHAPE_ONLY and func.namespace != "c10d":
            changed = {id(tensor) for tensor in written_by(func, args, kwargs)}
            for tensor in tensors_in((args, kwargs)):
                if (home := self._homes.get(_memory(tensor))) is not None:
                    self._used(tensor, home, str(func.overloadpacket), id(tensor) in changed)
        return func(*args, **kwargs)

    def _used(self, tensor: Tensor, home: Sequence[tuple[int, Unit, Slot]], how: str, changed: bool) -> None:
        offset = tensor.storage_offset()
        _, unit, slot = max((entry for entry in home if entry[0] <= offset), key=lambda e: e[0], default=home[0])
        if not unit.filling and (changed or not self._there(unit)):
            self._report(unit, slot, how, changed)


def refuse_use(unit: Unit, slot: Slot, how: str, changed: bool) -> None:
    """Raises TrainingError, whatever happened."""
    if changed:
        raise changed_in_place(slot.name, how)
    raise used_outside(slot.name, unit.name, f"shape {tuple(slot.whole.shape)}, by {how}")


def changed_in_place(name: str, how: str) -> TrainingError:
    """The error for a parameter that forward or backward changes: the change would be lost with the whole."""
    return TrainingError(
        f"The model changes its parameter {name!r} in place while it runs, and zero=3 lets go of it after that.",
        numbers=f"by {how}",
        hint="strategy='ddp'; or change it between two steps, in a callback of the Trainer",
    )


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
