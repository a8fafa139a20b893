"""Data movement of a switch: every rank gets the boxes that it lacks, in rounds of limited size.

`Exchange` holds old and new shards at the same time. Each round that sends anything is one all-to-all of the world. All
rounds together send exactly the bytes of the plan, and a plan that moves nothing sends no message.

`InPlace` is used if memory cannot hold both: it moves tensor by tensor, and frees the old ones. It sends the bytes of
the plan in rounds, like Exchange, and an all-reduce of 8 bytes before each round, so that all ranks begin a round only
if all have memory for it. If a rank has none, all ranks move everything back in the same way.

For `InPlace`, the new sharded model is built `hollow`: every tensor has its shape, its views and its place in module
and optimizer, but a storage of zero bytes. `TargetStorage` allocates these storages, and `SourceStorage` frees those of
the old model, both key by key. A storage that several keys share (the flat shards of ZeRO 3) is allocated with the
first of them and freed with the last.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.errors import SwitchError, TrainingError
from nbkit.planner.exchange import ExchangePlan
from nbkit.planner.exchange_rounds import RankRound, Round, rounds, steps
from nbkit.rank.comm.agree import any_rank
from nbkit.tensor_layout import Layout

State = Mapping[str, tuple[Tensor, Layout]]
"""The shards that a rank holds: key -> (its part, the layout of this part in the whole tensor)."""

ROUND_BYTES = 24 << 20
"""Bytes that a rank sends, and receives, in a round at most, if the caller of Exchange gives no other limit.

The two buffers together take less than 64 MB. A switch gives a larger limit if memory is free: see
estimate/free_memory.py.
"""


def plan_collectively(state: State, wanted: Mapping[str, Layout]) -> ExchangePlan:
    """Return the plan from what every rank holds to what it wants. All ranks must call it: it all-gathers the layouts.

    If the layouts of all ranks are known, `ExchangePlan.of` needs no message. Raises TrainingError like
    `ExchangePlan.of`, and if ranks hold a tensor in different dtypes.
    """
    # Use one object for equal layouts, so that it is pickled once and compared by identity on arrival.
    known: dict[Layout, Layout] = {}
    old = {key: known.setdefault(layout, layout) for key, (_, layout) in state.items()}
    new = {key: known.setdefault(layout, layout) for key, layout in wanted.items()}
    kinds = {key: (str(tensor.dtype), tensor.element_size()) for key, (tensor, _) in state.items()}
    packed: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(packed, zlib.compress(pickle.dumps((old, new, kinds))))
    every: list[Any] = [pickle.loads(zlib.decompress(each)) for each in packed]
    first: dict[str, tuple[str, int]] = {}
    for rank, (_, _, theirs) in enumerate(every):
        for key, kind in theirs.items():
            if first.setdefault(key, kind) != kind:
                raise TrainingError(
                    f"Ranks hold {key!r} in different dtypes.",
                    numbers=f"{first[key][0]}, on rank {rank} {kind[0]}",
                    hint="the same precision on every rank",
                )
    # A tensor that no rank holds has no size. The plan reports it as missing.
    held, needed = [theirs for theirs, _, _ in every], [theirs for _, theirs, _ in every]
    sizes = {key: 1 for theirs in needed for key in theirs} | {key: size for key, (_, size) in first.items()}
    return ExchangePlan.of(held, needed, sizes)


class Exchange:
    """The execution of a plan on one rank: prepared while the old strategy trains, then run.

    limit: maximum number of bytes that a rank sends, and receives, in a round. buffer_bytes: memory that a run takes
    besides both shards. stamp: a number that is equal on ranks with the same plan. It can be run again on tensors of
    the same layouts. Raises TrainingError if the plan would leave an element of this rank's new tensors unfilled.
    """

    def __init__(self, plan: ExchangePlan, rank: int, *, limit: int = ROUND_BYTES) -> None:
        self.plan, self.rank, self.limit = plan, rank, limit
        self.rounds = rounds(plan, limit=limit)
        self._steps = steps(plan, self.rounds, rank)
        self._room = room_of(self._steps)
        self.buffer_bytes = sum(self._room)
        self.stamp = _stamp(plan, self.rounds)
        self._ready: tuple[Tensor, Tensor] | None = None

    def make_room(self, source: State, target: State, *, device: torch.device) -> None:
        """Check the tensors and allocate the buffers in advance: steps of `run` that may fail on one rank alone."""
        check(self.plan, source, self.plan.old[self.rank], "old")
        check(self.plan, target, self.plan.new[self.rank], "new")
        self._ready = buffers_of(self._room, device)

    def give_back(self) -> None:
        """Free the buffers of `make_room` if no `run` follows."""
        self._ready = None

    @torch.no_grad()
    def run(
        self, source: State, target: State, *, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        """Fill the tensors of `target` from the `source` tensors of all ranks, which do not change. All ranks must call
        it.

        device: device of the buffers; the process group must be able to send from it. group: group of all ranks; None
        for torch's default group. Raises TrainingError, before anything is sent, if this rank's tensors do not match
        the plan.
        """
        if self._ready is None:
            self.make_room(source, target, device=device)
        buffers, self._ready = self._ready, None
        assert buffers is not None
        old = {key: tensor for key, (tensor, _) in source.items()}
        new = {key: tensor for key, (tensor, _) in target.items()}
        for step in self._steps:
            carry_out(step, old, new, buffers, group)


def _stamp(plan: ExchangePlan, made: Sequence[Round]) -> int:
    """Return a hash of the values that must be equal on all ranks. Otherwise ranks would wait for messages that are
    never sent."""
    return zlib.crc32(repr((plan.bytes, plan.sent, [each.num_bytes for each in made])).encode())


def room_of(made: Sequence[RankRound]) -> tuple[int, int]:
    """Return the sizes in bytes of the two buffers (sent, received), as needed by the largest of these rounds."""
    return (
        max((sum(step.sent) for step in made), default=0),
        max((sum(step.received) for step in made), default=0),
    )


def buffers_of(room: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate the two buffers (sent, received)."""
    sent, received = (torch.empty(size, dtype=torch.uint8, device=device) for size in room)
    return sent, received


def check(plan: ExchangePlan, state: State, planned: Mapping[str, Layout], which: str) -> None:
    """Raise TrainingError if `state` does not match the plan."""
    for key, layout in planned.items():
        tensor, actual = state[key] if key in state else (None, None)
        sound = tensor is not None and tuple(tensor.shape) == layout.local and actual == layout
        if not sound or tensor.element_size() != plan.itemsize[key]:  # type: ignore[union-attr]
            raise TrainingError(
                f"{key!r} of the {which} shards is not what the plan was made for.",
                numbers=f"planned: {layout.local}, {plan.itemsize[key]} bytes an element; "
                + ("not there" if tensor is None else f"there: {tuple(tensor.shape)} {tensor.dtype}"),
                hint="make the plan anew",
            )


@torch.no_grad()
def carry_out(
    step: RankRound,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    buffers: tuple[Tensor, Tensor],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Run one round, from the tensors of `old` to those of `new`. A collective if the round sends anything."""
    for copy in step.copies:
        for key in copy.keys:
            if old[key] is not new[key]:
                for place in copy.places:
                    new[key][place.here.slices].copy_(old[key][place.there.slices])
    if step.is_local:
        return
    outgoing, incoming = buffers[0][: sum(step.sent)], buffers[1][: sum(step.received)]
    at = 0
    for piece in (piece for pieces in step.sends for piece in pieces):
        source = new if piece.relayed else old
        for key in piece.keys:
            at = _pack(outgoing, at, source[key][piece.places[0].here.slices])
    dist.all_to_all_single(incoming, outgoing, step.received, step.sent, group=group)
    at = 0
    for piece in (piece for pieces in step.receives for piece in pieces):
        for key in piece.keys:
            box, at = _unpack(incoming, at, piece.shape, new[key].dtype)
            for place in piece.places:
                new[key][place.here.slices].copy_(box[place.there.slices])


def _pack(flat: Tensor, at: int, piece: Tensor) -> int:
    stop = at + piece.numel() * piece.element_size()
    if at % piece.element_size() == 0:
        flat[at:stop].view(piece.dtype).view(piece.shape).copy_(piece)
    else:  # unaligned, after a tensor of smaller elements
        flat[at:stop].copy_(piece.contiguous().reshape(-1).view(torch.uint8))
    return stop


def _unpack(flat: Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, int]:
    stop = at + torch.Size(shape).numel() * dtype.itemsize
    raw = flat[at:stop]
    return (raw if at % dtype.itemsize == 0 else raw.clone()).view(dtype).view(shape), stop


Spaces = dict[int, tuple[torch.UntypedStorage, int]]
"""Address of a storage, which stays the same when its bytes are freed -> (the storage, its bytes when allocated)."""

_spaces: ContextVar[Spaces | None] = ContextVar("spaces", default=None)


@contextmanager
def hollow() -> Iterator[Spaces]:
    """Build a sharded model without memory inside this context. Yield the storages that `TargetStorage` allocates.

    Code that allocates a tensor of a sharded model passes it to `emptied` after its views are created. Such a tensor
    must not be read before it is allocated: torch would read from an invalid address.
    """
    spaces: Spaces = {}
    token = _spaces.set(spaces)
    try:
        yield spaces
    finally:
        _spaces.reset(token)


def emptied(tensor: Tensor) -> Tensor:
    """Return `tensor`. Inside `hollow`, free its memory first."""
    if (spaces := _spaces.get()) is not None:
        storage = tensor.untyped_storage()
        spaces[storage._cdata] = storage, storage.nbytes()
        storage.resize_(0)
    return tensor


class TargetStorage:
    """The sharded model that receives memory.

    state: its tensors to fill, hollow or not. spaces: the storages that `hollow` yielded.
    """

    def __init__(self, state: State, spaces: Spaces) -> None:
        self.state, self._spaces = state, spaces
        self._keys: dict[int, set[str]] = {}

    def take(self, key: str) -> None:
        """Allocate memory for the tensor of `key`. Errors of the allocator are raised."""
        tensor = self.state[key][0]
        if (address := _address(tensor)) not in self._spaces:
            return
        if not (keys := self._keys.setdefault(address, set())):
            storage, num_bytes = self._spaces[address]
            storage.resize_(num_bytes)
            # A flat tensor has padding between its tensors, which is sent too.
            tensor.new_empty(0, dtype=torch.uint8).set_(storage).zero_()
        keys.add(key)

    def let_go(self, key: str) -> None:
        """Release the tensor of `key`. Its memory is freed when all keys that share it are released."""
        address = _address(self.state[key][0])
        if keys := self._keys.get(address):
            keys.discard(key)
            if not keys:
                self._spaces[address][0].resize_(0)


class SourceStorage:
    """The sharded model that frees memory, and can allocate it again.

    state: its tensors to move. tensors: all other tensors over the same memory. To free memory, each of these tensors
    is set to an expanded zero of its shape. Memory that nothing else refers to is then free. Other views of it still
    read the old values.
    """

    def __init__(self, state: State, tensors: Iterable[Tensor]) -> None:
        self.state = state
        every = {id(tensor): tensor for tensor in (*(tensor for tensor, _ in state.values()), *tensors)}
        self._blocks: dict[int, _Block] = {}
        for tensor in every.values():
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self._blocks.setdefault(storage._cdata, _Block(storage.nbytes())).add(tensor)
        self._home = {
            key: block
            for key, (tensor, _) in state.items()
            if (block := self._blocks.get(_address(tensor))) is not None
        }
        for key, block in self._home.items():
            block.keys.add(key)

    def take(self, key: str) -> None:
        """Allocate memory for the tensor of `key`. Errors of the allocator are raised."""
        if (block := self._home.get(key)) is not None:
            if not block.keys:
                block.fill()
            block.keys.add(key)

    def let_go(self, key: str) -> None:
        """Release the tensor of `key`. Its memory is freed when all keys that share it are released."""
        if (block := self._home.get(key)) is not None:
            block.keys.discard(key)
            if not block.keys:
                block.empty()


class _Block:
    """A storage, the tensors that are views of it, and the keys of the tensors in it that are not released."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.keys = num_bytes, set[str]()
        self._shown: list[tuple[Tensor, int, torch.Size, tuple[int, ...]]] = []

    def add(self, tensor: Tensor) -> None:
        self._shown.append((tensor, int(tensor.storage_offset()), tensor.shape, tensor.stride()))

    def empty(self) -> None:
        device = self._shown[0][0].device
        for tensor, _, shape, _ in self._shown:
            tensor.data = torch.zeros((), dtype=tensor.dtype, device=device).expand(shape)

    def fill(self) -> None:
        first = self._shown[0][0]
        storage = torch.empty(self.num_bytes, dtype=torch.uint8, device=first.device).untyped_storage()
        for tensor, offset, shape, stride in self._shown:
            # A shared storage has padding, which is sent, so it is zeroed below. The rest is filled before it is read.
            tensor.data = tensor.detach().new_empty(0).set_(storage, offset, shape, stride)
        first.new_empty(0, dtype=torch.uint8).set_(storage).zero_()


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


IN_PLACE_BYTES = 8 << 20
"""Maximum bytes that a rank sends, receives and begins in a round. The tensors of the round need memory too."""


class TensorMemory(Protocol):
    """A sharded model whose tensors have memory, and may be read, only between `take` and `let_go` of their keys."""

    state: State

    def take(self, key: str) -> None:
        """Allocate memory for the tensor of `key`. If this raises, nothing was allocated."""

    def let_go(self, key: str) -> None:
        """Release the tensor of `key`. It is not read before the next `take`."""


class InPlace:
    """The execution of a plan in place on one rank. Raises TrainingError like Exchange.

    buffer_bytes: memory that a run takes besides tensors. stamp: as of Exchange.
    """

    def __init__(self, plan: ExchangePlan, rank: int, *, limit: int = IN_PLACE_BYTES) -> None:
        # Relays would run last, so old tensors could not be freed before.
        self.plan = plan = plan.without_relays()
        self.rank, self.limit = rank, limit
        self.rounds = rounds(plan, limit=limit, in_place=limit)
        self.stamp = _stamp(plan, self.rounds)
        self._steps = steps(plan, self.rounds, rank)
        self._room = room_of(self._steps)
        self.buffer_bytes = sum(self._room)

    def check(self, old: TensorMemory, new: TensorMemory) -> None:
        """Raise TrainingError if these shards do not match the plan."""
        check(self.plan, old.state, self.plan.old[self.rank], "old")
        check(self.plan, new.state, self.plan.new[self.rank], "new")

    def run(
        self, old: TensorMemory, new: TensorMemory, *, device: torch.device, freed: Callable[[], None] = lambda: None
    ) -> None:
        """Move every tensor from `old`, which has memory, to `new`, which has none. All ranks must call it.

        freed: called after tensors have been released, after each round and on the way back. If any rank cannot get
        memory, all ranks move their tensors back and raise SwitchError. Then the old shards have their old values, in
        other memory. Raises TrainingError if a rank has no memory for the way back either.
        """
        done: list[str] = []
        if (failure := self._lead(old, new, device, freed, done)) is None:
            return
        self._back(done, old, new, device, freed, failure)
        raise SwitchError(
            "A rank had too little memory for the new strategy. All ranks are back at the old one.",
            numbers=f"{failure}; {len(done)} of {len(self.plan.itemsize)} tensors had been moved",
            hint="%strategy shows what each strategy takes",
        )

    def run_back(
        self,
        old: TensorMemory,
        new: TensorMemory,
        *,
        device: torch.device,
        why: str,
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        """Move everything back after a successful `run`, because of `why`. All ranks must call it.

        Raises TrainingError if a rank has no memory for the way back. Then part of the state is lost on all ranks.
        """
        self._back([key for each in self.rounds for key in each.closes], old, new, device, freed, why)

    def _back(
        self,
        done: list[str],
        old: TensorMemory,
        new: TensorMemory,
        device: torch.device,
        freed: Callable[[], None],
        why: str,
    ) -> None:
        back = InPlace(self.plan.reversed(done), self.rank, limit=self.limit)
        if (again := back._lead(new, old, device, freed, [])) is not None:
            raise TrainingError(
                "The switch failed, and so did the way back: the state is incomplete.",
                numbers=f"{why}; then {again}",
                hint="trainer.load(path)",
            )
        freed()

    def _lead(
        self, old: TensorMemory, new: TensorMemory, device: torch.device, freed: Callable[[], None], done: list[str]
    ) -> str | None:
        """Run all rounds. Return None, or why a rank could not begin a round. done: receives the complete keys."""
        source = {key: tensor for key, (tensor, _) in old.state.items()}
        target = {key: tensor for key, (tensor, _) in new.state.items()}
        begun: list[str] = []
        buffers: tuple[Tensor, Tensor] | None = None
        for step in self._steps:
            why = ""
            try:
                buffers = buffers or buffers_of(self._room, device)
                for key in step.opens:
                    if key in target:
                        new.take(key)
                        begun.append(key)
            except Exception as error:  # with any error, the other ranks must not wait for this rank
                why = f"rank {self.rank}: {type(error).__name__}: {error}"
            if any_rank(bool(why), device=device):
                for key in set(begun).difference(done):
                    new.let_go(key)
                freed()
                return why or "another rank could not go on"
            assert buffers is not None
            carry_out(step, source, target, buffers)
            done += step.closes
            for key in step.closes:
                if key in source:
                    old.let_go(key)
            freed()
        return None
