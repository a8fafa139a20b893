"""Parameters of ZeRO 3 that are used while their unit does not run, or changed: seen at every operation, by memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.rank.parallel.proof.memory import Memory, MemoryUses, memory_of
from nbkit.rank.parallel.zero3.placeholder import used_outside
from nbkit.rank.parallel.zero3.unit import Unit
from nbkit.rank.parallel.zero3.unit_parameters import Slot

Report = Callable[[Unit, Slot, str, bool], None]
"""(unit, parameter of it, operation, whether the operation changes it)"""


Homes = list[tuple[int, Unit, Slot]]
"""The parameters in one memory: where each begins."""


def weight_uses(units: Sequence[Unit], report: Report, there: Callable[[Unit], bool]) -> MemoryUses[Homes]:
    """Inside, `report` is told of every operation on a parameter whose unit is not `there`, or that changes one."""
    homes: dict[Memory, Homes] = {}
    for unit in units:
        for slot in unit.slots:
            homes.setdefault(memory_of(slot.whole), []).append((int(slot.whole.storage_offset()), unit, slot))
    for home in homes.values():
        home.sort(key=lambda entry: entry[0])

    def used(home: Homes, tensor: Tensor, how: str, changed: bool) -> None:
        offset = tensor.storage_offset()
        _, unit, slot = max((entry for entry in home if entry[0] <= offset), key=lambda e: e[0], default=home[0])
        if not unit.filling and (changed or not there(unit)):
            report(unit, slot, how, changed)

    return MemoryUses(homes, used)


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
