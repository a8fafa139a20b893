"""An all-reduce over several nodes in two levels, so that less goes over the slow links between them.

A group has ranks on k nodes, L on each. In a ring over all n = k L ranks 2 (n - 1) / n S leaves every node. In two
levels the ranks of a node reduce-scatter, each all-reduces its part with those at the same place on the other nodes,
and the ranks of a node all-gather: 2 (k - 1) / k S leaves every node, L ranks sending at the same time.

    nodes x ranks    2 x 2   2 x 4   2 x 8   4 x 8
    S leaves a node  1.5     1.75    1.875   1.94     in a ring
                     1       1       1       1.5      in two levels
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

WITHIN, BETWEEN = "within nodes", "between nodes"
"""The levels, as they are named behind the axis of an all-reduce."""


@dataclass(frozen=True)
class Levels:
    """within: groups of ranks of one node each. between: groups of those that are at the same place in theirs."""

    within: tuple[tuple[int, ...], ...]
    between: tuple[tuple[int, ...], ...]


def levels_of(group: Sequence[int], node_of: Sequence[int]) -> Levels | None:
    """Return the levels of `group`; None where two are no better than one: on one node, or with one rank on each.

    node_of: of each rank of the world, the number of its node; () for one node. Where nodes have unequal numbers of
    ranks of the group, the groups within them have the size that divides each number.
    """
    nodes: dict[int, list[int]] = {}
    for rank in group:
        nodes.setdefault(node_of[rank] if node_of else 0, []).append(rank)
    size = gcd(*map(len, nodes.values()))
    if len(nodes) == 1 or size == 1:
        return None
    within = tuple(tuple(ranks[at : at + size]) for ranks in nodes.values() for at in range(0, len(ranks), size))
    return Levels(within, tuple(zip(*within, strict=True)))
