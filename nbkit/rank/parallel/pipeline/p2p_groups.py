"""A group for each direction between two ranks of a pipeline, where the backend needs one: p2p.py says why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    edges: Edges = {}
    for axis, every in ranks_of_edges(pipelines, always=always):
        group = group_of(axis, every, rank)
        for low, high in every:
            if rank in (low, high) and group is not None:
                edges[(low, high) if axis == "pp up" else (high, low)] = group
    return edges


def ranks_of_edges(
    pipelines: Sequence[tuple[int, ...]], *, always: bool = False
) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """(axis, the ranks of each group along it) of `edge_groups`, in the order in which they are made."""
    if len(pipelines[0]) == 1 or not (always or dist.get_backend() == "nccl"):
        return
    for a, b in _pairs(len(pipelines[0])):
        for axis in ("pp up", "pp down"):
            yield axis, [(ranks[a], ranks[b]) for ranks in pipelines]


_met: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Which forming of each group has met."""


def meet(edges: Edges, device: torch.device) -> None:
    """Send a number over each of this rank's `edges` that has not met since it was formed. Collective over the
    pipelines, before a run; without edges, and where all have met, nothing.

    NCCL connects at the first message and blocks until both ends are there: all go through their edges in one order.
    """
    for edge in sorted(edges, key=lambda pair: (min(pair), max(pair), pair)):
        group = edges[edge]
        if _meets_again(group):
            continue
        token = torch.zeros(1, device=device)
        if edge[0] == dist.get_rank():
            dist.send(token, edge[1], group=group)
        else:
            dist.recv(token, edge[0], group=group)


def meet_all(group: dist.ProcessGroup, device: torch.device) -> None:
    """Reduce a number over `group`, unless it has met since it was formed. Collective over the group, before a run.

    NCCL connects at the first collective and blocks until all members are there: in the middle of a run, a rank that
    comes to one first would keep from the others what they need to come.
    """
    if not _meets_again(group):
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def has_met(group: dist.ProcessGroup) -> bool:
    """Whether it has met since it was formed."""
    return _met.get(group) == _formed(group)


def _meets_again(group: dist.ProcessGroup) -> bool:
    """Whether it has met since it was formed; from now on it has."""
    before, _met[group] = has_met(group), _formed(group)
    return before


def _formed(group: dist.ProcessGroup) -> int:
    return group.formed if isinstance(group, DelegatingGroup) else 1


def _pairs(ranks: int) -> list[tuple[int, int]]:
    """Neighbours, and the way from the last rank to the first."""
    return sorted({(i, i + 1) for i in range(ranks - 1)} | {(0, ranks - 1)})
