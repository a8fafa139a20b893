"""Units of ZeRO 3: groups of parameters that are gathered, used and freed together, and their gradients.

Between uses, a unit holds a shard of each parameter. All shards of one dtype and device are in one flat tensor, which
is the input of an all-gather. The memory of the whole parameters is allocated and freed, but the tensor objects stay
the same from step to step, because autograd and hooks refer to them.

`NotGathered` is the placeholder in a module for a parameter that is not gathered. It has the shape, dtype and device of
the whole parameter, because models often read them. Any use of its values raises an error with the parameter's name:
computing with a shard of a weight would give wrong numbers, often without an error.

`find_casts` finds the parameters that can be gathered in the dtype of autocast, which sends half the bytes and gives
the same numbers. Autocast casts a float32 weight before a matrix product. If all readers of a parameter use such a
cast, the parameter can be cast before it is gathered, and every rank computes with the same bits. Norms and embeddings
read their parameters in float32, so these are gathered in float32. `find_casts` finds the readers by running the model
on an example, and compares the results of gathering before and after the cast. In both cases, backward produces the
gradient of such a parameter in the dtype of autocast. It is cast to float32 at once, so sums over micro-batches and
ranks are in float32. If several products share one cast in a forward pass, their gradients are summed in the dtype of
the cast, as in torch's autocast.

`weight_uses` reports parameters that are changed, or that are used while their unit does not run. It sees every
operation and recognizes parameters by their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn, ops

from nbkit.errors import TrainingError
from nbkit.rank.parallel.data_parallel.base import Place
from nbkit.rank.parallel.data_parallel.buckets import (
    InFlight,
    Links,
    Packing,
    Reduction,
    aligned,
    all_gather,
    flat_with_views,
)
from nbkit.rank.parallel.module.copies import homes, marked, parameter_like, replace_submodule
from nbkit.rank.parallel.proof.observe import SHAPE_ONLY, Memory, MemoryUses, memory_of, tensors_in
from nbkit.rank.parallel.proof.unchanged import set_evaluation, unchanged
from nbkit.rank.parallel.reshard.redistribute import emptied
from nbkit.rank.torch_private import disabled_torch_function, tree_leaves
from nbkit.rank.watching_mode import WatchingMode
from nbkit.tensor_layout import Layout

_HINT = (
    "strategy='zero2', which keeps weights whole; or a batch that shows this earlier: "
    "with prepare(), hints=nbkit.ModelHints(example=batch); with a Trainer, data that can be indexed"
)


def used_outside(name: str, unit: str, how: str) -> TrainingError:
    """Return the error for a parameter that is used while its block does not run."""
    return TrainingError(
        f"The parameter {name!r} is used outside of the forward of {unit!r}. There, a rank has only a part of it "
        "under zero=3.",
        numbers=how,
        hint=_HINT,
    )


class NotGathered(Tensor):
    """Placeholder for a parameter that is not gathered.

    param_name: name of the parameter. unit_name: name of the block with which it is gathered.
    """

    param_name: str
    unit_name: str
    _is_param = True  # isinstance(..., nn.Parameter)
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, whole: nn.Parameter, name: str, unit: str) -> NotGathered:
        """Make a placeholder with the shape, dtype and device of `whole`. The values of `whole` are not read."""
        blank = torch.zeros((), dtype=whole.dtype, device=whole.device).expand(whole.shape)
        made: NotGathered = Tensor._make_subclass(cls, blank, whole.requires_grad)
        marked(made, whole).param_name, made.unit_name = name, unit
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.overloadpacket in SHAPE_ONLY:
            blank = torch.zeros((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
            return func(blank, *args[1:], **(kwargs or {}))
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, NotGathered))
        raise used_outside(first.param_name, first.unit_name, f"shape {tuple(first.shape)}, by {func.overloadpacket}")

    # The following do not go through __torch_dispatch__.

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Return True if the parameter is trained in this step."""
        return bool(Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value != self.requires_grad:
            raise used_outside(self.param_name, self.unit_name, f"requires_grad is set to {value} within a step")

    def follow(self, trained: bool) -> None:
        """Set whether the parameter is trained in the coming step."""
        Tensor.requires_grad_(self, trained)

    def requires_grad_(self, requires_grad: bool = True) -> NotGathered:
        """Raise TrainingError if the value would change."""
        self.requires_grad = requires_grad
        return self

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Raise TrainingError."""
        raise used_outside(self.param_name, self.unit_name, ".data")

    @data.setter
    def data(self, value: Tensor) -> None:
        raise used_outside(self.param_name, self.unit_name, ".data is set")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"NotGathered({self.param_name!r}, shape {tuple(self.shape)}, with {self.unit_name!r})"


@dataclass(frozen=True)
class Casts:
    """The `names` of parameters that are gathered in `dtype` in passes under autocast."""

    dtype: torch.dtype
    names: frozenset[str]

    def spelled(self, module: nn.Module) -> str:
        """Return a description for users. module: the whole model, or its skeleton."""
        sizes = {name: getattr(*places[0]).numel() for name, places in homes(module).items()}
        share = sum(sizes[name] for name in self.names) / sum(sizes.values())
        return f"{share:.0%} of the weights gathered in {str(self.dtype)[6:]}; gradients summed in float32"


def find_casts(module: nn.Module, run: Callable[[], Tensor], dtype: torch.dtype) -> Casts | None:
    """Return the parameters that are read only through casts to `dtype`.

    Return None if there are none, or if casting before the run changes the numbers. run: runs the whole model on an
    example and returns the loss. The module is restored. Errors of the model are raised.
    """
    reads = _Reads(module, dtype)
    with unchanged(module), _autocast(module, dtype), reads:
        value = run()
        reads.forward = False
        if value.requires_grad:
            value.backward()
    with unchanged(module), _autocast(module, dtype), reads, torch.no_grad():
        set_evaluation(module)
        run()
    casts = Casts(dtype, frozenset(reads.found))
    if not casts.names:
        return None
    if (cast := _bits(module, run, casts, cast=True)) == (whole := _bits(module, run, casts, cast=False)):
        return casts
    # If a single process does not reproduce its own gradients, only the loss can be compared.
    again = _bits(module, run, casts, cast=False)
    return casts if again != whole and again[0] == whole[0] == cast[0] else None


@contextmanager
def _autocast(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Enable autocast as in a training step: all readers in one forward pass share the first cast of a parameter."""
    device = next(module.parameters()).device
    torch.set_autocast_cache_enabled(True)  # `unchanged` turned it off, and restores it
    with torch.autocast(device.type, dtype=dtype):
        yield


class _Reads(WatchingMode):
    """Mode that records who reads parameters. found: names of parameters read only through one cast per pass."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self.forward = dtype, True
        params = {name: getattr(*places[0]) for name, places in homes(module).items()}
        # The keys are memory, because a view of a parameter reads it too.
        self._names: dict[Memory, list[str]] = {}
        for name, p in params.items():
            self._names.setdefault(memory_of(p), []).append(name)
        self._params = {id(p) for p in params.values() if p.dtype == torch.float32}
        self._frozen = {name for name, p in params.items() if not p.requires_grad}
        self._casts: dict[str, int] = {}
        self._others: set[str] = set()

    @property
    def found(self) -> set[str]:
        # If a parameter were cast several times, autograd would sum the gradients of the casts in float32.
        return {name for name, count in self._casts.items() if count == 1 or name in self._frozen} - self._others

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in SHAPE_ONLY:
            cast = func.overloadpacket is ops.aten._to_copy and kwargs.get("dtype") == self._dtype
            for tensor in tensors_in((args, kwargs)):
                for name in self._names.get(memory_of(tensor), ()):
                    if not cast or id(tensor) not in self._params:
                        self._others.add(name)
                    elif self.forward:
                        self._casts[name] = self._casts.get(name, 0) + 1
        return func(*args, **kwargs)


def _bits(module: nn.Module, run: Callable[[], Tensor], casts: Casts, *, cast: bool) -> tuple[int, dict[str, int]]:
    """Return checksums of (the loss, the gradients of the cast parameters). cast: cast before the model runs."""
    before = {name: (places, getattr(*places[0])) for name, places in homes(module).items()}
    found: dict[str, int] = {}

    def note(name: str) -> Callable[[Tensor], None]:
        def made(gradient: Tensor) -> None:  # called before the gradient is accumulated
            found[name] = _checksum(gradient.float())

        return made

    def drop(p: Tensor) -> None:
        p.grad = None

    with unchanged(module), _autocast(module, casts.dtype):
        hooks = []
        try:
            for name, (places, p) in before.items():
                if cast and name in casts.names:
                    p = parameter_like(p.detach().to(casts.dtype), p)
                    replace_submodule(places, p)
                if p.requires_grad:
                    hooks.append(p.register_post_accumulate_grad_hook(drop))
                    if name in casts.names:
                        hooks.append(p.register_hook(note(name)))
            value = run()
            if value.requires_grad:
                value.backward()
            return _checksum(value.detach().float()), found
        finally:
            for hook in hooks:
                hook.remove()
            for places, p in before.values():
                replace_submodule(places, p)


def _checksum(tensor: Tensor) -> int:
    """Return a checksum of a float32 tensor that depends on the bits and positions of its elements."""
    bits = tensor.contiguous().view(-1).view(torch.int32).long()
    places = torch.arange(1, 1 + len(bits), device=bits.device)
    return int((bits * (2 * places + 1)).sum())


class Slot:
    """A parameter of a unit: `shard` at rest, and `whole` while it is used. All `places` share it.

    cast: replaces `whole` in passes under autocast if the parameter is gathered in the dtype of autocast. used:
    `whole`, and `cast` if there is one. absent: placeholder in the module while the model runs and the parameter is not
    gathered.
    """

    def __init__(self, name: str, places: Sequence[Place], layout: Layout) -> None:
        self.name, self.places, self.layout = name, places, layout
        self.old: nn.Parameter = getattr(*places[0])
        self.shard: nn.Parameter
        self.whole: nn.Parameter
        self.cast: nn.Parameter | None = None
        self.used: list[nn.Parameter]
        self.absent: NotGathered
        self.grad: Tensor | None = None

    def widen(self) -> None:
        """Add the gradient of `cast` to the gradient of `whole`, in the dtype of `whole`."""
        if self.cast is not None and (grad := self.cast.grad) is not None:
            self.cast.grad = None
            grad = grad.to(self.whole.dtype)
            self.whole.grad = grad if self.whole.grad is None else self.whole.grad.add_(grad)


class _Wholes:
    """Whole parameters of one dtype, whose memory is allocated and freed."""

    def __init__(self, slots: Sequence[Slot], like: Tensor) -> None:
        flat, self.flats = flat_with_views([slot.layout.local for slot in slots], like)
        # Use .data, so that refilling the memory does not look to autograd like a change of a saved tensor.
        views = [flat.view(slot.layout.local).data for slot, flat in zip(slots, self.flats, strict=True)]
        self.params = [parameter_like(view, slot.old) for slot, view in zip(slots, views, strict=True)]
        self._storage = flat.untyped_storage()
        self._num_bytes = self._storage.nbytes()
        self.free()

    def take(self) -> None:
        """Allocate the memory. The caller fills it."""
        self._storage.resize_(self._num_bytes)

    def free(self) -> None:
        """Free the memory."""
        self._storage.resize_(0)


class _Run:
    """Neighbouring parameters that are gathered in one dtype.

    at, at_byte: where they begin in a row, in elements and in bytes. cast: the dtype in passes under autocast, or None
    for their own dtype.
    """

    def __init__(
        self, slots: list[Slot], ranks: int, like: Tensor, at: int, at_byte: int, cast: torch.dtype | None
    ) -> None:
        self.slots, self.at, self.at_byte, self.dtype = slots, at, at_byte, cast or like.dtype
        self.packing = Packing.of([slot.layout.local for slot in slots], ranks, like)
        self.num_bytes = self.packing.width * self.dtype.itemsize
        self.wholes = _Wholes(slots, like)
        self.casts = self.wholes if cast is None else _Wholes(slots, like.new_empty(0, dtype=cast))
        for i, slot in enumerate(slots):
            slot.whole = self.wholes.params[i]
            slot.cast = None if cast is None else self.casts.params[i]
            slot.used = [slot.whole] if slot.cast is None else [slot.whole, slot.cast]

    def columns(self, rows: Tensor) -> Tensor:
        """Return the columns of this run in `rows`, which contain elements, or bytes under autocast."""
        if rows.dtype == torch.uint8:
            return rows[..., self.at_byte : self.at_byte + self.num_bytes].view(self.dtype)
        return rows[..., self.at : self.at + self.packing.width]


class DtypePart:
    """The parameters of a unit that have one dtype and device."""

    def __init__(self, slots: list[Slot], links: Links, casts: Casts | None) -> None:
        self.slots, self.links = slots, links
        self.like = slots[0].old.detach().new_empty(0)
        # Autocast does not change other dtypes.
        names = casts.names if casts is not None and self.like.dtype == torch.float32 else frozenset()
        first, rest = [s for s in slots if s.name in names], [s for s in slots if s.name not in names]
        self.runs: list[_Run] = []
        width = num_bytes = 0
        for some, dtype in ((first, casts.dtype if casts is not None else None), (rest, None)):
            if some:
                at, at_byte = aligned(width, self.like), aligned(num_bytes, self.like.new_empty(0, dtype=torch.uint8))
                run = _Run(some, links.ranks, self.like, at, at_byte, dtype)
                width, num_bytes = at + run.packing.width, at_byte + run.num_bytes
                self.runs.append(run)
        self.may_cast, self._num_bytes = bool(first), num_bytes
        self.mine = self.like.new_zeros(width)
        for run in self.runs:
            for i, slot in enumerate(run.slots):
                slot.shard = parameter_like(run.packing.shard(run.columns(self.mine), i, links.index), slot.old)
        emptied(self.mine)
        self.arriving: tuple[Tensor, Tensor, dist.Work] | None = None
        self.is_cast = False
        self.trained: list[Slot] = []
        self.reduction: Reduction | None = None
        self.sums: Tensor | None = None
        self.num_passes = 0
        self.never_here: set[int] = set()

    def gather(self, autocast: bool) -> None:
        """Start the all-gather. autocast: True to cast the parameters that can be cast first."""
        self.is_cast = autocast and self.may_cast
        row = self._row_of_bytes() if self.is_cast else self.mine
        self.arriving = row, *all_gather(row, self.links)

    @torch.no_grad()
    def _row_of_bytes(self) -> Tensor:
        row = torch.empty(self._num_bytes, dtype=torch.uint8, device=self.like.device)
        for run in self.runs:
            run.columns(row).copy_(run.columns(self.mine))
        return row

    def fill(self) -> None:
        """Wait for the all-gather and fill the whole parameters."""
        assert self.arriving is not None
        _, matrix, work = self.arriving
        work.wait()
        for run in self.runs:
            wholes = run.casts if self.is_cast else run.wholes
            wholes.take()
            run.packing.unpack(run.columns(matrix), wholes.flats)
        self.arriving = None

    def free(self) -> None:
        """Free the memory of the whole parameters."""
        for run in self.runs:
            run.wholes.free()
            run.casts.free()

    def train(self) -> None:
        """Update which parameters are trained from their current `requires_grad`."""
        trained = [slot for slot in self.slots if slot.shard.requires_grad]
        for slot in self.slots:
            for param in slot.used:
                param.requires_grad_(slot.shard.requires_grad)
            slot.absent.follow(slot.shard.requires_grad)
        if trained == self.trained:
            return
        self.trained, self.reduction, self.sums = trained, None, None
        if trained:
            packing = Packing.of([slot.layout.local for slot in trained], self.links.ranks, self.like)
            self.reduction = Reduction(packing, self.links, self.like)
            self.sums = self.like.new_zeros(packing.width + len(trained))
            for i, slot in enumerate(trained):
                slot.grad = packing.shard(self.sums, i, self.links.index)
            emptied(self.sums)

    def let_go(self) -> None:
        """Free the memory of gradients; `train` allocates it again."""
        self.trained, self.reduction, self.sums = [], None, None
        for slot in self.slots:
            slot.grad = slot.shard.grad = slot.whole.grad = None

    def landed(self, row: Tensor) -> None:
        """Add the gradient sums of one pass to those of earlier passes. row: the sums, then the counts."""
        assert self.sums is not None and self.reduction is not None
        if self.num_passes:
            self.sums.add_(row)
            self.never_here &= self.reduction.unused
        else:
            self.sums.copy_(row)
            self.never_here = self.reduction.unused
        self.num_passes += 1

    def give(self) -> None:
        """Give the summed gradients to the optimizer. Counts are read only if this rank did not use a parameter."""
        if self.sums is None:
            return
        if not self.num_passes:
            for slot in self.trained:
                slot.shard.grad = None
            return
        counts = self.sums[-len(self.trained) :].tolist() if self.never_here else []
        for i, slot in enumerate(self.trained):
            slot.shard.grad = None if i in self.never_here and counts[i] == 0 else slot.grad


class Unit:
    """A block of the model, or the root, which has the rest. autocast: True if the next gather is for autocast."""

    def __init__(self, name: str, slots: list[Slot], links: Links, casts: Casts | None = None) -> None:
        self.name, self.slots, self.autocast = name, slots, False
        kinds: dict[tuple[torch.dtype, torch.device], list[Slot]] = {}
        for slot in slots:
            kinds.setdefault((slot.old.dtype, slot.old.device), []).append(slot)
        self._parts = [DtypePart(some, links, casts) for some in kinds.values()]
        for slot in slots:
            slot.absent = NotGathered(slot.whole, slot.name, name)
        self._by_name = {slot.name: slot for slot in slots}
        self.here = True
        self.guarded = False
        self.rest()

    def rest(self) -> None:
        """Return to the sharded state from any state."""
        for part in self._parts:
            part.arriving = None
            for slot in part.slots:
                for param in slot.used:
                    param.grad = None
        self.close()
        self.begin_pass()
        self.filling, self.depth = False, 0
        # One entry per call that has not ended, innermost last: True if backward will report when it has passed the
        # call.
        self.calls: list[bool] = []

    def begin_pass(self) -> None:
        """Reset the state of a pass: no forward is waiting for its backward."""
        self.forwarded = self.begun = self.finished = self.sent = self.skipped = self.loose = False
        self.pending = 0
        self.arrived: set[str] = set()

    def train(self) -> None:
        """Update which parameters are trained, at the start of a step."""
        for part in self._parts:
            part.train()
            part.num_passes = 0

    def drop(self) -> None:
        """Drop the gradients of the passes so far."""
        for part in self._parts:
            part.num_passes = 0

    def let_go(self) -> None:
        """Free the memory of gradients; `train` allocates it again."""
        for part in self._parts:
            part.let_go()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that hold the unit's memory at rest."""
        yield from (part.mine for part in self._parts)

    @property
    def trained(self) -> list[Slot]:
        """Return the trained parameters."""
        return [slot for part in self._parts for slot in part.trained]

    @property
    def coming(self) -> bool:
        """Return True if the all-gather has been started."""
        return any(part.arriving is not None for part in self._parts)

    def gather(self) -> None:
        """Start the all-gather."""
        for part in self._parts:
            part.gather(self.autocast)

    @torch.no_grad()
    def open(self) -> None:
        """Fill the whole parameters and put them into the module. Call after `gather`."""
        self.filling = True
        for part in self._parts:
            part.fill()
        self.reveal()
        self.here, self.filling = True, False

    def close(self) -> None:
        """Put the shards back into the module and free the whole parameters. Wait for an unfinished all-gather and drop
        it.
        """
        for part in self._parts:
            if part.arriving is not None:
                # The optimizer must not change a row that is still being sent to others.
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
                replace_submodule(slot.places, slot.used[-1] if part.is_cast else slot.whole)

    def widen(self, name: str) -> None:
        """Cast the new gradient of the parameter `name` to the dtype in which it is summed."""
        self._by_name[name].widen()

    def show(self) -> None:
        """Put the shards back into the module, or, while `guarded`, the placeholders that raise when used."""
        for slot in self.slots:
            replace_submodule(slot.places, cast(nn.Parameter, slot.absent) if self.guarded else slot.shard)

    def guard(self, guarded: bool) -> None:
        """Turn the guard on or off. While on, running code cannot use a shard as if it were the whole parameter."""
        if self.guarded != guarded:
            self.guarded = guarded
            if not self.here:
                self.show()

    def reduce(self, flight: InFlight) -> None:
        """Start to reduce the gradients of this pass, and free the whole gradients."""
        self.sent = True
        for part in self._parts:
            if part.reduction is not None:
                flight.send(part.reduction, [slot.whole.grad for slot in part.trained], part.landed)
                for slot in part.trained:
                    slot.whole.grad = None

    def give(self) -> None:
        """Give the summed gradients to the optimizer."""
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
    """Return a unit for each block; see `assigned`."""
    return [Unit(name, slots, links, casts) for name, slots in assigned(module, blocks, parents, layouts, rooted)]


def assigned(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    parents: Sequence[int],
    layouts: Mapping[str, Layout],
    rooted: Collection[str],
) -> list[tuple[str, list[Slot]]]:
    """Return the name and parameters of each block (see `nested`). A parameter belongs to the innermost block around
    it.

    Parameters that are shared by several blocks, or that are `rooted`, belong to the root, which stays gathered.
    """
    slots: list[list[Slot]] = [[] for _ in blocks]
    owners = _owners(blocks, parents)
    for name, places in homes(module).items():
        owning = {owners[id(part)] for part, _ in places} if name not in rooted else {0}
        slots[owning.pop() if len(owning) == 1 else 0].append(Slot(name, places, layouts[name]))
    names = {id(part): path or "the root" for path, part in module.named_modules()}
    return [(names[id(block)], some) for block, some in zip(blocks, slots, strict=True)]


def _owners(blocks: Sequence[nn.Module], parents: Sequence[int]) -> dict[int, int]:
    """Return {id of a module: number of the innermost block around it, or 0 if several separate blocks contain it}."""
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


Report = Callable[[Unit, Slot, str, bool], None]
"""(unit, its parameter, name of the operation, True if the operation changes the parameter)"""


Homes = list[tuple[int, Unit, Slot]]
"""The parameters in one block of memory: (offset in elements, unit, parameter)."""


def weight_uses(units: Sequence[Unit], report: Report, there: Callable[[Unit], bool]) -> MemoryUses[Homes]:
    """Return a context that reports operations that change a parameter, or use one while its unit is not `there`.

    report: called for each of them. there: returns True if a unit is gathered.
    """
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
    """Raise TrainingError for a reported use or change of a parameter."""
    if changed:
        raise changed_in_place(slot.name, how)
    raise used_outside(slot.name, unit.name, f"shape {tuple(slot.whole.shape)}, by {how}")


def changed_in_place(name: str, how: str) -> TrainingError:
    """Return the error for a parameter that the model changes while it runs. Freeing memory would lose the change."""
    by_rows = "renorm" in how  # it changes the rows that a rank reads, so ddp is refused too
    return TrainingError(
        f"The forward pass changes the parameter {name!r} in place, and zero=3 would lose this change.",
        numbers=f"by {how}",
        hint="strategy='ddp'; or " * (not by_rows) + "change it between two steps, in a callback of the Trainer",
    )
