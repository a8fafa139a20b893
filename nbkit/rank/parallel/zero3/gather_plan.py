"""Find the blocks of a model that ZeRO 3 gathers one at a time, by a dry run of its protocol in one process.

The model runs one training step and one evaluation on an example, with its own weights in place. Meanwhile `rehearse`
tracks when ZeRO 3 would gather, free and reduce each unit, but it sends, frees and moves nothing. It sees every use of
a parameter. If a parameter is used while its unit would not be gathered, it is gathered with the root instead, which
stays gathered for the whole pass. The same applies to a block that runs in an order that not all ranks could follow,
for example a block that is called twice. The first plan that succeeds is used. Models are never rewritten. Their
structure only shows where to look for blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nbkit.errors import TrainingError
from nbkit.rank.parallel.data_parallel.buckets import InFlight, Links
from nbkit.rank.parallel.module.block_discovery import structural_blocks
from nbkit.rank.parallel.module.copies import homes
from nbkit.rank.parallel.module.forward_wrapper import in_backward
from nbkit.rank.parallel.proof.observe import MemoryUses, call_counts, memory_of, tensors_in
from nbkit.rank.parallel.proof.unchanged import set_evaluation, unchanged
from nbkit.rank.parallel.zero3.unit import (
    Casts,
    Slot,
    Unit,
    assigned,
    changed_in_place,
    find_casts,
    used_outside,
    weight_uses,
)
from nbkit.rank.parallel.zero3.zero3 import OutOfOrder, ShardedParameters
from nbkit.tensor_layout import Layout

_ALONE = Links(group=None, ranks=1, index=0, across=None, replica=0)
_DATA_SETTER = Tensor.data.__set__  # type: ignore[attr-defined]
_SETTERS = (Tensor.requires_grad_, Tensor.requires_grad.__set__, _DATA_SETTER)  # type: ignore[attr-defined]


class Uses:
    """Uses of parameters that a rehearsal has seen.

    outside: parameter name -> how it is used while its unit is not gathered. changed: name of the first parameter that
    the model changes in place, and the operation.
    """

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
    """Run one training step and one evaluation under the protocol. Return the `names` of units that own parameters.

    rooted: names of parameters that are gathered with the root. The module is left in evaluation mode. Raises
    TrainingError where real steps would.
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
        # Require that a unit is gathered on every rank for certain, not only until the next unit is gathered.
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
    """Ignore errors other than TrainingError: a model that computes gradients in its forward cannot be evaluated."""
    try:
        yield
    except TrainingError:
        raise
    except Exception:
        pass


class _Standing(Unit):
    """A unit whose parameters stay in place. It only tracks the state that they would have."""

    def __init__(self, name: str, slots: list[Slot]) -> None:
        self.name, self.slots, self._parts, self.autocast = name, slots, [], False
        for slot in slots:
            slot.shard = slot.whole = slot.old
            slot.used = [slot.old]
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
    """Mode that notes when the running model freezes or unfreezes parameters, or sets their `.data`."""

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


_ATTEMPTS = 8


@dataclass(frozen=True)
class GatherPlan:
    """Plan of what ZeRO 3 gathers. It is plain data, and the same on every rank.

    units: names of the blocks that are gathered one at a time, in forward order. rooted: names of their parameters that
    are gathered with the root. ahead: number of units that are gathered before backward reaches them. refused: why ZeRO
    3 would not train as one process does, or None. notes: what is gathered for longer, and why. casts: parameters
    gathered in the dtype of autocast, or None.
    """

    units: tuple[str, ...] = ()
    rooted: frozenset[str] = frozenset()
    ahead: int = 1
    refused: TrainingError | None = None
    notes: tuple[str, ...] = ()
    casts: Casts | None = None


def plan_gathers(
    module: nn.Module,
    call: Callable[[], Any],
    *,
    brief: Callable[[], Any] | None = None,
    autocast: torch.dtype | None = None,
) -> GatherPlan:
    """Return the plan for `module`, which must be in training mode. The module is restored.

    call: runs the whole model once on an example, and returns its output or the loss. brief: does the same operations
    on smaller tensors; if it fails or is refused, `call` is used. autocast: the dtype in which the model trains. Errors
    of the model are raised.
    """
    if brief is not None:
        with suppress(Exception):  # errors are reported from the full run below
            if (plan := _plan(module, brief, autocast)).refused is None:
                return plan
    return _plan(module, call, autocast)


def _plan(module: nn.Module, call: Callable[[], Any], autocast: torch.dtype | None) -> GatherPlan:
    def run() -> Tensor:
        return _sum(call())

    with unchanged(module), _kept(module):
        candidates = structural_blocks(module)
        counts = call_counts(module, call)
        notes = {name: f"called {counts[name]} times" for name in candidates if counts[name] != 1}
        names = [name for name in counts if name in candidates and counts[name] == 1]
        plan = _tried(module, names, notes, run)
    if autocast is None or plan.refused is not None:
        return plan
    casts = None
    with suppress(Exception):  # on error, everything is gathered in its own dtype
        casts = find_casts(module, run, autocast)
    return replace(plan, casts=casts)


def _tried(module: nn.Module, names: list[str], notes: dict[str, str], run: Callable[[], Tensor]) -> GatherPlan:
    """Return the first plan that succeeds. The last attempt has no units."""
    rooted: frozenset[str] = frozenset()
    ahead = 1
    refused: TrainingError | None = None
    for attempt in range(_ATTEMPTS):
        if attempt == _ATTEMPTS - 1:
            names = []
        uses = Uses()
        try:
            with unchanged(module):
                names = rehearse(module, names, rooted, ahead, run, uses)
        except OutOfOrder as error:
            if error.again and ahead < len(names):
                ahead = min(2 * ahead, len(names))
            else:
                notes[error.unit] = error.what
                names = [name for name in names if name != error.unit]
            continue
        except TrainingError as error:
            if names:
                names = []
                continue
            refused = error
        if uses.changed is not None:
            refused = changed_in_place(*uses.changed)
        if refused is not None or uses.outside.keys() <= rooted:
            break
        rooted |= uses.outside.keys()
        notes |= uses.outside
    if refused is None and uses.outside:
        name, how = next(iter(uses.outside.items()))
        refused = used_outside(name, "the model", how)
    shown = [f"{name} ({why})" for name, why in notes.items()]
    said = f"gathered for a whole forward pass: {', '.join(shown[:4])}{', ...' * (len(shown) > 4)}"
    return GatherPlan(tuple(names), rooted, ahead, refused, (said,) if shown else ())


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Free gradients as soon as they are computed inside this context, and restore the parameters at its end."""
    data = [(p, p.data) for p in module.parameters()]
    before: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def keep(param: nn.Parameter, _: Tensor, __: str, changed: bool) -> None:
        if changed and id(param) not in before:
            before[id(param)] = param, param.detach().clone()

    def let_go(p: Tensor) -> None:
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(let_go) for p, _ in data if p.requires_grad]
    try:
        with MemoryUses({memory_of(p): p for p, _ in data}, keep):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for param, old in data:
                param.data = old
            for param, value in before.values():
                param.copy_(value)


def _sum(output: Any) -> Tensor:
    found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    return sum((tensor.abs().sum().double() for tensor in found), torch.zeros((), dtype=torch.float64))
