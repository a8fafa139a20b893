"""The data movement of a switch: every rank gets the boxes that it lacks, in bounded rounds.

On the wire: per round that sends anything one all-to-all of the world, all rounds together exactly the bytes of the
plan. A plan that moves nothing sends no message. Old and new shards are there at the same time; where memory does not
hold both, see redistribute_in_place.py.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.planner.reshard.exchange import Plan
from nbkit.planner.reshard.rank_steps import Step, steps
from nbkit.planner.reshard.rounds import rounds
from nbkit.tensor_layout import Layout

State = Mapping[str, tuple[Tensor, Layout]]
"""The shards that a rank holds: key -> (its part, which part that is)."""

ROUND_BYTES = 24 << 20
"""A rank sends, and receives, at most this much in a round: the two flat buffers stay below 64 MB together."""


def plan_collectively(state: State, wanted: Mapping[str, Layout]) -> Plan:
    """The plan from what every rank holds to what it wants. Collective: one all-gather of the layouts, compressed.

    Where the layouts of all ranks are known, `Plan.of` needs no message. Raises TrainingError as `Plan.of` does, and
    when ranks hold a tensor in different dtypes.
    """
    # Equal layouts as one object: pickled once, and compared by identity where they arrive.
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
    # What nobody holds has no size; the plan names it as missing.
    held, needed = [theirs for theirs, _, _ in every], [theirs for _, theirs, _ in every]
    sizes = {key: 1 for theirs in needed for key in theirs} | {key: size for key, (_, size) in first.items()}
    return Plan.of(held, needed, sizes)


class Exchange:
    """A plan as this rank carries it out: prepared while the old strategy trains, then run.

    limit: bytes that a rank sends, and receives, in a round. buffer_bytes: what a run takes besides both shards.
    stamp: a number that ranks with the same plan have in common. May be run again, with tensors of the same layouts.
    Raises TrainingError when the plan would leave an element of this rank's new tensors unfilled.
    """

    def __init__(self, plan: Plan, rank: int, *, limit: int = ROUND_BYTES) -> None:
        self.plan, self.rank, self.limit = plan, rank, limit
        self.rounds = rounds(plan, limit=limit)
        self._steps = steps(plan, self.rounds, rank)
        self._room = room_of(self._steps)
        self.buffer_bytes = sum(self._room)
        # Of what all ranks must agree on, or they would wait for messages that nobody sends.
        self.stamp = zlib.crc32(repr((plan.bytes, plan.sent, [each.num_bytes for each in self.rounds])).encode())
        self._ready: tuple[Tensor, Tensor] | None = None

    def make_room(self, source: State, target: State, *, device: torch.device) -> None:
        """Do beforehand what may fail in `run` on one rank alone: look at the tensors, take the buffers."""
        check(self.plan, source, self.plan.old[self.rank], "old")
        check(self.plan, target, self.plan.new[self.rank], "new")
        self._ready = buffers_of(self._room, device)

    def give_back(self) -> None:
        """The room of `make_room`, when no `run` follows."""
        self._ready = None

    @torch.no_grad()
    def run(self, source: State, target: State, *, device: torch.device) -> None:
        """Fill the tensors of `target` from those of all ranks' `source`, which stay as they are. Collective.

        device: where the buffers are; the process group must be able to send from it. Raises TrainingError, before
        anything is sent, when this rank's tensors are not those of the plan.
        """
        if self._ready is None:
            self.make_room(source, target, device=device)
        buffers, self._ready = self._ready, None
        assert buffers is not None
        old = {key: tensor for key, (tensor, _) in source.items()}
        new = {key: tensor for key, (tensor, _) in target.items()}
        for step in self._steps:
            carry_out(step, old, new, buffers)


def room_of(made: Sequence[Step]) -> tuple[int, int]:
    """Bytes of the two buffers that the fullest of these rounds take: of what is sent, of what is received."""
    return (
        max((sum(step.sent) for step in made), default=0),
        max((sum(step.received) for step in made), default=0),
    )


def buffers_of(room: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The two buffers."""
    sent, received = (torch.empty(size, dtype=torch.uint8, device=device) for size in room)
    return sent, received


def check(plan: Plan, state: State, planned: Mapping[str, Layout], which: str) -> None:
    """Raises TrainingError when `state` is not what the plan was made for."""
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
def carry_out(step: Step, old: Mapping[str, Tensor], new: Mapping[str, Tensor], buffers: tuple[Tensor, Tensor]) -> None:
    """One round, from the tensors of `old` to those of `new`. Collective where it sends anything."""
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
    dist.all_to_all_single(incoming, outgoing, step.received, step.sent)
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
    else:  # behind a tensor of smaller elements
        flat[at:stop].copy_(piece.contiguous().reshape(-1).view(torch.uint8))
    return stop


def _unpack(flat: Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, int]:
    stop = at + torch.Size(shape).numel() * dtype.itemsize
    raw = flat[at:stop]
    return (raw if at % dtype.itemsize == 0 else raw.clone()).view(dtype).view(shape), stop
