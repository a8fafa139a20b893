"""What a death would take away, kept twice in host memory: by the rank itself and by its buddy.

After a step each rank copies its share beside the one before it, and sends it to its buddy, half the world away, which
is mostly another host. The transfer goes beside the next step's forward and backward passes: a rank waits for it before
it launches the reduction of that step's numbers, which then comes last. So whoever has the reduction's result knows
that every rank holds the newest backup, and the one before it may be written over: no collective is added, and nobody
asks. Two are held at any time, so that a rank that dies in a transfer takes back to a boundary that is whole
everywhere. On the wire: the share, once, and about a hundred bytes.

Which rank backs up which part of the state: every element once, by a rank that holds it.

What the optimizer updates is what is shared out, as the layouts of a strategy say; a weight and all that the optimizer
keeps of it go together. On CPU ranks nothing where every rank holds everything: each is a backup of all others. On GPUs
they are none: when a rank dies, the hosts of the others have mostly enqueued the update behind the reduction that is
then broken off, and the weights of all of them are torn.

A rank's share of the state at one step, in one flat piece of host memory, as it is kept and as it travels.
"""

from __future__ import annotations

import math
import pickle
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.planner.exchange import held, uncovered, within
from nbkit.rank.comm.agree import largest
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.shard_layouts import RankLayouts
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.torch_private import foreach_copy_
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.rank.train.estimate.free_memory import left
from nbkit.rank.train.switch.consensus import memory_of
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Box, Layout

Shares = Mapping[str, tuple[Box, ...]]
"""name of a parameter, or "buffer/NAME" -> boxes of the global tensor."""


def shares_of(rank_layouts: RankLayouts, rank: int, *, all_may_tear: bool = False) -> Shares | None:
    """Return what `rank` backs up, by the same rule on every rank, without a message; None where no rank backs up
    anything.

    all_may_tear: one error may leave no rank with whole weights, as it may on GPUs.
    """
    spread = [
        {**of_params, **{f"buffer/{name}": layout for name, layout in of_buffers.items()}}
        for of_params, of_buffers in zip(rank_layouts.held, rank_layouts.buffers, strict=True)
    ]
    alike = all(one.keys() == spread[0].keys() and all(each.is_whole for each in one.values()) for one in spread)
    if alike and not all_may_tear:
        return None
    load = [0] * len(spread)
    mine: dict[str, list[Box]] = {}
    for name in sorted({name for one in spread for name in one}):
        for box, ranks in _cells([one.get(name) for one in spread]):
            writer = min(ranks, key=lambda rank: (load[rank], rank))
            load[writer] += box.numel
            if writer == rank:
                mine.setdefault(name, []).append(box)
    return {name: tuple(boxes) for name, boxes in mine.items()}


def _cells(spread: Sequence[Layout | None]) -> list[tuple[Box, list[int]]]:
    """Boxes that do not overlap and cover all that is held: (box, ranks that hold it)."""
    holders: dict[Box, list[int]] = {}
    for rank, layout in enumerate(spread):
        for box in held(layout):
            holders.setdefault(box, []).append(rank)
    found: list[tuple[Box, list[int]]] = []
    for box, ranks in holders.items():
        found += [(rest, ranks) for rest in uncovered((box,), [taken for taken, _ in found])]
    return found


def beside(shape: tuple[int, ...], boxes: Sequence[Box]) -> Layout:
    """A layout of one tensor that holds `boxes` of a global one of `shape`, one behind the other along dim 0."""
    if not shape:
        return Layout.whole(())
    pieces, at = [], 0
    for box in boxes:
        pieces.append((Box((at, *[0] * (len(shape) - 1)), box.shape), box))
        at += box.shape[0]
    return Layout(shape, (at, *(max(box.shape[d] for box in boxes) for d in range(1, len(shape)))), tuple(pieces))


_ALIGN = 16


@dataclass(frozen=True)
class Contents:
    """What lies in a snapshot, in this order: key -> dtype and layout."""

    kinds: Mapping[str, torch.dtype]
    layouts: Mapping[str, Layout]

    @classmethod
    def of(cls, state: JobState, shares: Shares) -> Contents:
        """Return what `shares` name of `state`."""
        named = {key: key if key.startswith("buffer/") else key.partition("/")[2] for key in state}
        return cls.by_key(state, {key: shares[name] for key, name in named.items() if name in shares})

    @classmethod
    def by_key(cls, state: JobState, boxes: Mapping[str, Sequence[Box]]) -> Contents:
        """These boxes of `state`."""
        kinds, layouts = dict[str, torch.dtype](), dict[str, Layout]()
        known: dict[Layout, Layout] = {}
        for key, (tensor, layout) in state.items():
            if wanted := boxes.get(key):
                made = beside(layout.shape, wanted)
                kinds[key], layouts[key] = tensor.dtype, known.setdefault(made, made)
        return cls(kinds, layouts)

    @property
    def num_bytes(self) -> int:
        """Of the flat piece; it is never empty, since it is sent."""
        return _ALIGN + sum(_room(self.layouts[key], kind) for key, kind in self.kinds.items())

    def views(self, flat: Tensor) -> JobState:
        """The tensors that lie in `flat`."""
        found, at = {}, 0
        for key, kind in self.kinds.items():
            layout = self.layouts[key]
            part = flat[at : at + layout.numel * kind.itemsize].view(kind).view(layout.local)
            found[key] = part, layout
            at += _room(layout, kind)
        return found


def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Of the host, for what is copied out of `device`."""
    if accelerator().holds(device):
        return accelerator().pinned((num_bytes,), torch.uint8)
    return torch.empty(num_bytes, dtype=torch.uint8)


def _room(layout: Layout, kind: torch.dtype) -> int:
    return -(-layout.numel * kind.itemsize // _ALIGN) * _ALIGN


@torch.no_grad()
def copy_into(target: JobState, state: JobState) -> None:
    """Fill `target`, views of a snapshot, from what this rank holds."""
    on_device: tuple[list[Tensor], list[Tensor]] = [], []
    on_host: tuple[list[Tensor], list[Tensor]] = [], []
    for key, (tensor, layout) in target.items():
        whole, held = state[key]
        into, out_of = on_device if accelerator().holds(whole) else on_host
        for here, there in layout.pieces:
            into.append(tensor[here.slices])
            out_of.append(whole[_place(held, there)])
    if on_host[0]:
        foreach_copy_(*on_host)
    if on_device[0]:
        # As a foreach from a device to the host, each would be waited for.
        accelerator().fetch_into(*on_device)


def _place(layout: Layout, box: Box) -> tuple[slice, ...]:
    """Return where `box` of the global tensor lies in the local one."""
    return next(box.moved(there.start, here.start).slices for here, there in layout.pieces if within(box, there))


_GENERATIONS = 2
_FIRST, _MEASURED = 2, 3
"""Backups that are passed over, and those by which it is known what one costs."""
_SHARE_OF_A_STEP = 0.05
_SHARE_OF_FREE = 0.5  # of a host's memory, what backups may take where nobody has asked for them
_HEAD, _ABOUT, _STATE = 1, 2, 3  # tags of the three messages


@dataclass
class BackupGeneration:
    """A share as it was after `step` steps. about: what the optimizer remembers beside elements, pickled (see
    OptimizerMemory).

    point: where its own rank stood; None of another's.
    """

    step: int
    contents: Contents
    about: bytes
    flat: Tensor
    point: Any = None

    def state(self) -> JobState:
        """Its tensors."""
        return self.contents.views(self.flat)


def buddy_of(rank: int, world_size: int) -> int:
    """Return who keeps the backups of `rank`."""
    return (rank + world_size // 2) % world_size


class Backups:
    """Of one job on this rank, and of the rank whose buddy it is. Off before `begin`.

    asked, every: steps from one backup to the next; None while it is not known what one costs under this strategy.
    """

    def __init__(self, *, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.buddy, self.ward = buddy_of(rank, world_size), (rank - world_size // 2) % world_size
        self.own: list[BackupGeneration] = []
        self.wards: list[BackupGeneration] = []
        self.asked: int | None = 0
        self.every: int | None = 0
        self.sent_bytes, self._seconds = 0, 0.0
        self._group: dist.ProcessGroup | None = None
        self._shares: tuple[Strategy, Shares | None] | None = None
        self._seen: tuple[dict[str, tuple[torch.dtype, Layout]], Contents] | None = None
        self._sending: tuple[Tensor, ...] = ()
        self._of_ward: Contents | None = None
        self._told: Contents | None = None
        self._under_way: tuple[list[dist.Work | None], BackupGeneration] | None = None
        self._left_under_way: tuple[Any, ...] = ()
        self._costs: list[float] = []
        self._say: Callable[[str], None] | None = None

    @property
    def on(self) -> bool:
        """Return True if there are backups now and then."""
        return self.every != 0 and self.world_size > 1

    def begin(self, every: int | None, say: Callable[[str], None] | None = None) -> None:
        """Make backups from now on, every so many steps; 0: none; None: as many as cost below 5 % of a step.

        Whatever was kept before is another training's. say: told what one costs, when that is known. Collective.
        """
        # Where another `fit` has ended on some ranks by an error, what is under way on the others may stay so for ever.
        if (every != 0 or self.on) and largest([self._under_way is None], device=self.device)[0]:
            self.abandon()
        self._left_under_way = ()  # all ranks are here: nobody receives any more
        self.break_off()
        if every != self.asked or self.every == 0:
            self.asked = self.every = every
            self._shares = None
        self._say = say
        self._keep(-1)

    def form_again(self, asked: int | None, step: int) -> None:
        """Go on after ranks were replaced: over another group, and the cost is measured anew.

        step: all ranks are back at it, and what was kept of it and before it is of use.
        """
        self.wait()  # for one of this boundary: what is let go of before it has gone, its buddy awaits for ever
        self._group, self._shares, self.asked, self.every = None, None, asked, asked
        self._keep(step)

    def back_to(self, step: int) -> None:
        """The steps after `step` have not been made."""
        self.wait()
        self._keep(step)

    def _keep(self, step: int) -> None:
        self.own = [each for each in self.own if each.step <= step]
        self.wards = [each for each in self.wards if each.step <= step]
        self._under_way, self._told, self._costs = None, None, []

    @property
    def under_way(self) -> bool:
        """Return True if the newest backup travels, as far as this rank knows: the same on every rank of a training."""
        return self._under_way is not None

    def due(self, step: int) -> bool:
        """Return True if there is one after `step` steps. The first is, and all until it is known what one costs."""
        return self.on and (not self.own or step % (self.every or 1) == 0)

    def spent(self) -> float:
        """Return seconds that the newest backup took of this rank's step, once."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def measured(self, backup_s: float, step_s: float) -> None:
        """The slowest rank's seconds for a backup, and for the step that it was in: the same on every rank."""
        if self.every is not None or not backup_s or not self._shares or self._shares[1] is None:
            return
        self._costs.append(backup_s / max(step_s - backup_s, 1e-9))
        if len(self._costs) > _FIRST + _MEASURED:
            cost = statistics.median(self._costs[_FIRST:])
            self.every = max(1, math.ceil(cost / _SHARE_OF_A_STEP))
            if self._say is not None:
                each = "each step" if self.every == 1 else f"every {self.every} steps"
                self._say(
                    f"backup of {each} with rank {self.buddy} and so on: {self.sent_bytes / 1e6:.3g} MB a rank, "
                    f"{100 * cost / self.every:.2g} % of a step"
                )

    def take(
        self,
        sharded_model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        layouts: RankLayouts,
        names: Sequence[str],
        step: int,
        point: Any,
    ) -> None:
        """Copy this rank's share, and begin to send it. Collective: all ranks stand at this step's boundary."""
        began, strategy = time.perf_counter(), sharded_model.strategy
        self.wait()
        # Steps are made again after a load, and after a death.
        self.own = [each for each in self.own if each.step < step]
        self.wards = [each for each in self.wards if each.step < step]
        if first := self._shares is None or self._shares[0] != strategy:
            shares = shares_of(layouts, self.rank, all_may_tear=accelerator().holds(self.device))
            self._shares, self._seen = (strategy, shares), None
            self.every, self._costs = self.asked, []
        if (shares := self._shares[1]) is None:
            self.own.clear()
            return
        if self._group is None:
            # Of gloo, wherever the state is: it goes from host memory to host memory.
            self._group = dist.new_group(backend="gloo", group_desc="backup")
        state = job_state.state(sharded_model, optimizer)
        contents = self._contents(state, shares)
        if first and self.asked is None and self._crowded(2 * _GENERATIONS * contents.num_bytes):
            self.every = 0
            self._keep(-1)
            return
        flat = self._room(self.own, contents.num_bytes)
        copy_into(contents.views(flat), state)
        about = pickle.dumps(memory_of(sharded_model, optimizer, names))
        self.own.append(BackupGeneration(step, contents, about, flat, point))
        self._send(self.own[-1])
        self._seconds += time.perf_counter() - began

    def _crowded(self, num_bytes: int) -> bool:
        """Return True if backups of `num_bytes` on each rank are too much for a host, which is said. Collective."""
        free = left(torch.device("cpu"))
        lacks = free is not None and num_bytes > _SHARE_OF_FREE * free
        (most,) = largest([num_bytes if lacks else 0], device=self.device)
        if most and self._say is not None:
            self._say(
                f"no backups: they would take {most / 1e9:.3g} GB of a host's memory for each rank; a rank that dies "
                "is replaced from the last checkpoint (backup_every=10: back up all the same)"
            )
        return most > 0

    def wait(self) -> None:
        """Until this rank's newest backup has arrived, and it has its ward's."""
        if self._under_way is None:
            return
        began = time.perf_counter()
        (works, generation), self._under_way = self._under_way, None
        for work in works:
            if work is not None:  # of another group's rank, as torch has it
                work.wait()
        self.wards.append(generation)
        self._seconds += time.perf_counter() - began

    def break_off(self) -> None:
        """A rank has died: what has arrived counts, what has not is dropped."""
        with suppress(Exception):
            self.wait()

    def abandon(self) -> None:
        """The training has ended within a step: what is under way on some ranks may never be on others."""
        # A buddy may just be receiving it: what is let go of before it has gone, it awaits for ever.
        self._left_under_way = (*self._left_under_way, self._under_way, self._sending)
        self._under_way, self._group = None, None

    def _contents(self, state: JobState, shares: Shares) -> Contents:
        seen = {key: (tensor.dtype, layout) for key, (tensor, layout) in state.items()}
        if self._seen is None or self._seen[0] != seen:
            self._seen = seen, Contents.of(state, shares)
        return self._seen[1]

    def _room(self, kept: list[BackupGeneration], num_bytes: int) -> Tensor:
        """The memory of the oldest generation, which goes."""
        old = kept.pop(0).flat if len(kept) >= _GENERATIONS else None
        if old is not None and old.numel() == num_bytes:
            return old
        return host_memory(num_bytes, self.device)

    def _send(self, own: BackupGeneration) -> None:
        """To the buddy, and from the ward. What is of unknown size goes first, and is waited for."""
        group, contents = self._group, None if own.contents is self._told else own.contents
        packed = torch.frombuffer(bytearray(pickle.dumps((contents, own.about))), dtype=torch.uint8)
        self._told = own.contents
        head = torch.tensor([packed.numel(), own.flat.numel()])
        sizes = torch.empty_like(head)
        works: list[dist.Work | None] = [
            dist.isend(head, self.buddy, group=group, tag=_HEAD),
            dist.isend(packed, self.buddy, group=group, tag=_ABOUT),
            dist.isend(own.flat, self.buddy, group=group, tag=_STATE),
        ]
        dist.recv(sizes, self.ward, group=group, tag=_HEAD)
        num_about, num_bytes = sizes.tolist()
        about = torch.empty(num_about, dtype=torch.uint8)
        dist.recv(about, self.ward, group=group, tag=_ABOUT)
        contents, numbers = pickle.loads(about.numpy().tobytes())
        self._of_ward = contents or self._of_ward
        assert self._of_ward is not None
        flat = self._room(self.wards, num_bytes)
        works.append(dist.irecv(flat, self.ward, group=group, tag=_STATE))
        self._under_way = works, BackupGeneration(own.step, self._of_ward, numbers, flat)
        self._sending = head, packed  # whose memory lives as long as the works do
        self.sent_bytes = own.flat.numel()
