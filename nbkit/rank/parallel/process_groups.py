"""The process groups of a plan. They are made first, because making them needs all ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from weakref import WeakSet

import torch
import torch.distributed as dist

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
from nbkit.rank.parallel.pipeline.p2p import Edges, edge_groups, has_met, meet, meet_all, ranks_of_edges
from nbkit.rank.parallel.plan import ParallelPlan


@dataclass(frozen=True, eq=False)
class Connections:
    """The process groups of one plan on this rank.

    axes: the groups of the mesh. edges: the groups of a pipeline's channels, if the backend needs them. ties: (group,
    names) of the parameters that several stages hold. replication: name -> how many ranks of the world hold the same
    elements of what the optimizer updates. world: the group of all ranks, None for torch's own. keys: the keys of the
    groups of all ranks. `close_unused` leaves these open while this object lives.
    """

    axes: Axes
    edges: Edges
    ties: tuple[tuple[dist.ProcessGroup, tuple[str, ...]], ...]
    replication: Mapping[str, int]
    world: dist.ProcessGroup | None = None
    keys: frozenset[GroupKey] = frozenset()


_in_use: WeakSet[Connections] = WeakSet()


def connect(plan: ParallelPlan, rank: int) -> Connections:
    """Make the groups of `plan` that do not exist yet. Collective over the world."""
    axes = Axes.of(plan.strategy.mesh, rank, shard=plan.strategy.shard, along=plan.groups, ep=plan.strategy.ep)
    ties, edges = _ties(plan, rank, group_of), edge_groups(plan.strategy.mesh.groups("pp"), rank)
    made = Connections(axes, edges, ties, plan.copies, keys=frozenset(group_keys(plan)))
    _in_use.add(made)
    return made


def meet_groups(connections: Connections, device: torch.device) -> None:
    """Use this rank's groups for the first time, if they have not met since they were formed. Collective over the
    world.

    NCCL takes the memory of a communicator at its first use. Here this happens before tensors of a strategy take
    memory, and after torch's allocator has returned its reserve. In a step, a rank that finds no memory would leave the
    others waiting.
    """
    if is_device_backend(dist.get_backend()) and accelerator().holds(device):
        groups = [*connections.axes.used(connections.edges), *(group for group, _ in connections.ties)]
        if any(not has_met(group) for group in (*groups, *connections.edges.values())):
            accelerator().trim()
        for group in groups:
            meet_all(group, device)
    meet(connections.edges, device)


def close_unused(device: torch.device) -> None:
    """Close the groups of strategies whose `Connections` no rank holds any more. Collective.

    On a GPU, a group that was used holds a communicator, which takes device memory.
    """
    close_all_but(frozenset[GroupKey]().union(*(one.keys for one in list(_in_use))), device)


def connect_threads(
    plan: ParallelPlan, rank: int, meetings: Callable[[str, tuple[int, ...]], ThreadMeeting]
) -> Connections:
    """Return the connections of a rank that is a thread of this process.

    meetings: gives the meeting of an axis and the ranks of a group along it.
    """

    def make(axis: str, every: list[tuple[int, ...]], rank: int) -> dist.ProcessGroup | None:
        ranks = next((ranks for ranks in every if rank in ranks and len(ranks) > 1), None)
        return None if ranks is None else meetings(axis, ranks).group_of(rank)

    mesh = plan.strategy.mesh
    axes = Axes.of(mesh, rank, shard=plan.strategy.shard, along=plan.groups, ep=plan.strategy.ep, make=make)
    world = make("world", [tuple(range(mesh.size))], rank)
    ties = _ties(plan, rank, lambda _, every, rank: make("ties", every, rank))
    return Connections(axes, {}, ties, plan.copies, world)


def groups_exist(plan: ParallelPlan) -> bool:
    """Return True if the groups of earlier plans serve this one. `connect` then sends nothing."""
    return all_made(group_keys(plan))


def group_keys(plan: ParallelPlan) -> set[GroupKey]:
    """Return the keys of the groups of all ranks that `connect` makes or finds."""
    tied = [("pp", tie.groups) for tie in plan.ties]
    edges = ranks_of_edges(plan.strategy.mesh.groups("pp"))
    every = (*plan.groups.items(), *tied, *edges)
    return {key_of(axis, ranks) for axis, along in every for ranks in along if len(ranks) > 1}


def _ties(plan: ParallelPlan, rank: int, make: MakeGroup) -> tuple[tuple[dist.ProcessGroup, tuple[str, ...]], ...]:
    found = []
    for tie in plan.ties:
        group = make("pp", tie.groups, rank)
        own = tuple(name for name in tie.names if name in plan.layouts.summed[rank])
        if group is not None and own:
            found.append((group, own))
    return tuple(found)
