"""ZeRO 3: parameters, gradients and optimizer state are all sharded; a unit is whole only while it computes.

Every forward gathers all units in one fixed order, and every backward pass gathers and reduces them in another,
whatever a rank uses of them: so ranks that skip a block, or that have no rows at all, issue the same collectives. Hooks
only say how far along that order this rank has come. A unit is gathered before the one in front of it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor, nn

from nbkit.rank.parallel.data_parallel.base import DataAxis
from nbkit.rank.parallel.data_parallel.bucket_collectives import Links
from nbkit.rank.parallel.module.meta_module import homes
from nbkit.rank.parallel.zero3.backward_order import nested
from nbkit.rank.parallel.zero3.gather_dtypes import Casts
from nbkit.rank.parallel.zero3.gather_order import GatherOrder
from nbkit.rank.parallel.zero3.module_hooks import watch
from nbkit.rank.parallel.zero3.unit import Unit, units_of
from nbkit.rank.parallel.zero3.weight_reads import refuse_use, weight_uses
from nbkit.tensor_layout import Layout


class ShardedParameters(GatherOrder, DataAxis):
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
        self.follow()  # by hand no step has
        super()._begin_forward(number)

    def leaves(self) -> list[nn.Parameter]:
        if not self._leaves:
            self._leaves = [*super().leaves(), *(p for unit in self._units for slot in unit.slots for p in slot.used)]
        return self._leaves

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

    @contextmanager
    def computing(self, *, autocast: bool = False) -> Iterator[None]:
        self.follow()
        self._computing = True
        self._set_autocast(autocast)
        self._guard(True)
        try:
            # The first step, where nobody has seen before who uses what.
            with nullcontext() if self._proven else weight_uses(self._units, refuse_use, lambda unit: unit.here):
                yield
        finally:
            self._computing = False
            self._set_autocast(False)
            # A step has come to its end; an evaluation leaves the root, and what was broken off anything.
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
        for unit in [unit for unit in self._units if not unit.here]:
            unit.gather()
            if before is not None:
                before.close()
            if unit is self._root and self._stays and not backward:
                unit.open()
            else:
                before = unit
        if before is not None:
            before.close()
        if backward:
            self._end_backward()

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
