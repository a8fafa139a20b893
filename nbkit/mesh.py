"""The grid of ranks, made of named axes and their degrees.

With the number of the rank, the place along tp changes fastest, then along cp, then dp; the place along pp changes
slowest. So the ranks that communicate most are neighbours on a node. Another axis may be the slowest and cross nodes
instead of pp. Either `order=` of a strategy says so, or nbkit chooses it so that fewer bytes move (see
nbkit.planner.exchange). `places=` gives the place of each rank in this order, so that ranks of unequal speed get stages
that suit them.

`levels_of` divides an all-reduce of S bytes over several nodes into two levels, so that fewer bytes cross the slow
links between nodes. Let the group have L ranks on each of k nodes, n = k L in all. In a ring over all ranks,
2 (n - 1) / n S bytes leave every node. With two levels, the ranks of a node first reduce-scatter. Then each rank
all-reduces its part with the ranks in the same place on the other nodes. Last, the ranks of a node all-gather. So
2 (k - 1) / k S bytes leave every node, and L ranks send them at the same time.

    nodes x ranks    2 x 2   2 x 4   2 x 8   4 x 8
    bytes / S        1.5     1.75    1.875   1.94     in a ring
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

    places: the place of each rank in the grid, counted along `order`; () if rank r is at place r. Ranks must ascend
    along dp, cp and tp, because a process group numbers its ranks in ascending order.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    order: tuple[str, ...] = AXES
    places: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if wrong := [f"{axis}={self.degree(axis)}" for axis in AXES if self.degree(axis) < 1]:
            raise StrategyError("Each degree must be at least 1.", numbers=", ".join(wrong), hint="strategy='ddp'")
        if self.places:
            self._check_places()

    def _check_places(self) -> None:
        shown = ":".join(map(str, self.places))
        if sorted(self.places) != list(range(self.size)):
            raise StrategyError(
                "places= must contain the number of each rank exactly once.",
                numbers=f"places={shown} for {self.size} ranks, numbers 0 to {self.size - 1}",
                hint="places=" + ":".join(map(str, range(self.size))),
            )
        for axis in (axis for axis in AXES if axis != "pp"):
            for group in self.groups(axis):
                if any(later < earlier for earlier, later in pairwise(group)):
                    raise StrategyError(
                        f"Ranks along {axis} must be in ascending order, as in their process groups.",
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
        """Return how many places apart two neighbours along `axis` are."""
        faster = self.order[self.order.index(axis) + 1 :]
        return prod(self.degree(other) for other in faster)

    def index(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` along each axis."""
        place = self._place(rank)
        return {axis: place // stride % degree for axis, stride, degree in self._steps}

    def ranks(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axis`, in order, including `rank`."""
        stride = self.stride(axis)
        first = self._place(rank) - self.index(rank)[axis] * stride
        return tuple(self._ranks[first + i * stride] for i in range(self.degree(axis)))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return every group along `axis`, sorted by first rank. Each rank is in exactly one group."""
        return sorted({self.ranks(axis, rank) for rank in range(self.size)})

    def _place(self, rank: int) -> int:
        return self.places[rank] if self.places else rank

    @cached_property
    def _steps(self) -> Sequence[tuple[str, int, int]]:
        """Return (axis, stride, degree) of each axis. Cached, since the planner calls `index` very often."""
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
"""Names of the levels. They follow the name of the axis, as in "dp within nodes"."""


@dataclass(frozen=True)
class Levels:
    """The groups of both levels. within: ranks of the same node. between: ranks in the same place on their nodes."""

    within: tuple[tuple[int, ...], ...]
    between: tuple[tuple[int, ...], ...]


def levels_of(group: Sequence[int], node_of: Sequence[int]) -> Levels | None:
    """Return the levels of `group`. Return None if it is on one node, or if each group within a node has one rank.

    node_of: the node number of each rank of the world; () for one node. The size of the groups within nodes is the
    largest that divides the number of the group's ranks on each node.
    """
    nodes: dict[int, list[int]] = {}
    for rank in group:
        nodes.setdefault(node_of[rank] if node_of else 0, []).append(rank)
    size = gcd(*map(len, nodes.values()))
    if len(nodes) == 1 or size == 1:
        return None
    within = tuple(tuple(ranks[at : at + size]) for ranks in nodes.values() for at in range(0, len(ranks), size))
    return Levels(within, tuple(zip(*within, strict=True)))
