"""Which rank takes which part of a new layout, so that the fewest bytes move.

Where a strategy leaves it free, a part goes to the rank that already holds most of it: an assignment problem, solved
exactly by successive shortest paths with potentials (Kuhn 1955; in the form of Jonker and Volgenant 1987).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbkit.errors import StrategyError
from nbkit.layout import Layout
from nbkit.planner.cover import overlap
from nbkit.planner.exchange import Holding, spreads

__all__ = ["assign", "best_placement", "received_bytes"]


def received_bytes(old: Sequence[Holding], new: Sequence[Holding], itemsize: Mapping[str, int]) -> list[list[int]]:
    """`[rank][part]` -> bytes that `rank`, which holds `old[rank]`, must receive if it takes `new[part]`."""
    cost = [[0] * len(new) for _ in old]
    for (size, before, after), keys in spreads(old, new, itemsize):
        known: dict[tuple[int, int], int] = {}
        for rank, own in enumerate(before):
            for part, wanted in enumerate(after):
                if wanted is not None:
                    if (pair := (id(own), id(wanted))) not in known:
                        known[pair] = _lacks(own, wanted) * size * len(keys)
                    cost[rank][part] += known[pair]
    return cost


def best_placement(
    old: Sequence[Holding],
    new: Sequence[Holding],
    itemsize: Mapping[str, int],
    *,
    nodes: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """`placement[rank]` is the part of `new` that `rank` takes; together they receive the fewest bytes.

    Among equally good ones it is the one in which most ranks keep their own number. nodes[rank]: parts that are on one
    node stay together on one node, so that what talks most remains near. Raises StrategyError when the nodes have
    different numbers of ranks.
    """
    # Ties go to ranks that stay; a byte outweighs all of them.
    weight = len(new) + 1
    cost = [
        [size * weight + (rank != part) for part, size in enumerate(row)]
        for rank, row in enumerate(received_bytes(old, new, itemsize))
    ]
    members: dict[int, list[int]] = {}
    for rank in range(len(new)):
        members.setdefault(0 if nodes is None else nodes[rank], []).append(rank)
    blocks = list(members.values())
    if len({len(block) for block in blocks}) > 1:
        raise StrategyError(
            "Parts cannot change places between nodes of different size.",
            numbers=", ".join(f"node {node}: {len(block)} ranks" for node, block in members.items()),
            hint="nodes=None, or the placement as it is",
        )
    inner = [[assign([[cost[rank][part] for part in parts] for rank in ranks]) for parts in blocks] for ranks in blocks]
    outer = assign(
        [
            [sum(cost[rank][parts[inner[i][j][n]]] for n, rank in enumerate(ranks)) for j, parts in enumerate(blocks)]
            for i, ranks in enumerate(blocks)
        ]
    )
    placement = [0] * len(new)
    for i, ranks in enumerate(blocks):
        for n, rank in enumerate(ranks):
            placement[rank] = blocks[outer[i]][inner[i][outer[i]][n]]
    return tuple(placement)


def assign(cost: Sequence[Sequence[int]]) -> list[int]:
    """The column of each row of a square matrix, each column once, with the smallest sum; O(n^3)."""
    size = len(cost)
    rows, columns = [0] * size, [0] * (size + 1)  # the potentials; column `size` is where a new row begins
    taken_by = [-1] * (size + 1)
    for row in range(size):
        taken_by[size] = row
        at = size
        best: list[float] = [float("inf")] * size
        came_from, done = [size] * size, [False] * (size + 1)
        while taken_by[at] != -1:
            done[at] = True
            here, nearest, step = taken_by[at], -1, float("inf")
            for column in range(size):
                if done[column]:
                    continue
                reduced = cost[here][column] - rows[here] - columns[column]
                if reduced < best[column]:
                    best[column], came_from[column] = reduced, at
                if best[column] < step:
                    nearest, step = column, best[column]
            for column in range(size + 1):
                if done[column]:
                    rows[taken_by[column]] += int(step)
                    columns[column] -= int(step)
                elif column < size:
                    best[column] -= int(step)
            at = nearest
        while at != size:
            before = came_from[at]
            taken_by[at] = taken_by[before]
            at = before
    placed = [0] * size
    for column in range(size):
        placed[taken_by[column]] = column
    return placed


def _lacks(own: Layout | None, wanted: Layout) -> int:
    return sum(there.numel for _, there in wanted.pieces) - overlap(own, wanted)
