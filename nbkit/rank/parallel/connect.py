"""The process groups that a strategy talks over, made before anything else of it: what needs every rank at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from nbkit.layout import Layout
from nbkit.rank.parallel.axes import Axes, group_of
from nbkit.rank.parallel.edges import Edges, edge_groups
from nbkit.rank.parallel.outline import Outline
from nbkit.strategy import Strategy

__all__ = ["Connections", "connect"]


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


def connect(strategy: Strategy, outline: Outline, rank: int) -> Connections:
    """Make the groups that are not there yet. Collective over the world; nothing else of a strategy's birth is."""
    mesh = strategy.mesh
    axes = Axes.of(mesh, rank, shard=strategy.shard)
    ties = []
    for where, names in _tied(strategy, outline):
        group = group_of("pp", [tuple(line[stage] for stage in where) for line in mesh.groups("pp")], rank)
        own = tuple(name for name in names if name in outline.held[rank])
        if group is not None and own:
            ties.append((group, own))
    return Connections(axes, edge_groups(mesh.groups("pp"), rank), tuple(ties), _replication(outline))


def _tied(strategy: Strategy, outline: Outline) -> list[tuple[tuple[int, ...], list[str]]]:
    """(places along pp, names of the parameters that exactly those hold), where they are several."""
    stages: dict[str, set[int]] = {}
    for rank, held in enumerate(outline.held):
        for name in held:
            stages.setdefault(name, set()).add(strategy.mesh.index(rank)["pp"])
    found: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(stages):
        if len(stages[name]) > 1:
            found.setdefault(tuple(sorted(stages[name])), []).append(name)
    return sorted(found.items()) if strategy.pp > 1 else []


def _replication(outline: Outline) -> dict[str, int]:
    total: dict[str, int] = {}
    whole: dict[str, Layout] = {}
    for held in outline.held:
        for name, layout in held.items():
            total[name] = total.get(name, 0) + layout.numel
            whole[name] = layout
    return {name: max(1, round(total[name] / max(Layout.whole(whole[name].shape).numel, 1))) for name in total}
