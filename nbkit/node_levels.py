"""Divides an all-reduce over several nodes into two levels, so that less goes over the slow links between nodes.

A group has ranks on k nodes, L on each. In a ring over all n = k L ranks, 2 (n - 1) / n S leaves every node. In two
levels, the ranks of a node reduce-scatter. Then each rank all-reduces its part with the ranks in the same place on the
other nodes, and the ranks of a node all-gather. So 2 (k - 1) / k S leaves every node, and L ranks send at the same
time.

    nodes x ranks    2 x 2   2 x 4   2 x 8   4 x 8
    S leaves a node  1.5     1.75    1.875   1.94     in a ring
                     1       1       1       1.5      in two levels
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

WITHIN, BETWEEN = "within nodes", "between nodes"
"""Names of the levels, which follow the name of the axis of an all-reduce."""


@dataclass(frozen=True)
class Levels:
    """Groups of ranks. within: the ranks of one node each. between: ranks with the same place in their nodes."""

    within: tuple[tuple[int, ...], ...]
    between: tuple[tuple[int, ...], ...]


def levels_of(group: Sequence[int], node_of: Sequence[int]) -> Levels | None:
    """Return the levels of `group`, or None if two are no better than one: on one node, or with one rank on each.

    node_of: the node number of each rank of the world; () for one node. If nodes hold unequal numbers of the group's
    ranks, the groups within nodes have the largest size that divides each number.
    """
    nodes: dict[int, list[int]] = {}
    for rank in group:
        nodes.setdefault(node_of[rank] if node_of else 0, []).append(rank)
    size = gcd(*map(len, nodes.values()))
    if len(nodes) == 1 or size == 1:
        return None
    within = tuple(tuple(ranks[at : at + size]) for ranks in nodes.values() for at in range(0, len(ranks), size))
    return Levels(within, tuple(zip(*within, strict=True)))
