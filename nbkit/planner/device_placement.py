"""Chooses which device takes which stage of a pipeline, where devices are of unequal speed.

Blocks lie in stages one after the other, so whole numbers of them suit a fast device at one place and not at another:
of blocks that take 4, 1 and 1 the first wants the faster of two devices. A tensor or context group moves as one. Within
a stage ranks stand in ascending order, as process groups number them.

A pipeline of single ranks, or of single groups, is solved exactly by a dynamic program over which of them are taken.
With data parallelism every division of the groups over the stages is tried, up to a number of them, and beyond that
the exchange of any two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, combinations, product
from math import factorial

from nbkit.errors import StrategyError
from nbkit.planner.load_balance import computing_seconds
from nbkit.planner.stage_partition import ranks_of_stages, stage_ranges
from nbkit.strategy import Strategy

_SETS, _DIVISIONS = 512, 3000
_SAME = 1e-6


@lru_cache(maxsize=32)
def best_places(strategy: Strategy, batch: int, costs: tuple[float, ...]) -> Strategy:
    """`strategy` with the `places=` for which its slowest rank has least to do, then those of the shortest step.

    batch: rows of a global batch. costs: of each block, in any unit. Links take no time. The places that it has, where
    no others are better.
    """
    if strategy.pp == 1 or not strategy.speeds or len(costs) < len(ranks_of_stages(strategy)):
        return strategy
    speeds = [float(speed) for speed in strategy.speeds]

    def seconds(one: Strategy) -> tuple[float, float]:
        return max(rank_seconds(one, batch, costs)), computing_seconds(one, batch, costs, speeds)

    known: dict[tuple[tuple[int, ...], ...], tuple[float, float]] = {}
    best, least = strategy, seconds(strategy)
    for stages in _divisions(strategy, costs):
        if (one := _placed(strategy, stages)) is None:
            continue
        mesh = one.mesh
        lines = tuple(tuple(one.speeds[rank] for rank in mesh.ranks("pp", first)) for first in mesh.ranks("dp", 0))
        if lines not in known:
            known[lines] = seconds(one)
            if _less(known[lines], least):
                best, least = one, known[lines]
    return best


def rank_seconds(strategy: Strategy, batch: int, costs: Sequence[float]) -> list[float]:
    """What each rank computes in a step, in whole rows / speed, with stages and rows as `speeds=` has them."""
    mesh, rows = strategy.mesh, strategy.rows(batch)
    cost = [0.0] * strategy.pp
    for home, (start, stop) in zip(ranks_of_stages(strategy), stage_ranges(costs, strategy), strict=True):
        cost[home] += sum(costs[start:stop]) / sum(costs)
    places = [mesh.index(rank) for rank in range(mesh.size)]
    speeds, counts = strategy.speeds or (1,) * mesh.size, [stop - start for start, stop in rows]
    return [counts[at["dp"]] * cost[at["pp"]] / speed for at, speed in zip(places, speeds, strict=True)]


def _less(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] < (1 - _SAME) * b[0] or (a[0] <= (1 + _SAME) * b[0] and a[1] < (1 - _SAME) * b[1])


def _units(strategy: Strategy) -> list[list[tuple[int, ...]]]:
    """[stage][replica]: the ranks of a group along cp and tp, in the order of the mesh."""
    mesh = strategy.mesh
    stages: list[list[list[int]]] = [[[] for _ in range(strategy.dp)] for _ in range(strategy.pp)]
    at = {rank: mesh.index(rank) for rank in range(mesh.size)}
    for rank in sorted(at, key=lambda rank: (at[rank]["cp"], at[rank]["tp"])):
        stages[at[rank]["pp"]][at[rank]["dp"]].append(rank)
    return [[tuple(unit) for unit in stage] for stage in stages]


def _placed(strategy: Strategy, stages: Sequence[Sequence[tuple[int, ...]]]) -> Strategy | None:
    """`strategy` with these groups at its places; None where ranks would not ascend along an axis."""
    plain = replace(strategy, places=(), speeds=())
    places = [0] * strategy.mesh.size
    for at, unit in zip(
        (unit for stage in _units(plain) for unit in stage), (unit for stage in stages for unit in stage), strict=True
    ):
        for place, rank in zip(at, unit, strict=True):
            places[rank] = place
    try:
        return replace(strategy, places=tuple(places))
    except StrategyError:
        return None


def _divisions(strategy: Strategy, costs: Sequence[float]) -> Iterator[list[list[tuple[int, ...]]]]:
    """Ways to divide the groups over the stages that are worth a look."""
    now = _units(strategy)
    units = sorted(unit for stage in now for unit in stage)
    count = factorial(len(units)) // factorial(strategy.dp) ** strategy.pp
    if strategy.dp == 1 and len(ranks_of_stages(strategy)) == strategy.pp:
        yield from _of_a_line(strategy, units, costs)
    elif count <= _DIVISIONS:
        yield from _every(units, strategy.dp)
    else:
        # Groups of one speed in one stage, the fastest first; and the exchange of any two of what there is.
        by_speed = sorted(units, key=lambda unit: (-strategy.speeds[unit[0]], unit))
        for order in (by_speed, by_speed[::-1]):
            yield [sorted(order[start : start + strategy.dp]) for start in range(0, len(order), strategy.dp)]
        for a, b in combinations(range(len(units)), 2):
            if strategy.speeds[units[a][0]] != strategy.speeds[units[b][0]]:
                other = {units[a]: units[b], units[b]: units[a]}
                yield [sorted(other.get(unit, unit) for unit in stage) for stage in now]


def _every(units: Sequence[tuple[int, ...]], each: int) -> Iterator[list[list[tuple[int, ...]]]]:
    if not units:
        yield []
    for stage in combinations(units, each):
        for others in _every([unit for unit in units if unit not in stage], each):
            yield [list(stage), *others]


def _of_a_line(
    strategy: Strategy, units: Sequence[tuple[int, ...]], costs: Sequence[float]
) -> Iterator[list[list[tuple[int, ...]]]]:
    """The division whose slowest stage is the shortest of all, exactly: how far blocks come with a set of the groups.

    Groups of one speed are one kind, so a set is how many of each kind are taken.
    """
    kinds = sorted({strategy.speeds[unit[0]] for unit in units})
    of_kind = [[unit for unit in units if strategy.speeds[unit[0]] == kind] for kind in kinds]
    sets = 1
    for own in of_kind:
        sets *= len(own) + 1
    if sets > _SETS:
        return
    counts = [len(own) for own in of_kind]
    at = [Fraction(0), *accumulate(map(Fraction, costs))]
    limits = sorted({(b - a) / kind for i, a in enumerate(at) for b in at[i + 1 :] for kind in kinds})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _within(limits[middle], at, kinds, counts) else (middle + 1, high)
    left = [list(own) for own in of_kind]
    found = [left[kind].pop(0) for kind in _within(limits[low], at, kinds, counts)]
    yield [[unit] for unit in found]
    # Others may be as good, and wait less while the pipeline fills.
    for a, b in combinations(range(len(found)), 2):
        other = {found[a]: found[b], found[b]: found[a]}
        yield [[other.get(unit, unit)] for unit in found]


def _within(limit: Fraction, at: Sequence[Fraction], speeds: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Which kind of device each stage has, so that none takes longer than `limit`; [] where there is no such order.

    at: sum of costs before each block. counts: devices of each of `speeds`.
    """
    blocks, all_of_them = len(at) - 1, tuple(counts)
    # Of a set: the blocks at which its last stage may end, as bits. To end farther is not always better, since no later
    # stage may be empty, and its device may be too slow for the block that comes next.
    ends: dict[tuple[int, ...], int] = {}

    def reach(start: int, kind: int) -> int:
        return bisect_right(at, at[start] + limit * speeds[kind]) - 1

    for some in product(*(range(count + 1) for count in counts)):  # a set comes behind those with one device less
        found = int(not any(some))
        for kind, before in _one_less(some):
            for start in _bits(ends[before]):
                stop = reach(start, kind)
                found |= (1 << stop + 1) - (1 << start + 1)
        ends[some] = found
    order, some, stop = list[int](), all_of_them, blocks
    if not ends[some] >> blocks & 1:
        return []
    while any(some):
        kind, before, start = next(
            (kind, before, start)
            for kind, before in _one_less(some)
            for start in _bits(ends[before])
            if start < stop <= reach(start, kind)
        )
        order.insert(0, kind)
        some, stop = before, start
    return order


def _one_less(some: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    for kind, count in enumerate(some):
        if count:
            yield kind, (*some[:kind], count - 1, *some[kind + 1 :])


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1
