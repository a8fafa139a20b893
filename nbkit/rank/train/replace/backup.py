"""Back up the state that the death of a rank would destroy, in host memory on that rank and on its buddy rank.

After a step each rank copies its share of the state to host memory, and sends it to its buddy. The buddy's rank differs
by half of the world size, so it is mostly on another host. The transfer runs during the next step's forward and
backward passes. A rank waits for the transfer before it launches the reduction of that step's results, which comes
last. So a rank with the result of the reduction knows that every rank has the newest backup, and that the older one may
be overwritten. This needs no additional collective. There are always two backups: if a rank dies during a transfer, the
training goes back to the newest backup that is complete on all ranks. Each backup sends the share once, and about a
hundred bytes more.

Every element is backed up once, by a rank that holds it. The layouts of a strategy say what the optimizer updates, and
this is divided among the ranks. A weight and its optimizer state belong to the same share. CPU ranks that all hold
everything need no backups, because each is a backup of all others. GPU ranks do need them. When a rank dies, the other
hosts have often already enqueued the update behind a reduction that is then aborted, and so all weights are wrong.

A share is one flat tensor in host memory, both when it is kept and when it is sent.
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

from nbkit.figures import size
from nbkit.planner.exchange import held, uncovered, within
from nbkit.rank.comm.agree import largest
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.plan import RankLayouts
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.torch_private import foreach_copy_
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.rank.train.estimate.free_memory import left
from nbkit.rank.train.switch.consensus import memory_of
from nbkit.records.readings import BACKUP
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Box, Layout

Shares = Mapping[str, tuple[Box, ...]]
"""name of a parameter, "buffer/NAME", or "state/NAME" of a tensor with an owner -> boxes of the global tensor."""


def shares_of(rank_layouts: RankLayouts, rank: int, *, all_may_tear: bool = False) -> Shares | None:
    """Return the share that `rank` backs up; None if no rank needs backups.

    The ranks compute the same result without messages. all_may_tear: one error may corrupt the weights of all ranks, as
    on GPUs.
    """
    spread = [
        {
            **summed,
            **{f"state/{name}": layout for name, layout in held.items() if summed[name] != layout},
            **{f"buffer/{name}": layout for name, layout in of_buffers.items()},
        }
        for summed, held, of_buffers in zip(rank_layouts.summed, rank_layouts.held, rank_layouts.buffers, strict=True)
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
    """Return (box, ranks that hold it) for disjoint boxes that cover the tensor."""
    holders: dict[Box, list[int]] = {}
    for rank, layout in enumerate(spread):
        for box in held(layout):
            holders.setdefault(box, []).append(rank)
    found: list[tuple[Box, list[int]]] = []
    for box, ranks in holders.items():
        found += [(rest, ranks) for rest in uncovered((box,), [taken for taken, _ in found])]
    return found


def beside(shape: tuple[int, ...], boxes: Sequence[Box]) -> Layout:
    """Return a layout that holds `boxes` of a global tensor of `shape`, concatenated along dim 0."""
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
    """A description of the tensors in one flat tensor, in this order. kinds: key -> dtype. layouts: key -> layout."""

    kinds: Mapping[str, torch.dtype]
    layouts: Mapping[str, Layout]

    @classmethod
    def of(cls, state: JobState, shares: Shares) -> Contents:
        """Return the contents for the boxes of `state` that are in `shares`."""
        named = {key: key if key.startswith("buffer/") else key.partition("/")[2] for key in state}
        # If a tensor has an owner, its optimizer state is on the owner, and its weight on the ranks with its parts.
        owned = {key: f"state/{name}" for key, name in named.items() if not key.startswith(("buffer/", "weight/"))}
        named |= {key: name for key, name in owned.items() if name in shares}
        return cls.by_key(state, {key: shares[name] for key, name in named.items() if name in shares})

    @classmethod
    def by_key(cls, state: JobState, boxes: Mapping[str, Sequence[Box]]) -> Contents:
        """Return the contents for these boxes of `state`."""
        kinds, layouts = dict[str, torch.dtype](), dict[str, Layout]()
        known: dict[Layout, Layout] = {}
        for key, (tensor, layout) in state.items():
            if wanted := boxes.get(key):
                made = beside(layout.shape, wanted)
                kinds[key], layouts[key] = tensor.dtype, known.setdefault(made, made)
        return cls(kinds, layouts)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the flat tensor. It is never empty, because an empty tensor cannot be sent."""
        return _ALIGN + sum(_room(self.layouts[key], kind) for key, kind in self.kinds.items())

    def views(self, flat: Tensor) -> JobState:
        """Return the tensors in `flat`, as views: key -> (tensor, layout)."""
        found, at = {}, 0
        for key, kind in self.kinds.items():
            layout = self.layouts[key]
            part = flat[at : at + layout.numel * kind.itemsize].view(kind).view(layout.local)
            found[key] = part, layout
            at += _room(layout, kind)
        return found


def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Return a uint8 tensor in host memory for copies from `device`. It is pinned if `device` is a GPU."""
    if accelerator().holds(device):
        return accelerator().pinned((num_bytes,), torch.uint8)
    return torch.empty(num_bytes, dtype=torch.uint8)


def _room(layout: Layout, kind: torch.dtype) -> int:
    return -(-layout.numel * kind.itemsize // _ALIGN) * _ALIGN


@torch.no_grad()
def copy_into(target: JobState, state: JobState) -> None:
    """Fill `target`, the views of a flat tensor, with the same elements of `state`, this rank's tensors."""
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
        # A foreach copy from a device to the host would wait for each tensor.
        accelerator().fetch_into(*on_device)


def _place(layout: Layout, box: Box) -> tuple[slice, ...]:
    """Return the slices of `box`, a box of the global tensor, in the local tensor."""
    return next(box.moved(there.start, here.start).slices for here, there in layout.pieces if within(box, there))


_GENERATIONS = 2
_FIRST, _MEASURED = 2, 3
"""Number of first backups that are ignored, and number of following backups that measure the cost."""
_SHARE_OF_A_STEP = 0.05
_SHARE_OF_FREE = 0.5  # fraction of a host's free memory for backups that the user did not ask for
_HEAD, _ABOUT, _STATE = 1, 2, 3  # tags of the three messages


@dataclass
class BackupGeneration:
    """A share of the state after `step` steps.

    about: the optimizer state that is not per element, pickled (see OptimizerMemory). point: the settings and progress
    of the training on this rank; None for a backup of another rank.
    """

    step: int
    contents: Contents
    about: bytes
    flat: Tensor
    point: Any = None

    def state(self) -> JobState:
        """Return the tensors of the backup, as views."""
        return self.contents.views(self.flat)


def buddy_of(rank: int, world_size: int) -> int:
    """Return the rank that keeps the backups of `rank`."""
    return (rank + world_size // 2) % world_size


class Backups:
    """The backups of a job on this rank: its own, and those of its ward, the rank that it is the buddy of.

    Backups are off before `begin`. asked, every: the number of steps between backups, as the user asked and in force.
    None: choose by the cost, which is not known yet under this strategy.
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
        """Return True if backups are made."""
        return self.every != 0 and self.world_size > 1

    def begin(self, every: int | None, say: Callable[[str], None] | None = None) -> None:
        """Make backups from now on, every `every` steps. Drop backups of an earlier training. Collective.

        every: 0 makes no backups; None makes as many as take at most 5 % of the time. say: called with the cost of a
        backup when it is known.
        """
        # If an error ended another `fit` on some ranks, transfers of the other ranks may never complete.
        if (every != 0 or self.on) and largest([self._under_way is None], device=self.device)[0]:
            self.abandon()
        self._left_under_way = ()  # all ranks are here, so no rank is still receiving
        self.break_off()
        if every != self.asked or self.every == 0:
            self.asked = self.every = every
            self._shares = None
        self._say = say
        self._keep(-1)

    def form_again(self, asked: int | None, step: int) -> None:
        """Continue after ranks were replaced, with a new group. The cost is measured again.

        step: the step to which all ranks went back. Later backups are dropped.
        """
        self.wait()  # the buddy would wait for ever for a backup that is dropped before it was sent
        self._group, self._shares, self.asked, self.every = None, None, asked, asked
        self._keep(step)

    def back_to(self, step: int) -> None:
        """Drop the backups after `step`, because the training went back to it."""
        self.wait()
        self._keep(step)

    def _keep(self, step: int) -> None:
        self.own = [each for each in self.own if each.step <= step]
        self.wards = [each for each in self.wards if each.step <= step]
        self._under_way, self._told, self._costs = None, None, []

    @property
    def under_way(self) -> bool:
        """Return True if this rank has not waited for the newest backup yet. The result is equal on all ranks."""
        return self._under_way is not None

    def due(self, step: int) -> bool:
        """Return True if a backup is due after `step` steps. Until the cost is known, one is due after each step."""
        return self.on and (not self.own or step % (self.every or 1) == 0)

    def spent(self) -> float:
        """Return the seconds of this rank's step that backups have taken since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def measured(self, backup_s: float, step_s: float) -> None:
        """Note the slowest rank's seconds for a backup and for the step around it, and choose `every` from them.

        Both must be equal on all ranks.
        """
        if self.every is not None or not backup_s or not self._shares or self._shares[1] is None:
            return
        self._costs.append(backup_s / max(step_s - backup_s, 1e-9))
        if len(self._costs) > _FIRST + _MEASURED:
            cost = statistics.median(self._costs[_FIRST:])
            self.every = max(1, math.ceil(cost / _SHARE_OF_A_STEP))
            if self._say is not None:
                each = "each step" if self.every == 1 else f"every {self.every} steps"
                self._say(
                    f"After {each}, each rank sends a backup of its state to another rank: {size(self.sent_bytes)} "
                    f"per rank, {100 * cost / self.every:.2g} % of the time of a step"
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
        """Copy this rank's share, and begin to send it. Collective, at the boundary after `step`."""
        began, strategy = time.perf_counter(), sharded_model.strategy
        self.wait()
        # After a load or a death, steps are repeated.
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
            # Always gloo: the backup goes from host memory to host memory.
            self._group = dist.new_group(backend="gloo", group_desc=BACKUP)
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
        """Return True, and tell the user, if a host has no room for backups of `num_bytes` per rank. Collective."""
        free = left(torch.device("cpu"))
        lacks = free is not None and num_bytes > _SHARE_OF_FREE * free
        (most,) = largest([num_bytes if lacks else 0], device=self.device)
        if most and self._say is not None:
            self._say(
                f"no backups: they would take {most / 1e9:.3g} GB of a host's memory for each rank; a rank that dies "
                "is replaced from the last checkpoint (recovery=nbkit.Recovery(backup_every=10) makes backups "
                "anyway)"
            )
        return most > 0

    def wait(self) -> None:
        """Wait until the buddy has this rank's newest backup, and this rank has its ward's."""
        if self._under_way is None:
            return
        began = time.perf_counter()
        (works, generation), self._under_way = self._under_way, None
        for work in works:
            if work is not None:  # torch returns None for a rank outside the group
                work.wait()
        self.wards.append(generation)
        self._seconds += time.perf_counter() - began

    def break_off(self) -> None:
        """Keep the backups that have arrived and drop the rest, after a rank has died."""
        with suppress(Exception):  # a transfer from a dead rank may raise anything
            self.wait()

    def abandon(self) -> None:
        """Abandon running transfers, after the training has ended within a step. Some ranks may never begin theirs."""
        # Keep the memory: otherwise a buddy that is receiving would wait for ever.
        self._left_under_way = (*self._left_under_way, self._under_way, self._sending)
        self._under_way, self._group = None, None

    def _contents(self, state: JobState, shares: Shares) -> Contents:
        seen = {key: (tensor.dtype, layout) for key, (tensor, layout) in state.items()}
        if self._seen is None or self._seen[0] != seen:
            self._seen = seen, Contents.of(state, shares)
        return self._seen[1]

    def _room(self, kept: list[BackupGeneration], num_bytes: int) -> Tensor:
        """Return memory for a new generation. Drop the oldest one, and reuse its memory if it has the right size."""
        old = kept.pop(0).flat if len(kept) >= _GENERATIONS else None
        if old is not None and old.numel() == num_bytes:
            return old
        return host_memory(num_bytes, self.device)

    def _send(self, own: BackupGeneration) -> None:
        """Begin to send a backup to the buddy and to receive the ward's. Wait only for sizes and description."""
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
        self._sending = head, packed  # keep their memory as long as the works live
        self.sent_bytes = own.flat.numel()
