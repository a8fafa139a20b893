"""The process groups of a plan. They are created first, because all ranks must create them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.rank.comm.agree import largest
from nbkit.rank.comm.group_creation import split_from_world
from nbkit.rank.comm.thread_group import ThreadMeeting
from nbkit.rank.device import accelerator, is_device_backend
from nbkit.rank.parallel.device_mesh import (
    Axes,
    GroupKey,
    MakeGroup,
    all_made,
    close_all_but,
    group_of,
    key_of,
)
from nbkit.rank.parallel.pipeline.p2p import has_met, meet_all, sum_between
from nbkit.rank.parallel.plan import ParallelPlan


@dataclass(frozen=True, eq=False)
class TiedSum:
    """A sum of the gradients of `names`, which several stages share.

    members: None to all-reduce in `group`; or the ranks in `group` that hold the parameters, which send to each other.
    """

    group: dist.ProcessGroup
    names: tuple[str, ...]
    members: tuple[int, ...] | None = None

    def sum(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks that hold the parameters. All these ranks must call it."""
        if self.members is None:
            dist.all_reduce(tensor, group=self.group)
        else:
            sum_between(tensor, self.members, self.group)


@dataclass(frozen=True, eq=False)
class Connections:
    """The process groups of one plan on this rank.

    axes: the groups of the mesh. ordered: see Pipeline. ties: sums for the parameters that several stages share.
    replication: name -> number of ranks that hold the same elements of the tensors that the optimizer updates. world:
    the group of all ranks, None for torch's default group. keys: the keys of the groups of all ranks. `close_unused`
    keeps these groups open while this object exists.
    """

    axes: Axes
    ordered: dist.ProcessGroup | None
    ties: tuple[TiedSum, ...]
    replication: Mapping[str, int]
    world: dist.ProcessGroup | None = None
    keys: frozenset[GroupKey] = frozenset()


_IN_ORDER = "pp in order"
_in_use: WeakSet[Connections] = WeakSet()


def connect(plan: ParallelPlan, rank: int) -> Connections:
    """Create the groups of `plan` that do not exist yet. All ranks of the world must call it."""
    axes = Axes.of(plan.strategy.mesh, rank, shard=plan.strategy.shard, along=plan.groups, ep=plan.strategy.ep)
    every = _in_order(plan)
    ordered = group_of(_IN_ORDER, every, rank) if every else None
    ties = _ties(plan, rank, group_of, ordered)
    made = Connections(axes, ordered, ties, plan.copies, keys=frozenset(group_keys(plan)))
    _in_use.add(made)
    return made


def meet_groups(connections: Connections, device: torch.device) -> None:
    """Run a first collective in each of this rank's groups that has not run one yet. All ranks of the world must call
    it.

    NCCL allocates the memory of a communicator at its first use. Here this happens before the tensors of a strategy
    take memory, and after torch's allocator has returned its reserve. If a rank ran out of memory in a step instead,
    the other ranks would wait for it.

    The communicators of an axis are split from the world's communicator, in one call for all of its groups, if all of
    them are new. All ranks of the world must take part in a split, but it needs no store and no connections of its own.
    """
    if not (is_device_backend(dist.get_backend()) and accelerator().holds(device)):
        return
    groups = [*connections.axes.used(), connections.ordered]
    new = [int(group is not None and not has_met(group)) for group in groups]
    found = largest([*new, *(1 - one for one in new)], device=device)
    some, lacking = found[: len(new)], found[len(new) :]
    if any(some):
        accelerator().trim()
    for group, on_some, not_on_all in zip(groups, some, lacking, strict=True):
        if group is not None and on_some:
            with nullcontext() if not_on_all else split_from_world(group):
                meet_all(group, device)


def has_met_all(connections: Connections) -> bool:
    """Return True if `meet_groups` would do nothing on this rank."""
    groups = (*connections.axes.used(), connections.ordered)
    return not is_device_backend(dist.get_backend()) or all(group is None or has_met(group) for group in groups)


def close_unused(device: torch.device) -> None:
    """Close the groups of strategies whose `Connections` no longer exist on any rank. All ranks must call it.

    On a GPU, a group that was used holds a communicator, which takes device memory.
    """
    close_all_but(frozenset[GroupKey]().union(*(one.keys for one in list(_in_use))), device)


def connect_threads(
    plan: ParallelPlan, rank: int, meetings: Callable[[str, tuple[int, ...]], ThreadMeeting]
) -> Connections:
    """Return the connections of a rank that is a thread of this process.

    meetings: returns the meeting for an axis and the ranks of a group along it.
    """

    def make(axis: str, every: list[tuple[int, ...]], rank: int) -> dist.ProcessGroup | None:
        ranks = next((ranks for ranks in every if rank in ranks and len(ranks) > 1), None)
        return None if ranks is None else meetings(axis, ranks).group_of(rank)

    mesh = plan.strategy.mesh
    axes = Axes.of(mesh, rank, shard=plan.strategy.shard, along=plan.groups, ep=plan.strategy.ep, make=make)
    world = make("world", [tuple(range(mesh.size))], rank)
    ties = _ties(plan, rank, lambda _, every, rank: make("ties", every, rank), None)
    return Connections(axes, None, ties, plan.copies, world)


def groups_exist(plan: ParallelPlan) -> bool:
    """Return True if the groups of earlier plans are sufficient. Then `connect` sends nothing."""
    return all_made(group_keys(plan))


def group_keys(plan: ParallelPlan) -> set[GroupKey]:
    """Return the keys of the groups of all ranks that `connect` creates or finds."""
    every = [*plan.groups.items()]
    if in_order := _in_order(plan):
        every.append((_IN_ORDER, in_order))
    else:
        every += [("pp", tie.groups) for tie in plan.ties]
    return {key_of(axis, ranks) for axis, along in every for ranks in along if len(ranks) > 1}


def _in_order(plan: ParallelPlan) -> list[tuple[int, ...]]:
    """Return the ranks of each group `Connections.ordered`; [] if the backend does not need it."""
    return plan.strategy.mesh.groups("pp") if plan.strategy.pp > 1 and is_device_backend(dist.get_backend()) else []


def _ties(plan: ParallelPlan, rank: int, make: MakeGroup, ordered: dist.ProcessGroup | None) -> tuple[TiedSum, ...]:
    found = []
    for tie in plan.ties:
        own = tuple(name for name in tie.names if name in plan.layouts.summed[rank])
        if ordered is not None:  # no communicator for them alone
            there = next((ranks for ranks in tie.groups if rank in ranks), ())
            members = tuple(sorted(dist.get_group_rank(ordered, each) for each in there))
            found += [TiedSum(ordered, own, members)] * bool(own and members)
        elif (group := make("pp", tie.groups, rank)) is not None and own:
            found.append(TiedSum(group, own))
    return tuple(found)
