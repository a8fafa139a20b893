"""ZeRO 3: parameters, gradients and optimizer state are sharded. A unit is whole only while it computes.

A unit is a block of the model. Every forward pass gathers all units in one fixed order: the order of the `units`
argument. Every backward pass gathers and reduces them in another fixed order (`backward_tour`). Both orders are the
same on all ranks, whatever units a rank uses. So ranks that skip a block, or that have no rows at all, issue the same
collectives. The next unit is gathered while the current one computes. If a rank needs the units in another order, it
cannot know whether the other ranks do too, so it raises OutOfOrder.

Hooks report how far this rank has come in the order: they call `before` and `after` around each block, and `arrive` for
each gradient. They live as long as the module, which may belong to the user, so they hold only a weak reference to the
axis.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nbkit.errors import TrainingError
from nbkit.rank.parallel.data_parallel.base import DataAxis
from nbkit.rank.parallel.data_parallel.buckets import InFlight, Links, came_twice, refuse_sparse
from nbkit.rank.parallel.module.copies import homes
from nbkit.rank.parallel.module.forward_wrapper import awaited, in_backward, is_nested, marked
from nbkit.rank.parallel.zero3.unit import Casts, Unit, refuse_use, units_of, weight_uses
from nbkit.tensor_layout import Layout


class _Hears(Protocol):
    def before(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def after(self, number: int, output: Any) -> None: ...

    def arrive(self, number: int, name: str, param: Tensor) -> None: ...


def watch(axis: _Hears, units: Sequence[Unit], blocks: Sequence[nn.Module]) -> list[RemovableHandle]:
    """Register hooks that call `axis` with the number of a unit: its index in `blocks`, or -1, -2, ... (see
    `_wrapped`).
    """
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
                # Include frozen parameters, because they may be unfrozen later.
                for param in slot.used:
                    param.requires_grad_(True)
                    hooks.append(param.register_post_accumulate_grad_hook(_arriving(itself, number, slot.name)))
    return hooks


def _wrapped(units: Sequence[Unit], blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the models inside wrappers such as adapters. They contain all parameters, and may be called directly."""
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
    """Return an autograd hook that calls `method` with `unit` as long as the method's object lives."""
    itself = weakref.WeakMethod(method)

    def call(*_: Any) -> None:
        if (bound := itself()) is not None:
            bound(unit)

    return call


Pass = Literal["evaluation", "forward", "backward"]
"""evaluation: a forward pass without gradients."""

Stop = tuple[bool, int]
"""(True to gather the unit, False to reduce its gradients; number of the unit)"""


def nested(module: nn.Module, units: Sequence[nn.Module]) -> tuple[list[nn.Module], list[int]]:
    """Return (blocks, parents): `module` and its units, and for each the number of the unit that contains it.

    A unit comes before the units inside it. Otherwise the given order is kept.
    """
    chosen = {id(unit): unit for unit in units if unit is not module}
    around: dict[int, int] = {}
    for unit in (module, *chosen.values()):
        for part in unit.modules():
            # The innermost unit that contains a part is the one with the fewest modules.
            if part is not unit and id(part) in chosen:
                best = around.get(id(part))
                if best is None or len(list(unit.modules())) < len(list(chosen.get(best, module).modules())):
                    around[id(part)] = id(unit)
    blocks: list[nn.Module] = []
    parents: list[int] = []
    # A recursive closure would be a reference cycle, which holds the modules until the next garbage collection.
    todo = [(module, -1)]
    while todo:
        block, parent = todo.pop()
        inside = [unit for key, unit in chosen.items() if around.get(key) == id(block)]
        todo += [(unit, len(blocks)) for unit in reversed(inside)]
        blocks.append(block)
        parents.append(parent)
    return blocks, parents


def backward_tour(parents: Sequence[int], ahead: int) -> list[Stop]:
    """Return the order of gathers and reductions in a backward pass.

    Units 1, 2, ... are in the order of the forward pass, and `parents[i]` contains unit i. Unit 0 is the root, which
    stays gathered. Backward enters the last unit first, and enters each unit before the units inside it. The next
    `ahead` units are gathered before the gradients of a unit are reduced, so that communication overlaps with
    computation.
    """
    stops: list[Stop] = []

    def visit(around: int) -> None:
        for i in reversed(range(1, len(parents))):
            if parents[i] == around:
                stops.append((True, i))
                visit(i)
                stops.append((False, i))

    visit(0)
    entered = [i for gathers, i in stops if gathers]
    tour: list[Stop] = []
    gathered = passed = 0
    for gathers, i in stops:
        passed += gathers
        for number in entered[gathered : passed if gathers else passed + ahead]:
            tour.append((True, number))
            gathered += 1
        if not gathers:
            tour.append((False, i))
    return [*tour, (False, 0)]


class BackwardOrder:
    """The position of this rank in the order of a backward pass."""

    def __init__(self, stops: Sequence[Stop]) -> None:
        self._stops, self._next = list(stops), 0

    def begin(self) -> None:
        """Start a pass."""
        self._next = 0

    @property
    def done(self) -> bool:
        """Return True if the order has been completed."""
        return self._next == len(self._stops)

    @property
    def at(self) -> Stop:
        """Return the next stop."""
        return self._stops[self._next]

    def step(self) -> Stop:
        """Return the next stop, and advance."""
        self._next += 1
        return self._stops[self._next - 1]


class OutOfOrder(TrainingError):
    """A forward or backward pass on this rank needs units in another order than the one that all ranks follow.

    unit: name of the unit that is needed. again: True if backward needs it for recomputation.
    """

    def __init__(self, unit: str, how: str, order: Sequence[str], *, again: bool = False) -> None:
        super().__init__(
            f"{unit!r} {how}.",
            numbers=f"zero=3 gathers in the order {', '.join(order[:8])}{', ...' * (len(order) > 8)}",
            hint="strategy='zero2', which gathers nothing; or a batch that shows the order earlier: "
            "with prepare(), hints=nbkit.ModelHints(example=batch); with a Trainer, data that can be indexed",
        )
        self.unit, self.again = unit, again


class GatherOrder:
    """The order of `units`, the root first, and the position of this rank in it.

    parents: number of the unit that contains each block. keep, ahead: see data_axis.
    """

    def __init__(self, units: list[Unit], blocks: Sequence[nn.Module], parents: Sequence[int], keep: bool, ahead: int):
        self.keep, self._armed, self._computing = keep, False, False
        self._running = self._forwarded = self._kept = self._lent = self._proven = False
        self._by_user = False  # the user calls the model and runs the backward passes
        self._next = self._made = self._entry = 0
        self._units, self._root = units, units[0]
        inside = {id(part) for slot in self._root.slots for part, _ in slot.places}
        self._borrows = [not inside.isdisjoint(map(id, block.modules())) for block in blocks]
        self._flight = InFlight()
        self._tour = BackwardOrder(backward_tour(parents, ahead))

    # Forward.

    @property
    def _stays(self) -> bool:
        """Return True if the root stays gathered after a forward pass without gradients: the loss may use it."""
        return self._computing and not self.keep

    def before(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather the parameters of `block`, which is about to run. Return new inputs for it, or None to keep them.

        number: number of the unit; -1, -2, ... for a model inside the root.
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
            if self._by_user and self._forwarded and torch.is_grad_enabled():
                self._open_all()  # backward through several forward passes needs the units in an unknown order
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
        """Start the all-gather of `unit` and of all units before it in forward order, unless it was started already."""
        while self._running and not unit.coming and number >= self._next:
            self._gather_next()
        if unit.slots and not unit.coming:
            if self._computing:
                # Other ranks may not gather here. They would match this all-gather with a different one.
                how = "called again in a forward" if self._running else "called outside of the model's forward"
                raise OutOfOrder(unit.name, f"is {how}, after its parameters were freed", self._order)
            unit.gather()  # called by the user, on all ranks

    def after(self, number: int, output: Any) -> None:
        """Note that a block has returned, and close the units that are done."""
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
            self._rest()  # the previous forward did not finish
        self._running, self._entry, self._next = True, number, int(self._root.here)
        if self._root.here:
            self._root.reveal()
        self._guard(True)

    def _gather_next(self) -> None:
        self._units[self._next].gather()
        self._next += 1

    def _end_forward(self) -> None:
        while self._running and self._next < len(self._units):
            # Other ranks may use units that this rank does not use.
            self._gather_next()
        self._running = False
        self._done.clear()
        for unit in self._units:
            if unit is not self._root or not (self._forwarded or self._stays):
                unit.close()
        if not self._computing:
            # The user called the model: show the shards afterwards, even if no backward pass follows.
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
        """Note that the backward pass of `unit` begins, and gather the unit."""
        if self._kept:
            return
        if self._root.here and not self._computing:
            self._root.reveal()  # recomputation uses it
        if unit.skipped or unit.finished or unit.sent:
            raise self._late(unit, unit)
        unit.begun = True
        self._need(unit)
        self._go_on()

    def _passed(self, unit: Unit) -> None:
        """Note that backward has computed the input gradients of one call of `unit`."""
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
        """Note that autograd has computed the gradient of `param`."""
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
        """Gather `unit` and all units before it in the order of a backward pass."""
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
        late = (
            "later than its place in the order"
            if unit is other
            else f"before the backward pass of {other.name!r} is done"
        )
        return OutOfOrder(unit.name, f"is needed in backward {late}", self._order, again=again)

    def _go_on(self) -> None:
        """Advance in the order as far as the backward pass of this rank has come."""
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
            self._before_reduce(number)
            unit.reduce(self._flight)
        elif not self._kept and not unit.here:
            unit.gather()

    def _before_reduce(self, number: int) -> None:
        """Note that the gradients of a unit are about to be reduced."""

    def _end_backward(self) -> None:
        while not self._tour.done:
            self._take()
        self._flight.land()
        self._made += 1
        self._proven |= self._forwarded
        self._rest()

    def _rest(self) -> None:
        """Return to the start of a pass, with all units sharded."""
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


def alone(number: int, which: Pass) -> None:
    """Do nothing; the default of ShardedParameters.meanwhile."""


class ShardedParameters(GatherOrder, DataAxis):
    """ZeRO 3 for `module`, a skeleton; see data_axis. Outside of forward and backward the module holds the shards."""

    def __init__(
        self,
        module: nn.Module,
        layouts: Mapping[str, Layout],
        links: Links,
        *,
        units: Sequence[nn.Module],
        keep: bool,
        ahead: int,
        rooted: Collection[str] = (),
        proven: bool = False,
        casts: Casts | None = None,
        make: Callable[..., list[Unit]] = units_of,
    ) -> None:
        DataAxis.__init__(self)
        blocks, parents = nested(module, units)
        made = make(module, blocks, parents, layouts, links, rooted, casts)
        GatherOrder.__init__(self, made, blocks, parents, keep, ahead)
        self.units = self._units
        self._proven = proven
        slots = {slot.name: slot for unit in self._units for slot in unit.slots}
        for name, places in homes(module).items():
            slot = slots[name]
            part = slot.layout.part(0, links.ranks, links.index) if slot.layout.local else slot.layout
            self._add(name, slot.shard, part, (slot.shard.data, part), slot.shard, places)
        self._passes = 1
        self.meanwhile: Callable[[int, Pass], None] = alone
        """Called in a pass that this rank does not compute, when the other ranks are done with a unit: (unit number,
        pass).
        """
        self._absent = False
        self._hooks = watch(self, self._units, blocks)
        self.reset()

    # The protocol of a step.

    def refresh(self) -> None:
        self._rest()

    def begin_again(self) -> None:
        self.reset()

    def let_go(self) -> None:
        for unit in self._units:
            unit.let_go()

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        for unit in self._units:
            yield from unit.tensors()

    def follow(self) -> None:
        if not (self._computing or self._running or self._root.guarded or self._root.here):
            super().follow()

    def _begin_forward(self, number: int) -> None:
        self.follow()  # outside of a step, nothing else calls it
        super()._begin_forward(number)

    def leaves(self) -> list[nn.Parameter]:
        if not self._leaves:
            self._leaves = [*super().leaves(), *(p for unit in self._units for slot in unit.slots for p in slot.used)]
        return self._leaves

    def reset(self, *, passes: int = 1) -> None:
        self._passes, self._made = passes, 0
        self._armed, self._by_user = False, not passes
        self._absent = False
        self._flight.forget()
        self._rest()
        for unit in self._units:
            unit.train()

    def hold(self) -> None:
        if not self._kept:
            self._end_backward()

    def drop(self) -> None:
        for unit in self._units:
            unit.drop()

    def keep_open(self) -> None:
        if self._forwarded and not self._kept:
            self._open_all()

    @property
    def is_open(self) -> bool:
        return self._kept

    def pass_over(self) -> None:
        if not self._kept and any(unit.begun for unit in self._units):
            self._end_backward()

    @contextmanager
    def calling(self, *, autocast: bool = False) -> Iterator[None]:
        self._set_autocast(autocast)  # for the backward pass too
        with nullcontext() if self._proven else weight_uses(self._units, refuse_use, lambda unit: unit.here):
            yield

    def start(self) -> None:
        self._armed = True
        for unit in self._units:
            unit.arrived.clear()

    @contextmanager
    def computing(self, *, autocast: bool = False) -> Iterator[None]:
        self.follow()
        self._computing = True
        self._set_autocast(autocast)
        self._guard(True)
        try:
            # Watch the first step, unless a rehearsal has shown where parameters are used.
            with nullcontext() if self._proven else weight_uses(self._units, refuse_use, lambda unit: unit.here):
                yield
        finally:
            self._computing = False
            self._set_autocast(False)
            # A complete step leaves no unit gathered. An evaluation leaves the root, and an interruption may leave any.
            if any(unit.here for unit in self._units):
                self._rest()
            self._guard(False)

    def _set_autocast(self, autocast: bool) -> None:
        for unit in self._units:
            unit.autocast = autocast

    def finish(self) -> Tensor | None:
        if self.keep:
            if not self._kept:
                self.absent()
                self._kept = True
            self._end_backward()
        elif self._forwarded or self._kept:
            self._end_backward()
        while not self.keep and self._made < self._passes:
            self.absent(backward=True)
        self._armed = self._kept = False
        for unit in self._units:
            unit.give()
        return self._flight.canary

    def absent(self, *, backward: bool = False) -> None:
        before: Unit | None = None
        which: Pass = "forward" if backward else "evaluation"
        for number, unit in enumerate(self._units):
            if unit.here:
                continue
            unit.gather()
            if before is not None:
                self.meanwhile(number - 1, which)
                before.close()
            if unit is self._root and self._stays and not backward:
                unit.open()
            else:
                before = unit
        self.meanwhile(len(self._units) - 1, which)
        if before is not None:
            before.close()
        if backward:
            self._absent = True
            self._end_backward()
            self._absent = False

    def _before_reduce(self, number: int) -> None:
        if self._absent:
            self.meanwhile(number, "backward")

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
