"""A group for each direction between two ranks of a pipeline, where the backend needs one: channels.py says why."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from nbkit.rank.comm.delegating_group import DelegatingGroup
from nbkit.rank.parallel.device_mesh import group_of

Edges = dict[tuple[int, int], dist.ProcessGroup]
"""(sender, receiver), as ranks of the world -> the group that serves this channel only."""


def edge_groups(pipelines: Sequence[tuple[int, ...]], rank: int, *, always: bool = False) -> Edges:
    """The groups of this rank's channels where the backend needs them, none on gloo. Collective over the world.

    pipelines: the ranks of every pipeline, such as `mesh.groups("pp")`. always: on gloo too.
    """
    if len(pipelines[0]) == 1 or not (always or dist.get_backend() == "nccl"):
        return {}
    edges: Edges = {}
    for a, b in _pairs(len(pipelines[0])):
        every: list[tuple[int, ...]] = [(ranks[a], ranks[b]) for ranks in pipelines]
        for axis in ("pp up", "pp down"):
            group = group_of(axis, every, rank)
            for low, high in every:
                if rank in (low, high) and group is not None:
                    edges[(low, high) if axis == "pp up" else (high, low)] = group
    return edges


_met: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Which forming of each group has met."""


def meet(edges: Edges, device: torch.device) -> None:
    """Send a number over each of this rank's `edges` that has not met since it was formed. Collective over the
    pipelines, before a run; without edges, and where all have met, nothing.

    NCCL connects at the first message and blocks until both ends are there: all go through their edges in one order.
    """
    for edge in sorted(edges, key=lambda pair: (min(pair), max(pair), pair)):
        group = edges[edge]
        formed = group.formed if isinstance(group, DelegatingGroup) else 1
        if _met.get(group) == formed:
            continue
        _met[group] = formed
        token = torch.zeros(1, device=device)
        if edge[0] == dist.get_rank():
            dist.send(token, edge[1], group=group)
        else:
            dist.recv(token, edge[0], group=group)


def _pairs(ranks: int) -> list[tuple[int, int]]:
    """Neighbours, and the way from the last rank to the first."""
    return sorted({(i, i + 1) for i in range(ranks - 1)} | {(0, ranks - 1)})
