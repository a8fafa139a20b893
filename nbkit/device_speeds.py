"""Divides work over ranks of unequal speed: rows of a batch by replica, blocks by stage of a pipeline.

Speeds are whole numbers, one per rank. Only their ratios count: with `speeds=2:1`, the first rank computes twice as
fast as the second. The stages of all replicas hold the same blocks. So a stage is as fast as its ranks on average, and
a replica is as fast as its slowest rank, relative to that rank's stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import gcd

from nbkit.errors import StrategyError
from nbkit.mesh import AXES, Mesh


def settled(speeds: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """Return `speeds` in lowest terms, () if all are equal. Raises StrategyError if they do not fit the mesh."""
    shown = ":".join(map(str, speeds))
    if len(speeds) != mesh.size or min(speeds) < 1:
        raise StrategyError(
            "speeds= has a whole number of at least 1 for each rank.",
            numbers=f"speeds={shown} are {len(speeds)}, the mesh has {mesh.size} ranks",
            hint="speeds=" + ":".join(["2"] + ["1"] * (mesh.size - 1)),
        )
    for axis in ("tp", "cp"):
        for group in mesh.groups(axis):
            own = [speeds[rank] for rank in group]
            if len(set(own)) > 1:
                slowest = min(own)
                raise StrategyError(
                    f"The ranks of a group along {axis} compute equal parts of each layer, and wait for the slowest.",
                    numbers=f"ranks {', '.join(map(str, group))} have speeds {', '.join(map(str, own))}: "
                    f"{len(own)} x {slowest} of {sum(own)}, so that {1 - len(own) * slowest / sum(own):.0%} is lost",
                    hint=_alike_together(speeds, mesh) or f"ddp speeds={shown}",
                )
    factor = gcd(*speeds)
    return () if len(set(speeds)) == 1 else tuple(speed // factor for speed in speeds)


def _alike_together(speeds: Sequence[int], mesh: Mesh) -> str:
    """Return a `places=` key that puts ranks of equal speed into each group along tp and cp; "" if none exists."""
    size = mesh.tp * mesh.cp
    ranks = sorted(range(mesh.size), key=lambda rank: (-speeds[rank], rank))
    units = sorted(sorted(ranks[start : start + size]) for start in range(0, mesh.size, size))
    if any(len({speeds[rank] for rank in unit}) > 1 for unit in units) or mesh.places or mesh.order != AXES:
        return ""
    places = [0] * mesh.size
    for place, rank in enumerate(rank for unit in units for rank in unit):
        places[rank] = place
    try:
        replace(mesh, places=tuple(places))
    except StrategyError:
        return ""
    return "places=" + ":".join(map(str, places))


def of_stages(speeds: Sequence[int], mesh: Mesh) -> tuple[Fraction, ...]:
    """Return the mean speed of the ranks at each place along pp."""
    ranks = [mesh.ranks("dp", mesh.ranks("pp", 0)[stage]) for stage in range(mesh.pp)]
    return tuple(Fraction(sum(speeds[rank] for rank in group), len(group)) for group in ranks)


def of_replicas(speeds: Sequence[int], mesh: Mesh) -> tuple[Fraction, ...]:
    """Return the speed of each place along dp: the least ratio of a rank's speed to the speed of its stage."""
    stages = of_stages(speeds, mesh)
    return tuple(
        min(speeds[rank] / stages[stage] for stage, rank in enumerate(mesh.ranks("pp", first)))
        for first in mesh.ranks("dp", 0)
    )


@lru_cache(maxsize=64)
def rows_by_speed(total: int, speeds: tuple[Fraction, ...]) -> tuple[tuple[int, int], ...]:
    """Return (first row, one past the last row) of each replica. The last replica to finish is as early as possible."""
    counts = [0] * len(speeds)
    # Give each row to the replica that would finish it first. This minimises the longest time.
    done = [(1 / speed, place) for place, speed in enumerate(speeds)]
    heapify(done)
    for _ in range(total):
        place = done[0][1]
        counts[place] += 1
        heapreplace(done, ((counts[place] + 1) / speeds[place], place))
    return tuple(pairwise([0, *accumulate(counts)]))
