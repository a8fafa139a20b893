"""The order of ZeRO 3: how far along it the forward and the backward pass of this rank have come.

Hooks call `before` and `after` around each block, and `arrive` for each gradient. Every forward gathers all units in
the order in which they were given; every backward pass gathers and reduces them as `tour` says. A rank that would need
another order cannot know that the others do too, and is refused: see OutOfOrder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.data_parallel.bucket_collectives import InFlight
from nbkit.rank.parallel.data_parallel.gradient_buckets import came_twice, refuse_sparse
from nbkit.rank.parallel.module.backward_hooks import awaited, in_backward, is_nested, marked
from nbkit.rank.parallel.zero3.backward_order import OutOfOrder, Tour, backward_tour
from nbkit.rank.parallel.zero3.module_hooks import weakly
from nbkit.rank.parallel.zero3.unit import Unit


class GatherOrder:
    """Of `units`, the root first. parents: the number of the unit around each. keep, ahead: see data_axis."""

    def __init__(self, units: list[Unit], blocks: Sequence[nn.Module], parents: Sequence[int], keep: bool, ahead: int):
        self.keep, self._armed, self._computing = keep, False, False
        self._running = self._forwarded = self._kept = self._lent = self._proven = False
        self._next = self._made = self._entry = 0
        self._units, self._root = units, units[0]
        inside = {id(part) for slot in self._root.slots for part, _ in slot.places}
        self._borrows = [not inside.isdisjoint(map(id, block.modules())) for block in blocks]
        self._flight = InFlight()
        self._tour = Tour(backward_tour(parents, ahead))

    # Forward.

    @property
    def _stays(self) -> bool:
        """Whether the root stays gathered behind a forward without gradients: the loss may use it."""
        return self._computing and not self.keep

    def before(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`block` is called: its parameters are there when this returns. Gives the inputs to call it with, or None.

        number: of the unit; -1, -2, ... of what the root wraps.
        """
        unit = self._units[max(number, 0)]
        if in_backward():
            self._need(unit, again=True)  # recomputation of a checkpointed part
            return None
        if self._kept:
            return None
        if self.keep and torch.is_grad_enabled():
            self._open_all()
            return None
        if unit is self._root:
            if self._running and (number < self._entry or is_nested(block)):
                unit.depth += number == self._entry
                return None
            self._begin_forward(number)
        elif not self._running and self._borrows[number] and not self._root.here:
            self._lent = True
            self._root.gather()
            self._root.open()
        for other in [other for other in self._done if other is not unit]:
            other.close()
            self._done.remove(other)
        if not unit.here:
            self._fetch(unit, max(number, 0))
            unit.open()
        if unit in self._done:
            self._done.remove(unit)
        if self._running and self._next < len(self._units) and unit is self._units[self._next - 1]:
            self._gather_next()
        if unit is not self._root:
            unit.depth += 1
        if not torch.is_grad_enabled():
            return None
        self._forwarded = unit.forwarded = True
        passed = None if unit is self._root else marked(args, kwargs, weakly(self._passed, unit))
        unit.calls.append(passed is not None)
        return passed

    def _fetch(self, unit: Unit, number: int) -> None:
        """Send its all-gather, if nobody has, and of all before it in the order of forward."""
        while self._running and not unit.coming and number >= self._next:
            self._gather_next()
        if unit.slots and not unit.coming:
            if self._computing:
                # Another rank may not do so: it would take what this one gathers for something else.
                how = "called again in a forward" if self._running else "called outside of the model's forward"
                raise OutOfOrder(unit.name, f"is {how}, when its parameters have been let go", self._order)
            unit.gather()  # by hand, on every rank alike

    def after(self, number: int, output: Any) -> None:
        """A block returns."""
        unit = self._units[max(number, 0)]
        if in_backward() or self._kept or (unit is self._root and number != self._entry):
            return
        if unit.depth:
            unit.depth -= 1
            if unit is self._root:
                return
        if torch.is_grad_enabled() and unit.calls:
            is_marked = unit.calls.pop()
            if awaited(output, weakly(self._wanted, unit)):
                unit.pending += is_marked
                unit.loose |= not is_marked
        if unit is self._root:
            self._end_forward()
        elif unit.depth == 0:
            self._done.append(unit)
            if not self._running:
                unit.close()
                if self._lent and not torch.is_grad_enabled():
                    self._lent = False
                    self._root.close()

    def _begin_forward(self, number: int) -> None:
        if self._running:
            self._rest()  # the forward before was broken off
        self._running, self._entry, self._next = True, number, int(self._root.here)
        if self._root.here:
            self._root.reveal()
        self._guard(True)

    def _gather_next(self) -> None:
        self._units[self._next].gather()
        self._next += 1

    def _end_forward(self) -> None:
        while self._running and self._next < len(self._units):
            # What this rank does not use, others may.
            self._gather_next()
        self._running = False
        self._done.clear()
        for unit in self._units:
            if unit is not self._root or not (self._forwarded or self._stays):
                unit.close()
        if not self._computing:
            # By hand: who looks at the module afterwards sees what it is at rest, also if no backward follows.
            self._guard(False)
            self._root.show()

    def _open_all(self) -> None:
        self._kept = self._forwarded = True
        ahead = iter([*self._units[1:], None])
        self._root.gather()
        for unit in self._units:
            if (following := next(ahead)) is not None:
                following.gather()
            unit.open()

    # Backward.

    def _wanted(self, unit: Unit) -> None:
        """Its backward begins."""
        if self._kept:
            return
        if self._root.here and not self._computing:
            self._root.reveal()  # what is recomputed uses it
        if unit.skipped or unit.finished or unit.sent:
            raise self._late(unit, unit)
        unit.begun = True
        self._need(unit)
        self._go_on()

    def _passed(self, unit: Unit) -> None:
        """The gradients of the inputs of one of its calls are made."""
        unit.pending = max(unit.pending - 1, 0)
        self._check_finished(unit)

    def _check_finished(self, unit: Unit) -> None:
        if unit is self._root or unit.pending or not unit.begun or self._kept:
            return
        if unit.loose and len(unit.arrived) < len(unit.trained):
            return
        unit.finished = True
        unit.close()
        self._go_on()

    def arrive(self, number: int, name: str, param: Tensor) -> None:
        """Autograd has made a gradient."""
        unit = self._units[number]
        refuse_sparse(name, param)
        if unit.sent:
            raise self._late(unit, unit) if unit.skipped else came_twice(name)
        unit.widen(name)
        if not self._kept:
            unit.arrived.add(name)
            if unit.loose:
                self._check_finished(unit)
        elif self._armed:
            unit.arrived.add(name)
            unit.finished = len(unit.arrived) == len(unit.trained)
            self._go_on()

    def _need(self, unit: Unit, *, again: bool = False) -> None:
        """Gather `unit`, and all that comes before it in the order of a backward pass."""
        if unit.here or not unit.slots:
            return
        while not unit.coming and not self._tour.done:
            gathers, number = self._tour.at
            other = self._units[number]
            if not gathers and other.begun and not other.finished:
                raise self._late(unit, other, again=again)
            other.skipped = not gathers and other.forwarded and not other.finished
            self._take()
        if not unit.coming:
            unit.gather()
        unit.open()

    @property
    def _order(self) -> list[str]:
        return [unit.name for unit in self._units[1:]]

    def _late(self, unit: Unit, other: Unit, *, again: bool = False) -> TrainingError:
        late = "after its place in the order" if unit is other else f"before backward is done with {other.name!r}"
        return OutOfOrder(unit.name, f"is needed in backward {late}", self._order, again=again)

    def _go_on(self) -> None:
        """As far along the order as this rank's backward has come."""
        while not self._tour.done:
            gathers, number = self._tour.at
            unit = self._units[number]
            if not gathers and not unit.finished and (unit.forwarded or self._kept):
                return
            self._take()

    def _take(self) -> None:
        gathers, number = self._tour.step()
        unit = self._units[number]
        if not gathers:
            unit.reduce(self._flight)
        elif not self._kept and not unit.here:
            unit.gather()

    def _end_backward(self) -> None:
        while not self._tour.done:
            self._take()
        self._flight.land()
        self._made += 1
        self._proven |= self._forwarded
        self._rest()

    def _rest(self) -> None:
        """Everything sharded, and at the beginning of a pass."""
        self._running = self._forwarded = self._kept = self._lent = False
        self._next = 0
        self._done: list[Unit] = []
        self._tour.begin()
        for unit in self._units:
            unit.rest()
        if not self._computing:
            self._guard(False)

    def _guard(self, guarded: bool) -> None:
        for unit in self._units:
            unit.guard(guarded)
