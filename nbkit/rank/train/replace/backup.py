"""Keep two copies, in host memory, of what the death of a rank would take away: on that rank and on its buddy.

After a step each rank copies its share of the state to host memory, and sends it to its buddy. The buddy is half the
world away, mostly on another host. The transfer runs beside the next step's forward and backward passes. A rank waits
for it before it launches the reduction of that step's numbers, which then comes last. So a rank that has the result of
the reduction knows that every rank holds the newest backup, and that the older one may be overwritten. No collective is
added. Two backups are held at any time: if a rank dies during a transfer, the training goes back to a boundary that is
complete everywhere. On the wire: the share, once, and about a hundred bytes.

Every element is backed up once, by a rank that holds it. The layouts of a strategy say what the optimizer updates, and
that is shared out; a weight goes together with all that the optimizer keeps of it. CPU ranks that all hold everything
back up nothing, because each is a backup of all others. GPU ranks still do: when a rank dies, the hosts of the others
have mostly enqueued the update behind the reduction, which is then broken off, and all weights are torn.

A share at one step is one flat piece of host memory, both in a backup and on the wire.
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
    """Return what `rank` backs up; None if no rank backs up anything.

    Every rank applies the same rule, so no message is needed. all_may_tear: one error may leave no rank with whole
    weights, as it may on GPUs.
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
    """Return boxes that do not overlap and that cover all that is held, as (box, ranks that hold it)."""
    holders: dict[Box, list[int]] = {}
    for rank, layout in enumerate(spread):
        for box in held(layout):
            holders.setdefault(box, []).append(rank)
    found: list[tuple[Box, list[int]]] = []
    for box, ranks in holders.items():
        found += [(rest, ranks) for rest in uncovered((box,), [taken for taken, _ in found])]
    return found


def beside(shape: tuple[int, ...], boxes: Sequence[Box]) -> Layout:
    """Return a layout that holds `boxes` of a global tensor of `shape`, one behind the other along dim 0."""
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
    """The contents of a snapshot, in this order: key -> dtype and layout."""

    kinds: Mapping[str, torch.dtype]
    layouts: Mapping[str, Layout]

    @classmethod
    def of(cls, state: JobState, shares: Shares) -> Contents:
        """Return the contents for what `shares` name of `state`."""
        named = {key: key if key.startswith("buffer/") else key.partition("/")[2] for key in state}
        # The state of a whole tensor is on its owner; the weight is where its parts are.
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
        """Return the bytes of the flat piece. It is never empty, because it is sent."""
        return _ALIGN + sum(_room(self.layouts[key], kind) for key, kind in self.kinds.items())

    def views(self, flat: Tensor) -> JobState:
        """Return the tensors that lie in `flat`, as views."""
        found, at = {}, 0
        for key, kind in self.kinds.items():
            layout = self.layouts[key]
            part = flat[at : at + layout.numel * kind.itemsize].view(kind).view(layout.local)
            found[key] = part, layout
            at += _room(layout, kind)
        return found


def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Return memory of the host for copies from `device`."""
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
        # A foreach copy from a device to the host would wait for each tensor.
        accelerator().fetch_into(*on_device)


def _place(layout: Layout, box: Box) -> tuple[slice, ...]:
    """Return where `box` of the global tensor lies in the local one."""
    return next(box.moved(there.start, here.start).slices for here, there in layout.pieces if within(box, there))


_GENERATIONS = 2
_FIRST, _MEASURED = 2, 3
"""The number of first backups that are ignored, and of the next ones that measure the cost."""
_SHARE_OF_A_STEP = 0.05
_SHARE_OF_FREE = 0.5  # share of a host's memory that backups may take if the user did not ask for them
_HEAD, _ABOUT, _STATE = 1, 2, 3  # tags of the three messages


@dataclass
class BackupGeneration:
    """A share of the state after `step` steps.

    about: what the optimizer remembers beside elements, pickled (see OptimizerMemory). point: where the training of its
    own rank stood; None for another rank's.
    """

    step: int
    contents: Contents
    about: bytes
    flat: Tensor
    point: Any = None

    def state(self) -> JobState:
        """Return its tensors, as views."""
        return self.contents.views(self.flat)


def buddy_of(rank: int, world_size: int) -> int:
    """Return the rank that keeps the backups of `rank`."""
    return (rank + world_size // 2) % world_size


class Backups:
    """Backups of a job: of this rank, and of the rank whose buddy it is. Off before `begin`.

    asked, every: steps from one backup to the next, as asked for and in force; None while the cost under this strategy
    is not known.
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
        """Make backups from now on, every `every` steps; 0: none; None: as many as cost below 5 % of a step.

        Collective. Backups of an earlier training are dropped. say: is told the cost of a backup, when it is known.
        """
        # If another `fit` ended by an error on some ranks, transfers of the others may never complete.
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
        """Go on after ranks were replaced, over another group. The cost is measured again.

        step: all ranks are back at it. Backups of it and before it are kept.
        """
        self.wait()  # a buddy would wait for ever for a backup that is dropped before it was sent
        self._group, self._shares, self.asked, self.every = None, None, asked, asked
        self._keep(step)

    def back_to(self, step: int) -> None:
        """Drop the backups after `step`: those steps have not been made."""
        self.wait()
        self._keep(step)

    def _keep(self, step: int) -> None:
        self.own = [each for each in self.own if each.step <= step]
        self.wards = [each for each in self.wards if each.step <= step]
        self._under_way, self._told, self._costs = None, None, []

    @property
    def under_way(self) -> bool:
        """Return True if the newest backup is being sent, as far as this rank knows.

        It is the same on every rank of a training.
        """
        return self._under_way is not None

    def due(self, step: int) -> bool:
        """Return True if a backup is due after `step` steps. The first is, and each until the cost of one is known."""
        return self.on and (not self.own or step % (self.every or 1) == 0)

    def spent(self) -> float:
        """Return the seconds that the newest backup took of this rank's step. They are returned once."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def measured(self, backup_s: float, step_s: float) -> None:
        """Take the slowest rank's seconds for a backup, and for the step that it was in.

        They are the same on every rank.
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
                    f"After {each}, each rank sends a backup of its state to another one: {size(self.sent_bytes)} per "
                    f"rank, {100 * cost / self.every:.2g} % of the time of a step"
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
        # After a load or a death, steps are made again.
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
        """Return True, and say so, if backups of `num_bytes` on each rank are too much for a host. Collective."""
        free = left(torch.device("cpu"))
        lacks = free is not None and num_bytes > _SHARE_OF_FREE * free
        (most,) = largest([num_bytes if lacks else 0], device=self.device)
        if most and self._say is not None:
            self._say(
                f"no backups: they would take {most / 1e9:.3g} GB of a host's memory for each rank; a rank that dies "
                "is replaced from the last checkpoint (recovery=nbkit.Recovery(backup_every=10): back up all the same)"
            )
        return most > 0

    def wait(self) -> None:
        """Wait until this rank's newest backup has arrived, and it has its ward's."""
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
        """Keep what has arrived and drop the rest, after a rank has died."""
        with suppress(Exception):  # whatever a transfer from a dead rank raises
            self.wait()

    def abandon(self) -> None:
        """Abandon transfers after the training has ended within a step: on some ranks they may never begin."""
        # Keep the memory: a buddy that is receiving it would wait for ever.
        self._left_under_way = (*self._left_under_way, self._under_way, self._sending)
        self._under_way, self._group = None, None

    def _contents(self, state: JobState, shares: Shares) -> Contents:
        seen = {key: (tensor.dtype, layout) for key, (tensor, layout) in state.items()}
        if self._seen is None or self._seen[0] != seen:
            self._seen = seen, Contents.of(state, shares)
        return self._seen[1]

    def _room(self, kept: list[BackupGeneration], num_bytes: int) -> Tensor:
        """Return memory for a new generation: that of the oldest one, which goes, if it has the right size."""
        old = kept.pop(0).flat if len(kept) >= _GENERATIONS else None
        if old is not None and old.numel() == num_bytes:
            return old
        return host_memory(num_bytes, self.device)

    def _send(self, own: BackupGeneration) -> None:
        """Send a backup to the buddy, and receive the ward's. Messages of unknown size go first, and are waited for."""
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
