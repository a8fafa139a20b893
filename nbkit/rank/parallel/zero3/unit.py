"""One unit of ZeRO 3: parameters that are gathered, used, let go, and whose gradients are scattered, together.

At rest the unit holds a part of each parameter, all in one flat tensor, which is what an all-gather sends. The whole
parameters are tensors whose memory comes and goes: autograd and hooks keep the same objects from step to step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.data_parallel.bucket_collectives import InFlight, Links
from nbkit.rank.parallel.module.meta_module import homes, replace
from nbkit.rank.parallel.zero3.gather_dtypes import Casts
from nbkit.rank.parallel.zero3.placeholder import NotGathered
from nbkit.rank.parallel.zero3.unit_parameters import Part, Slot
from nbkit.tensor_layout import Layout


class Unit:
    """A block of the model, or the root: what no block holds. autocast: what is gathered next is used under it."""

    def __init__(self, name: str, slots: list[Slot], links: Links, casts: Casts | None = None) -> None:
        self.name, self.slots, self.autocast = name, slots, False
        kinds: dict[tuple[torch.dtype, torch.device], list[Slot]] = {}
        for slot in slots:
            kinds.setdefault((slot.old.dtype, slot.old.device), []).append(slot)
        self._parts = [Part(some, links, casts) for some in kinds.values()]
        for slot in slots:
            slot.absent = NotGathered(slot.whole, slot.name, name)
        self._by_name = {slot.name: slot for slot in slots}
        self.here = True
        self.guarded = False
        self.rest()

    def rest(self) -> None:
        """Sharded, whatever was under way."""
        for part in self._parts:
            part.arriving = None
            for slot in part.slots:
                for param in slot.used:
                    param.grad = None
        self.close()
        self.begin_pass()
        self.filling, self.depth = False, 0
        # Calls whose end has not been reached, innermost last: whether backward will tell when it has passed them.
        self.calls: list[bool] = []

    def begin_pass(self) -> None:
        """Nothing has been run forward that a backward pass has not come back through."""
        self.forwarded = self.begun = self.finished = self.sent = self.skipped = self.loose = False
        self.pending = 0
        self.arrived: set[str] = set()

    def train(self) -> None:
        """Follow what is frozen now; a step begins."""
        for part in self._parts:
            part.train()
            part.num_passes = 0

    def let_go(self) -> None:
        """Give up the memory of gradients; `train` takes it anew."""
        for part in self._parts:
            part.let_go()

    def tensors(self) -> Iterator[Tensor]:
        """What shows memory at rest."""
        yield from (part.mine for part in self._parts)

    @property
    def trained(self) -> list[Slot]:
        """What has gradients."""
        return [slot for part in self._parts for slot in part.trained]

    @property
    def coming(self) -> bool:
        """Whether its all-gather has been sent."""
        return any(part.arriving is not None for part in self._parts)

    def gather(self) -> None:
        """Send the all-gather."""
        for part in self._parts:
            part.gather(self.autocast)

    @torch.no_grad()
    def open(self) -> None:
        """Put the whole parameters into the module; after `gather`."""
        self.filling = True
        for part in self._parts:
            part.fill()
        self.reveal()
        self.here, self.filling = True, False

    def close(self) -> None:
        """Put the shards back, and let the memory of whole parameters go; what is coming is waited for and dropped."""
        for part in self._parts:
            if part.arriving is not None:
                # The optimizer must not change what others are still being sent.
                part.arriving[-1].wait()
                part.arriving = None
            if self.here:
                part.free()
        if self.here:
            self.show()
        self.here = False

    def reveal(self) -> None:
        """Put the whole parameters into the module."""
        for part in self._parts:
            for slot in part.slots:
                replace(slot.places, slot.used[-1] if part.is_cast else slot.whole)

    def widen(self, name: str) -> None:
        """A gradient of the parameter `name` is made: from here on it has the dtype in which it is summed."""
        self._by_name[name].widen()

    def show(self) -> None:
        """Put the shards back into the module; what raises when it is used, while `guarded`."""
        for slot in self.slots:
            replace(slot.places, cast(nn.Parameter, slot.absent) if self.guarded else slot.shard)

    def guard(self, guarded: bool) -> None:
        """Whether something runs that must not take a shard for the whole."""
        if self.guarded != guarded:
            self.guarded = guarded
            if not self.here:
                self.show()

    def reduce(self, flight: InFlight) -> None:
        """Send the gradients of this pass; whole ones are let go."""
        self.sent = True
        for part in self._parts:
            if part.reduction is not None:
                flight.send(part.reduction, [slot.whole.grad for slot in part.trained], part.landed)
                for slot in part.trained:
                    slot.whole.grad = None

    def give(self) -> None:
        """The optimizer gets the sums."""
        for part in self._parts:
            part.give()


def units_of(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    parents: Sequence[int],
    layouts: Mapping[str, Layout],
    links: Links,
    rooted: Collection[str] = (),
    casts: Casts | None = None,
) -> list[Unit]:
    """A unit for each of the blocks; see `assigned`."""
    return [Unit(name, slots, links, casts) for name, slots in assigned(module, blocks, parents, layouts, rooted)]


def assigned(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    parents: Sequence[int],
    layouts: Mapping[str, Layout],
    rooted: Collection[str],
) -> list[tuple[str, list[Slot]]]:
    """Name and parameters of each block (see `nested`), every parameter of `module` in the innermost that holds it.

    What several blocks hold, and what is `rooted`, belongs to the root, which is there whenever any of them is.
    """
    slots: list[list[Slot]] = [[] for _ in blocks]
    owners = _owners(blocks, parents)
    for name, places in homes(module).items():
        owning = {owners[id(part)] for part, _ in places} if name not in rooted else {0}
        slots[owning.pop() if len(owning) == 1 else 0].append(Slot(name, places, layouts[name]))
    names = {id(part): path or "the root" for path, part in module.named_modules()}
    return [(names[id(block)], some) for block, some in zip(blocks, slots, strict=True)]


def _owners(blocks: Sequence[nn.Module], parents: Sequence[int]) -> dict[int, int]:
    """id of a module -> number of the innermost block that holds it; 0 where blocks beside each other do."""
    owners: dict[int, int] = {}
    shared: set[int] = set()
    for i, block in enumerate(blocks):
        around, number = {i}, i
        while (number := parents[number]) >= 0:
            around.add(number)
        for part in map(id, block.modules()):
            if owners.get(part, 0) not in around:
                shared.add(part)
            owners[part] = i
    return owners | dict.fromkeys(shared, 0)
