"""The process groups that a strategy talks over, made before anything else of it: what needs every rank at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from nbkit.rank.parallel.device_mesh import Axes, all_made, group_of, groups_along
from nbkit.rank.parallel.pipeline.p2p_groups import Edges, edge_groups
from nbkit.rank.parallel.shard_layouts import RankLayouts
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout


@dataclass(frozen=True)
class Connections:
    """axes: groups of the mesh. edges: of a pipeline's channels, where the backend needs them.

    ties: (group, names) of the parameters that several stages hold. replication: name -> ranks of the world that hold
    the same elements of what the optimizer updates.
    """

    axes: Axes
    edges: Edges
    ties: tuple[tuple[dist.ProcessGroup, tuple[str, ...]], ...]
    replication: Mapping[str, int]


def connect(strategy: Strategy, rank_layouts: RankLayouts, rank: int) -> Connections:
    """Make the groups that are not there yet. Collective over the world; nothing else of a strategy's birth is."""
    mesh = strategy.mesh
    axes = Axes.of(mesh, rank, shard=strategy.shard)
    ties = []
    for every, names in _tied(strategy, rank_layouts):
        group = group_of("pp", every, rank)
        own = tuple(name for name in names if name in rank_layouts.held[rank])
        if group is not None and own:
            ties.append((group, own))
    return Connections(axes, edge_groups(mesh.groups("pp"), rank), tuple(ties), _replication(rank_layouts))


def served(strategy: Strategy, rank_layouts: RankLayouts) -> bool:
    """Whether the groups of strategies before serve this one, so that `connect` sends nothing."""
    if strategy.pp > 1 and dist.get_backend() == "nccl":  # edges are not looked for
        return False
    tied = (every for every, _ in _tied(strategy, rank_layouts))
    along = groups_along(strategy.mesh, strategy.shard)
    return all(all_made(every, axis) for axis, every in along.items()) and all(all_made(every, "pp") for every in tied)


def _tied(strategy: Strategy, rank_layouts: RankLayouts) -> list[tuple[list[tuple[int, ...]], list[str]]]:
    """(groups along pp, names of the parameters that exactly their stages hold), where those are several."""
    stages: dict[str, set[int]] = {}
    for rank, held in enumerate(rank_layouts.held):
        for name in held:
            stages.setdefault(name, set()).add(strategy.mesh.index(rank)["pp"])
    found: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(stages):
        if len(stages[name]) > 1:
            found.setdefault(tuple(sorted(stages[name])), []).append(name)
    lines = strategy.mesh.groups("pp")
    places = sorted(found.items()) if strategy.pp > 1 else []
    return [([tuple(line[stage] for stage in where) for line in lines], names) for where, names in places]


def _replication(rank_layouts: RankLayouts) -> dict[str, int]:
    total: dict[str, int] = {}
    whole: dict[str, Layout] = {}
    for held in rank_layouts.held:
        for name, layout in held.items():
            total[name] = total.get(name, 0) + layout.numel
            whole[name] = layout
    return {name: max(1, round(total[name] / max(Layout.whole(whole[name].shape).numel, 1))) for name in total}
