"""ZeRO 3: parameters, gradients and optimizer state are all sharded; a unit is whole only while it computes.

Every forward gathers all units in one fixed order, and every backward pass gathers and reduces them in another,
whatever a rank uses of them: so ranks that skip a block, or that have no rows at all, issue the same collectives. Hooks
only say how far along that order this rank has come. A unit is gathered before the one in front of it is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.layout import Layout
from nbkit.rank.parallel.data import DataAxis
from nbkit.rank.parallel.passage import awaited, in_backward, marked
from nbkit.rank.parallel.replicate import came_twice, refuse_sparse
from nbkit.rank.parallel.scatter import InFlight, Links
from nbkit.rank.parallel.skeleton import homes
from nbkit.rank.parallel.tour import Tour, backward_tour, nested
from nbkit.rank.parallel.units import Unit, units_of
from nbkit.rank.parallel.watching import watch, weakly

__all__ = ["ShardedParameters"]


class ShardedParameters(DataAxis):
    """Zero 3 of `module`, a skeleton; see data_axis. Outside of forward and backward the module shows the shards."""

    def __init__(
        self,
        module: nn.Module,
        layouts: Mapping[str, Layout],
        links: Links,
        *,
        units: Sequence[nn.Module],
        keep: bool,
        ahead: int,
    ) -> None:
        super().__init__()
        self.keep, self._armed = keep, False
        self._running = self._forwarded = self._kept = False
        self._next = self._made = self._entry = 0
        blocks, parents = nested(module, units)
        self.parts = self._units = units_of(module, blocks, layouts, links)
        self._root = self._units[0]
        slots = {slot.name: slot for unit in self._units for slot in unit.slots}
        for name in homes(module):
            slot = slots[name]
            part = slot.layout.part(0, links.ranks, links.index) if slot.layout.local else slot.layout
            self._add(name, slot.shard, part, (slot.shard.data, part))
        self._flight = InFlight()
        self._tour = Tour(backward_tour(parents, ahead))
        self._passes = 1
        self._hooks = watch(self, self._units, blocks)
        self.reset()

    # The protocol of a step.

    def refresh(self) -> None:
        self._rest()

    def begin_again(self) -> None:
        self.reset()

    def reset(self, *, passes: int = 1) -> None:
        self._passes, self._made = passes, 0
        self._armed = False
        self._flight.forget()
        self._rest()
        for unit in self._units:
            unit.train()

    def hold(self) -> None:
        if not self._kept:
            self._end_backward()

    def start(self) -> None:
        self._armed = True
        for unit in self._units:
            unit.arrived.clear()

    def finish(self) -> Tensor | None:
        if self.keep:
            if not self._kept:
                self.absent()
                self._kept = True
            self._end_backward()
        elif self._forwarded:
            self._end_backward()
        while not self.keep and self._made < self._passes:
            self.absent(backward=True)
        self._armed = self._kept = False
        for unit in self._units:
            unit.give()
        return self._flight.canary

    def absent(self, *, backward: bool = False) -> None:
        before: Unit | None = None
        for unit in self._units:
            unit.gather()
            if before is not None:
                before.close()
            before = unit
        assert before is not None
        before.close()
        if backward:
            self._end_backward()

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    # Forward.

    def before(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block is called: its parameters are there when this returns. Gives the inputs to call it with, or None.

        number: of the unit; -1, -2, ... of what the root wraps.
        """
        unit = self._units[max(number, 0)]
        if in_backward():
            self._need(unit)  # recomputation of a checkpointed part
            return None
        if self._kept:
            return None
        if self.keep and torch.is_grad_enabled():
            self._open_all()
            return None
        if unit is self._root:
            if self._running and number < self._entry:
                return None
            self._begin_forward(number)
        for other in [other for other in self._done if other is not unit]:
            other.close()
            self._done.remove(other)
        while self._running and not (unit.here or unit.coming) and self._next < len(self._units):
            self._gather_next()
        if not unit.here:
            if not unit.coming:
                unit.gather()  # it is used again, or without its model
            unit.open()
        if unit in self._done:
            self._done.remove(unit)
        if self._running and self._next < len(self._units) and unit is self._units[self._next - 1]:
            self._gather_next()
        if not torch.is_grad_enabled():
            return None
        self._forwarded = unit.forwarded = True
        passed = None if unit is self._root else marked(args, kwargs, weakly(self._passed, unit))
        unit.calls.append(passed is not None)
        return passed

    def after(self, number: int, output: Any) -> None:
        """A block returns."""
        unit = self._units[max(number, 0)]
        if in_backward() or self._kept or (unit is self._root and number != self._entry):
            return
        if torch.is_grad_enabled() and unit.calls:
            told = unit.calls.pop()
            if awaited(output, weakly(self._wanted, unit)):
                unit.pending += told
                unit.loose |= not told
        if unit is not self._root:
            self._done.append(unit)
        if unit is self._root:
            self._end_forward()
        elif not self._running:
            unit.close()

    def _begin_forward(self, number: int) -> None:
        if self._running:
            self._rest()  # the forward before was broken off
        self._running, self._entry, self._next = True, number, int(self._root.here)

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
            if unit is not self._root or not self._forwarded:
                unit.close()

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
        if unit.skipped:
            raise self._disorder(unit, unit)
        if self._kept or unit.finished or unit.sent:
            return
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
            raise self._disorder(unit, unit) if unit.skipped else came_twice(name)
        if not self._kept:
            unit.arrived.add(name)
            if unit.loose:
                self._check_finished(unit)
        elif self._armed:
            unit.arrived.add(name)
            unit.finished = len(unit.arrived) == len(unit.trained)
            self._go_on()

    def _need(self, unit: Unit) -> None:
        """Gather `unit`, and all that comes before it in the order of a backward pass."""
        if unit.here:
            return
        while not unit.coming and not self._tour.done:
            gathers, number = self._tour.at
            other = self._units[number]
            if not gathers and other.begun and not other.finished:
                raise self._disorder(unit, other)
            other.skipped = not gathers and other.forwarded and not other.finished
            self._take()
        if not unit.coming:
            unit.gather()
        unit.open()

    def _disorder(self, unit: Unit, other: Unit) -> TrainingError:
        late = "after their place in the order" if unit is other else f"before it is done with those of {other.name}"
        return TrainingError(
            f"Backward needs the parameters of {unit.name} {late}.",
            numbers=f"order: {', '.join(some.name for some in self._units[1:9])}",
            hint="units in the order of forward; ahead= for blocks that are recomputed together; keep=True where "
            "several forwards precede their backwards",
        )

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
        self._rest()

    def _rest(self) -> None:
        """Everything sharded, and at the beginning of a pass."""
        self._running = self._forwarded = self._kept = False
        self._next = 0
        self._done: list[Unit] = []
        self._tour.begin()
        for unit in self._units:
            unit.rest()
