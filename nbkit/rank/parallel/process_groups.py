"""The process groups that a strategy uses. They are made first, because making them needs all ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    groups_along,
    key_of,
)
from nbkit.rank.parallel.pipeline.p2p import Edges, edge_groups, has_met, meet, meet_all, ranks_of_edges
from nbkit.rank.parallel.shard_layouts import RankLayouts
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout


@dataclass(frozen=True, eq=False)
class Connections:
    """The process groups of one strategy on this rank.

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


def connect(strategy: Strategy, rank_layouts: RankLayouts, rank: int, node_of: Sequence[int] = ()) -> Connections:
    """Make the groups that do not exist yet. Collective over the world; building a strategy needs no other collective.

    node_of: the node number of each rank; () for one node.
    """
    axes = Axes.of(strategy.mesh, rank, shard=strategy.shard, summed=strategy.summed_axis, node_of=node_of)
    ties = _ties(strategy, rank_layouts, rank, group_of)
    edges = edge_groups(strategy.mesh.groups("pp"), rank)
    keys = frozenset(group_keys(strategy, rank_layouts, node_of))
    made = Connections(axes, edges, ties, _replication(rank_layouts), keys=keys)
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
    strategy: Strategy, rank_layouts: RankLayouts, rank: int, meetings: Callable[[str, tuple[int, ...]], ThreadMeeting]
) -> Connections:
    """Return the connections of a rank that is a thread of this process.

    meetings: gives the meeting of an axis and the ranks of a group along it.
    """

    def make(axis: str, every: list[tuple[int, ...]], rank: int) -> dist.ProcessGroup | None:
        ranks = next((ranks for ranks in every if rank in ranks and len(ranks) > 1), None)
        return None if ranks is None else meetings(axis, ranks).group_of(rank)

    axes = Axes.of(strategy.mesh, rank, shard=strategy.shard, make=make)
    world = make("world", [tuple(range(strategy.mesh.size))], rank)
    ties = _ties(strategy, rank_layouts, rank, lambda _, every, rank: make("ties", every, rank))
    return Connections(axes, {}, ties, _replication(rank_layouts), world)


def served(strategy: Strategy, rank_layouts: RankLayouts, node_of: Sequence[int] = ()) -> bool:
    """Return True if the groups of earlier strategies serve this one. `connect` then sends nothing."""
    return all_made(group_keys(strategy, rank_layouts, node_of))


def group_keys(strategy: Strategy, rank_layouts: RankLayouts, node_of: Sequence[int] = ()) -> set[GroupKey]:
    """Return the keys of the groups of all ranks that `connect` makes or finds."""
    along = groups_along(strategy.mesh, strategy.shard, summed=strategy.summed_axis, node_of=node_of)
    tied = [("pp", every) for every, _ in _tied(strategy, rank_layouts)]
    edges = ranks_of_edges(strategy.mesh.groups("pp"))
    return {key_of(axis, ranks) for axis, every in (*along.items(), *tied, *edges) for ranks in every if len(ranks) > 1}


def _ties(
    strategy: Strategy, rank_layouts: RankLayouts, rank: int, make: MakeGroup
) -> tuple[tuple[dist.ProcessGroup, tuple[str, ...]], ...]:
    found = []
    for every, names in _tied(strategy, rank_layouts):
        group = make("pp", every, rank)
        own = tuple(name for name in names if name in rank_layouts.held[rank])
        if group is not None and own:
            found.append((group, own))
    return tuple(found)


def _tied(strategy: Strategy, rank_layouts: RankLayouts) -> list[tuple[list[tuple[int, ...]], list[str]]]:
    """Return (groups along pp, names of the parameters that exactly these stages hold), for parameters in several
    stages."""
    if strategy.pp == 1:
        return []
    stages: dict[str, set[int]] = {}
    for rank, held in enumerate(rank_layouts.held):
        stage = strategy.mesh.index(rank)["pp"]
        for name in held:
            stages.setdefault(name, set()).add(stage)
    found: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(stages):
        if len(stages[name]) > 1:
            found.setdefault(tuple(sorted(stages[name])), []).append(name)
    lines = strategy.mesh.groups("pp")
    return [
        ([tuple(line[stage] for stage in where) for line in lines], names) for where, names in sorted(found.items())
    ]


def _replication(rank_layouts: RankLayouts) -> dict[str, int]:
    total: dict[str, int] = {}
    whole: dict[str, Layout] = {}
    for held in rank_layouts.held:
        for name, layout in held.items():
            total[name] = total.get(name, 0) + layout.numel
            whole[name] = layout
    return {name: max(1, round(total[name] / max(Layout.whole(whole[name].shape).numel, 1))) for name in total}
