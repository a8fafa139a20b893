"""The grid of ranks, made of named axes and their degrees.

In rank order, tp is the fastest axis, then cp, dp and pp, the slowest. So the ranks that talk most are neighbours on a
node. Another axis may be the slowest and cross nodes in place of pp. Either `order=` of a strategy says so, or nbkit
chooses it so that fewer bytes move (see nbkit.planner.exchange). The place of each rank in this order can be given too,
because ranks of unequal speed suit unequal stages.

`levels_of` divides an all-reduce over several nodes into two levels, so that less goes over the slow links between
nodes. A group has ranks on k nodes, L on each. In a ring over all n = k L ranks, 2 (n - 1) / n S leaves every node. In
two levels, the ranks of a node reduce-scatter. Then each rank all-reduces its part with the ranks in the same place on
the other nodes, and the ranks of a node all-gather. So 2 (k - 1) / k S leaves every node, and L ranks send at the same
time.

    nodes x ranks    2 x 2   2 x 4   2 x 8   4 x 8
    S leaves a node  1.5     1.75    1.875   1.94     in a ring
                     1       1       1       1.5      in two levels
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import gcd, prod

from nbkit.errors import StrategyError

AXES = ("pp", "dp", "cp", "tp")
"""From the slowest to the fastest."""


def with_slowest(axis: str) -> tuple[str, ...]:
    """Return the usual order with `axis` as the slowest; "" gives the usual order."""
    return (*([axis] if axis else []), *(other for other in AXES if other != axis))


@dataclass(frozen=True)
class Mesh:
    """Degrees of the axes. Nothing is split along an axis of degree 1. order: from slowest to fastest.

    places: the number of each rank in the grid, counted along `order`; () if it is the rank itself. Ranks ascend along
    dp, cp and tp, since process groups number them like this.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    order: tuple[str, ...] = AXES
    places: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if wrong := [f"{axis}={self.degree(axis)}" for axis in AXES if self.degree(axis) < 1]:
            raise StrategyError("A degree is at least 1.", numbers=", ".join(wrong), hint="strategy='ddp'")
        if self.places:
            self._check_places()

    def _check_places(self) -> None:
        shown = ":".join(map(str, self.places))
        if sorted(self.places) != list(range(self.size)):
            raise StrategyError(
                "places= has the number of each rank in the mesh, each once.",
                numbers=f"places={shown} for {self.size} ranks, numbers 0 to {self.size - 1}",
                hint="places=" + ":".join(map(str, range(self.size))),
            )
        for axis in (axis for axis in AXES if axis != "pp"):
            for group in self.groups(axis):
                if any(later < earlier for earlier, later in pairwise(group)):
                    raise StrategyError(
                        f"Ranks along {axis} stand in ascending order, in which process groups number them.",
                        numbers=f"places={shown} has ranks {', '.join(map(str, group))} along {axis}",
                        hint="places=" + ":".join(map(str, range(self.size))),
                    )

    @cached_property
    def size(self) -> int:
        """Return the number of ranks in the grid."""
        return prod(self.degree(axis) for axis in AXES)

    def degree(self, axis: str) -> int:
        """Return the number of ranks along `axis`."""
        value: int = getattr(self, axis)
        return value

    def stride(self, axis: str) -> int:
        """Return how far apart in rank two neighbours along `axis` are."""
        faster = self.order[self.order.index(axis) + 1 :]
        return prod(self.degree(other) for other in faster)

    def index(self, rank: int) -> dict[str, int]:
        """Return the place of `rank` along each axis."""
        place = self._place(rank)
        return {axis: place // stride % degree for axis, stride, degree in self._steps}

    def ranks(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axis`, in order, including `rank`."""
        stride = self.stride(axis)
        first = self._place(rank) - self.index(rank)[axis] * stride
        return tuple(self._ranks[first + i * stride] for i in range(self.degree(axis)))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return every group along `axis`, sorted by first rank. Each rank is in one of them."""
        return sorted({self.ranks(axis, rank) for rank in range(self.size)})

    def _place(self, rank: int) -> int:
        return self.places[rank] if self.places else rank

    @cached_property
    def _steps(self) -> Sequence[tuple[str, int, int]]:
        """Return stride and degree of each axis, cached: the planner asks for hundreds of thousands of places."""
        return [(axis, self.stride(axis), self.degree(axis)) for axis in AXES]

    @cached_property
    def _ranks(self) -> Sequence[int]:
        """Return the rank at each place."""
        return sorted(range(self.size), key=self.places.__getitem__) if self.places else range(self.size)

    def shard_groups(self, shard: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return two lists: sharding groups of `shard` neighbours along dp, and groups of ranks with the same shard."""
        within, across = [], []
        for ranks in self.groups("dp"):
            within += [ranks[i : i + shard] for i in range(0, len(ranks), shard)]
            across += [ranks[i::shard] for i in range(shard)]
        return within, across


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
