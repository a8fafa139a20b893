"""One step and one evaluation of ZeRO 3 on one process: its protocol runs, and nothing is sent, freed or moved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nbkit.errors import TrainingError
from nbkit.rank.parallel.data_parallel.bucket_collectives import InFlight, Links
from nbkit.rank.parallel.module.backward_hooks import in_backward
from nbkit.rank.parallel.module.meta_module import homes
from nbkit.rank.parallel.proof.unchanged import set_evaluation
from nbkit.rank.parallel.zero3.gather_dtypes import Casts
from nbkit.rank.parallel.zero3.unit import Unit, assigned
from nbkit.rank.parallel.zero3.unit_parameters import Slot
from nbkit.rank.parallel.zero3.weight_reads import weight_uses
from nbkit.rank.parallel.zero3.zero3 import ShardedParameters
from nbkit.tensor_layout import Layout

_ALONE = Links(group=None, ranks=1, index=0, across=None, replica=0)
_DATA_SETTER = Tensor.data.__set__  # type: ignore[attr-defined]
_SETTERS = (Tensor.requires_grad_, Tensor.requires_grad.__set__, _DATA_SETTER)  # type: ignore[attr-defined]


class Uses:
    """What a rehearsal has seen. outside: parameter -> how it is used while its unit is not there; changed: the first
    that the model changes in place, and how."""

    def __init__(self) -> None:
        self.outside: dict[str, str] = {}
        self.changed: tuple[str, str] | None = None

    def note(self, unit: Unit, slot: Slot, how: str, changed: bool) -> None:
        if changed:
            self.changed = self.changed or (slot.name, how)
        else:
            self.outside.setdefault(slot.name, f"used outside of {unit.name} by {how}")


def rehearse(
    module: nn.Module,
    names: Sequence[str],
    rooted: frozenset[str],
    ahead: int,
    run: Callable[[], Tensor],
    uses: Uses,
) -> list[str]:
    """One step and one evaluation under the protocol. Those of `names` that hold more than what is rooted.

    The module is left in evaluation. Raises TrainingError as they would.
    """
    layouts = {name: Layout.whole(getattr(*places[0]).shape) for name, places in homes(module).items()}
    units = [module.get_submodule(name) for name in names]
    axis = ShardedParameters(
        module, layouts, _ALONE, units=units, keep=False, ahead=ahead, rooted=rooted, proven=True, make=_standing
    )
    root = axis.units[0]
    slots = {id(slot.whole): (unit, slot) for unit in axis.units for slot in unit.slots}
    settings = _Settings(slots, root, uses)

    def runs(unit: Unit) -> bool:
        # On every rank, without luck: not only until the next unit comes.
        return unit.here if in_backward() or unit is root else unit.depth > 0

    try:
        with axis.computing(), settings, weight_uses(axis.units, uses.note, runs):
            value = run()
            axis.start()
            if value.requires_grad:
                value.backward()
            axis.finish()
        axis.reset()
        set_evaluation(module)
        with _runnable(), torch.no_grad(), axis.computing(), settings, weight_uses(axis.units, uses.note, runs):
            run()
    finally:
        axis.close()
    own = {id(part) for unit in axis.units[1:] for slot in unit.slots for part, _ in slot.places}
    return [name for name, unit in zip(names, units, strict=True) if not own.isdisjoint(map(id, unit.modules()))]


@contextmanager
def _runnable() -> Iterator[None]:
    """A model that takes gradients in its forward cannot be evaluated, and need not be."""
    try:
        yield
    except TrainingError:
        raise
    except Exception:
        pass


class _Standing(Unit):
    """A unit whose parameters stay where they are; only what would become of them is followed."""

    def __init__(self, name: str, slots: list[Slot]) -> None:
        self.name, self.slots, self._parts, self.autocast = name, slots, [], False
        for slot in slots:
            slot.shard = slot.whole = slot.old
        self._trains = [slot.old.requires_grad for slot in slots]
        self._sent, self.here, self.guarded = False, True, False
        self.rest()

    @property
    def trained(self) -> list[Slot]:
        return [slot for slot, trains in zip(self.slots, self._trains, strict=True) if trains]

    @property
    def coming(self) -> bool:
        return self._sent

    def train(self) -> None:
        for slot, trains in zip(self.slots, self._trains, strict=True):
            slot.old.requires_grad_(trains)

    def gather(self) -> None:
        self._sent = True

    def open(self) -> None:
        self._sent, self.here = False, True

    def close(self) -> None:
        self._sent = self.here = False

    def widen(self, name: str) -> None:
        pass

    def show(self) -> None:
        pass

    def guard(self, guarded: bool) -> None:
        pass

    def reduce(self, flight: InFlight) -> None:
        self.sent = True


def _standing(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    parents: Sequence[int],
    layouts: Mapping[str, Layout],
    _: Links,
    rooted: Collection[str],
    __: Casts | None,
) -> list[Unit]:
    return [_Standing(name, slots) for name, slots in assigned(module, blocks, parents, layouts, rooted)]


class _Settings(TorchFunctionMode):
    """Sees parameters being frozen or thawed, or given other memory, by the model while it runs."""

    def __init__(self, slots: Mapping[int, tuple[Unit, Slot]], root: Unit, uses: Uses) -> None:
        super().__init__()
        self._slots, self._root, self._uses = slots, root, uses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SETTERS and (found := self._slots.get(id(args[0]))) is not None:
            unit, slot = found
            if func is _DATA_SETTER:
                self._uses.note(unit, slot, "data =", True)
            elif unit is not self._root:
                self._uses.note(unit, slot, "requires_grad", False)
        return func(*args, **(kwargs or {}))
