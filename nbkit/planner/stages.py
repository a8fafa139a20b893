"""Divides the blocks of a model over the stages of a pipeline, and the stages over ranks of equal or unequal speed.

`partition` makes the slowest stage as fast as possible. It is a dynamic program over (stage, first block), exact in
whole numbers: the minimax of contiguous partition, as in PipeDream (Narayanan et al. 2019, section 3.1) without its
replication of stages.

`best_speeds` divides rows and blocks over ranks of unequal speed. It compares divisions by the simulated time of the
schedule. The longest stage alone does not determine the time of a step: while a pipeline fills and drains, ranks also
wait for other stages. So a slow last stage should have a little less than its even share. The search moves one cut by
one block at a time. For given stages, the rows are divided in the best way.

`best_places` chooses which device takes which stage. A stage holds whole, consecutive blocks, so a fast device may suit
one place better than another: if blocks take 4, 1 and 1, the first stage needs the faster of two devices. A tensor or
context group is placed as a whole. Within a stage, ranks are in ascending order, because process groups number them so.
If each stage has one rank, or one group, the best order is found exactly, by a dynamic program over the set of ranks
that are placed. With data parallelism, every division of the groups over the stages is tried, up to a limit. Above the
limit, only exchanges of two groups are tried.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, combinations, pairwise, product
from math import factorial, inf, lcm

from nbkit import schedules
from nbkit.device_speeds import of_stages, rows_by_speed
from nbkit.errors import StrategyError
from nbkit.schedules import Schedule, simulate
from nbkit.strategy import Strategy


def partition(costs: Sequence[float], stages: int, speeds: Sequence[Fraction | int] = ()) -> list[tuple[int, int]]:
    """Return (first block, one past the last block) of each stage. Every stage holds at least one block.

    costs: the cost of each block, in any unit. speeds: the speed of each stage, if they are unequal; a stage takes
    cost / speed. The longest stage is as short as any contiguous partition can make it. Among such partitions, the one
    with the most even stages is chosen (least sum of squares), then the one whose earlier stages hold more.
    Raises StrategyError if there are fewer blocks than stages, or if a cost is not a number >= 0.
    """
    _check(costs, stages)
    at = [0, *accumulate(_whole(costs))]
    slow = _whole([1 / Fraction(speed) for speed in speeds] or [1] * stages)
    limit = _shortest_longest(at, slow)
    rest = _evenest(at, slow, limit)
    ranges, start = [], 0
    for stage in range(stages):
        later = stages - stage - 1
        fitting = [
            stop
            for stop in range(start + 1, len(costs) - later + 1)
            if (time := slow[stage] * (at[stop] - at[start])) <= limit
            and time**2 + rest[stage + 1][stop] == rest[stage][start]
        ]
        ranges.append((start, fitting[-1]))
        start = fitting[-1]
    return ranges


def ranks_of_stages(strategy: Strategy) -> tuple[int, ...]:
    """Return the rank along pp of each stage of the model, in order.

    gpipe and 1f1b have one stage per rank. interleaved and zb give each rank two stages, in two rounds over the ranks.
    zbv and dualpipev go down the ranks and back up, so the first rank holds the first stage and the last.
    """
    return schedules.type_of(strategy.schedule or "1f1b").ranks_of_stages(strategy.pp)


def place(costs: Sequence[float], strategy: Strategy) -> list[list[tuple[int, int]]]:
    """Return the balanced ranges of blocks that each rank along pp holds."""
    ranks, ranges = ranks_of_stages(strategy), stage_ranges(costs, strategy)
    return [[cut for cut, holder in zip(ranges, ranks, strict=True) if holder == rank] for rank in range(strategy.pp)]


def stage_ranges(costs: Sequence[float], strategy: Strategy) -> list[tuple[int, int]]:
    """Return (first block, one past the last block) of each stage, balanced for the speeds of the ranks.

    Raises StrategyError as `partition` does.
    """
    ranks = ranks_of_stages(strategy)
    if len(costs) < len(ranks):
        what, numbers, hint = too_few(strategy, len(costs))
        raise StrategyError(what, numbers=numbers, hint=hint)
    speeds = of_stages(strategy.speeds, strategy.mesh) if strategy.speeds else ()
    return partition(costs, len(ranks), [speeds[rank] for rank in ranks] if speeds else ())


def too_few(strategy: Strategy, blocks: int) -> tuple[str, str, str]:
    """Return the error texts for a pipeline with more stages than the model has blocks: (what, numbers, hint)."""
    pp, schedule, stages = strategy.pp, strategy.schedule, len(ranks_of_stages(strategy))
    each = stages // pp
    hint = f"pp={blocks // each} or fewer" if blocks >= 2 * each else ""
    if each > 1 and blocks >= pp:
        hint += " or schedule=1f1b, which has one stage a rank" if hint else "schedule=1f1b: one stage a rank"
    return (
        f"The model has too few blocks: every stage of {schedule} holds at least one.",
        f"pp {pp} x {each} stage{'s' * (each > 1)} a rank = {stages} stages, {blocks} block{'s' * (blocks != 1)}",
        hint or "ddp",
    )


def spelled(ranges: Sequence[tuple[int, int]]) -> str:
    """Return how many blocks each stage holds, for people: "3+3+2+2"."""
    return "+".join(str(stop - start) for start, stop in ranges)


def _check(costs: Sequence[float], stages: int) -> None:
    if not 1 <= stages <= len(costs):
        raise StrategyError(
            "Each stage of a pipeline needs at least one block.",
            numbers=f"{len(costs)} block{'s' * (len(costs) != 1)}, {stages} stages",
            hint=f"pp={max(len(costs), 1)} or fewer",
        )
    if wrong := [cost for cost in costs if not 0 <= cost < inf]:
        raise StrategyError(
            "The cost of a block must be a number >= 0.", numbers=f"{wrong[0]}", hint="costs=[1.0, 2.0, ...]"
        )


def _whole(values: Sequence[float | Fraction]) -> list[int]:
    """Return the values times one common factor, as whole numbers, so that equal sums are exactly equal."""
    exact = [Fraction(value) for value in values]
    factor = lcm(*(value.denominator for value in exact))
    return [int(value * factor) for value in exact]


def _shortest_longest(at: list[int], slow: list[int]) -> int:
    """Return the smallest possible time of the longest stage.

    at: sum of costs before each block. slow: time of each stage per unit of cost.
    """
    blocks, never, stages = len(at) - 1, at[-1] * max(slow) + 1, len(slow)
    # longest[start]: the smallest time of the longest stage, if blocks start.. are divided over stages stage..
    longest = [never] * blocks + [0]
    for stage in reversed(range(stages)):
        later = stages - stage - 1
        following, longest = longest, [never] * (blocks + 1)
        for start in range(stage, blocks - later):
            least = never
            for stop in range(start + 1, blocks - later + 1):
                # A later cut only makes this stage longer.
                if (time := slow[stage] * (at[stop] - at[start])) >= least:
                    break
                if (most := following[stop]) < least:
                    least = most if most > time else time
            longest[start] = least
    return longest[0]


def _evenest(at: list[int], slow: list[int], limit: int) -> list[list[int]]:
    """Return [stage][start]: the least sum of squared times if blocks start.. are divided over stages stage..

    No stage may take longer than `limit`.
    """
    blocks, stages = len(at) - 1, len(slow)
    never = stages * limit**2 + 1
    rest = [[never] * (blocks + 1) for _ in range(stages)] + [[never] * blocks + [0]]
    for stage in reversed(range(stages)):
        later = stages - stage - 1
        following = rest[stage + 1]
        for start in range(stage, blocks - later):
            least = never
            for stop in range(start + 1, blocks - later + 1):
                if (time := slow[stage] * (at[stop] - at[start])) > limit:
                    break
                if (squares := time * time + following[stop]) < least:
                    least = squares
            rest[stage][start] = least
    return rest


_FORWARD = 1 / 3
"""The share of forward in the compute: a backward pass takes twice as long as its forward."""
_FINE = 100
_MOST, _MANY, _FEW = 64, 1024, 32
"""Limits on stages times micro-batches. Up to _MOST, a search simulates each division. Up to _MANY, a forecast is
simulated if its stages are unequal; up to _FEW, also if they are equal and messages take time."""
_EQUAL = 1e-6
_SIMULATED = 0.03
"""The share of a step that another division has to save. Waits for unequal stages are longer than simulated: with 9 and
3 blocks on two ranks, the second at half speed, a step was 9 % longer; with 8 and 4, less than 1 % (python -m bench
slow_rank)."""


def computing_seconds(strategy: Strategy, batch: int, costs: Sequence[float], speeds: Sequence[float]) -> float:
    """Return the seconds of a step of `batch` rows, from its first forward to its last backward.

    They include the time that ranks wait for each other. Links take no time. costs: the cost of each block, in any
    unit. speeds: the speed of each rank, in rows of the whole model per second, forward and backward together.
    """
    ranges = stage_ranges(costs, strategy) if strategy.pp > 1 else [(0, len(costs))]
    rows = [stop - start for start, stop in strategy.rows(batch)]
    return max(n * each for n, each in zip(rows, _row_seconds(strategy, ranges, costs, speeds), strict=True))


def best_speeds(strategy: Strategy, batch: int, costs: Sequence[float], speeds: Sequence[float]) -> tuple[int, ...]:
    """Return the `speeds=` that give the shortest step on ranks of these speeds. Arguments: see `computing_seconds`.

    These are the given speeds, unless another division saves more than the error of the simulation.
    """
    fastest = max(speeds)
    own = tuple(max(round(_FINE * speed / fastest), 1) for speed in speeds)
    if _stages_per_rank(strategy.schedule) != 1 or strategy.pp * (strategy.microbatches or 1) > _MOST:
        return own
    ranges = stage_ranges(costs, replace(strategy, speeds=own))
    now = computing_seconds(replace(strategy, speeds=own), batch, costs, speeds)
    found, least = own, (1 - _SIMULATED) * now
    while True:
        tried = [(_spelled(strategy, cut, batch, costs, speeds), cut) for cut in _neighbours(ranges)]
        timed = [(computing_seconds(replace(strategy, speeds=s), batch, costs, speeds), s, cut) for s, cut in tried]
        took, better, ranges = min(timed, default=(least, own, ranges))
        if took >= least:
            return found
        found, least = better, took


def _stages_per_rank(schedule: str | None) -> int:
    return schedules.type_of(schedule).stages_per_rank if schedule else 0


@lru_cache(maxsize=4096)
def makespan(
    schedule: str | None,
    micros: int,
    stages: tuple[float, ...],
    transfer: float = 0.0,
    *,
    ranks: int = 0,
    forward: float = _FORWARD,
) -> float:
    """Return the seconds of a pipeline's step.

    stages: seconds of each stage, for all micro-batches, forward and backward. transfer: seconds of a message between
    two ranks. schedule: None if there is no pipeline. ranks: the number of ranks; 0 if it follows from the stages per
    rank of the schedule. forward: the share of forward in the seconds of a stage.
    """
    if schedule is None:
        return sum(stages)
    ranks = ranks or len(stages) // _stages_per_rank(schedule)
    if _is_sum(schedule, micros, stages, transfer, ranks):
        return _full(schedule, micros, stages, transfer, ranks)
    each, back = tuple(forward * stage / micros for stage in stages), (1 - forward) / 2 / micros
    half = tuple(back * stage for stage in stages)
    run = Schedule.of(schedule, ranks, micros)
    return simulate(run, forward=each, backward_input=half, backward_weight=half, transfer=transfer).makespan


def _is_sum(schedule: str, micros: int, stages: Sequence[float], transfer: float, ranks: int) -> bool:
    """Return True if `_full` is exact, or if a simulation is not worth its time."""
    if schedule not in ("gpipe", "1f1b", "interleaved"):
        return False
    operations = micros * len(stages)
    if operations > _MANY or len(stages) > 2 * ranks:
        return True
    *others, last = stages
    most = max(others, default=last)
    even = most - min(others, default=last) <= _EQUAL * most and last >= (1 - _EQUAL) * most
    whole = schedule != "interleaved" or micros % ranks == 0
    return even and whole and (not transfer or operations > _FEW)


def _full(schedule: str, micros: int, stages: Sequence[float], transfer: float, ranks: int) -> float:
    """Return the makespan as a sum. It is exact if all stages are equal, or if only the last one is longer.

    While the pipeline is full, the busiest rank never waits. Each other stage adds the time of one micro-batch, while
    the pipeline fills and drains.
    """
    sums = [sum(stages[rank::ranks]) for rank in range(ranks)]
    filling = (sum(stages[:ranks]) - max(stages[:ranks])) / micros
    waits = 2 * (len(stages) - 1) * transfer
    if schedule == "1f1b" and ranks > 1:
        # Only `ranks` micro-batches are under way, so the first rank waits until one comes back. They take the time of
        # all stages and messages, if this is longer than the compute of the busiest rank.
        around = (sum(stages) + 2 * (ranks - 1) * transfer * micros) / ranks
        waits = max(waits, around - max(sums) + 2 * (ranks - 2) * transfer)
    return max(sums) + filling + waits


def _row_seconds(
    strategy: Strategy, ranges: Sequence[tuple[int, int]], costs: Sequence[float], speeds: Sequence[float]
) -> list[float]:
    """Return the seconds per row of each replica's pipeline."""
    mesh, whole, homes = strategy.mesh, sum(costs), ranks_of_stages(strategy)
    found = []
    for first in mesh.ranks("dp", 0):
        ranks = mesh.ranks("pp", first)
        stages = [
            sum(costs[start:stop]) / whole / speeds[ranks[home]]
            for (start, stop), home in zip(ranges, homes, strict=True)
        ]
        found.append(makespan(strategy.schedule, strategy.microbatches or 1, tuple(stages)))
    return found


def _neighbours(ranges: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield every way to move one cut by one block."""
    cuts = [0, *(stop for _, stop in ranges)]
    for i in range(1, len(cuts) - 1):
        for step in (-1, 1):
            if cuts[i - 1] < cuts[i] + step < cuts[i + 1]:
                yield list(pairwise([*cuts[:i], cuts[i] + step, *cuts[i + 1 :]]))


def _spelled(
    strategy: Strategy,
    ranges: Sequence[tuple[int, int]],
    batch: int,
    costs: Sequence[float],
    speeds: Sequence[float],
) -> tuple[int, ...]:
    """Return the speeds for which the even division is these stages, with the rows that suit them."""
    mesh, whole = strategy.mesh, sum(costs)
    seconds = _row_seconds(strategy, ranges, costs, speeds)
    rows = rows_by_speed(batch, tuple(1 / Fraction(each) for each in seconds))
    shares = [max(round(_FINE * sum(costs[start:stop]) / whole), 1) for start, stop in ranges]
    places = [mesh.index(rank) for rank in range(mesh.size)]
    return tuple(max(rows[at["dp"]][1] - rows[at["dp"]][0], 1) * shares[at["pp"]] for at in places)


_SETS, _DIVISIONS = 512, 3000
_SAME = 1e-6


@lru_cache(maxsize=32)
def best_places(strategy: Strategy, batch: int, costs: tuple[float, ...]) -> Strategy:
    """Return `strategy` with the best `places=`: the busiest rank has the least to do, then the step is the shortest.

    The places stay the same if no others are better. Links take no time. batch: rows of a global batch. costs: the cost
    of each block, in any unit.
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
    """Return the compute time of each rank in a step, as rows of the whole model / speed.

    Stages and rows are divided by `speeds=`.
    """
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
    """Return [stage][replica]: the ranks of a group along cp and tp, in the order of the mesh."""
    mesh = strategy.mesh
    stages: list[list[list[int]]] = [[[] for _ in range(strategy.dp)] for _ in range(strategy.pp)]
    at = {rank: mesh.index(rank) for rank in range(mesh.size)}
    for rank in sorted(at, key=lambda rank: (at[rank]["cp"], at[rank]["tp"])):
        stages[at[rank]["pp"]][at[rank]["dp"]].append(rank)
    return [[tuple(unit) for unit in stage] for stage in stages]


def _placed(strategy: Strategy, stages: Sequence[Sequence[tuple[int, ...]]]) -> Strategy | None:
    """Return `strategy` with these groups at its places, or None if ranks would not ascend along an axis."""
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
    """Yield the divisions of the groups over the stages that are worth trying."""
    now = _units(strategy)
    units = sorted(unit for stage in now for unit in stage)
    count = factorial(len(units)) // factorial(strategy.dp) ** strategy.pp
    if strategy.dp == 1 and len(ranks_of_stages(strategy)) == strategy.pp:
        yield from _of_a_line(strategy, units, costs)
    elif count <= _DIVISIONS:
        yield from _every(units, strategy.dp)
    else:
        # Put groups of equal speed into one stage, the fastest first or last. Then try every exchange of two groups.
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
    """Yield the division whose slowest stage is as fast as possible, then its exchanges of two groups.

    The first is exact: it follows from the number of blocks that each set of groups can hold. Groups of equal speed are
    one kind, so a set is a number of groups of each kind. Yields nothing if there are too many sets.
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
    # Other orders may have an equally fast slowest stage, and wait less while the pipeline fills.
    for a, b in combinations(range(len(found)), 2):
        other = {found[a]: found[b], found[b]: found[a]}
        yield [[other.get(unit, unit)] for unit in found]


def _within(limit: Fraction, at: Sequence[Fraction], speeds: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return a kind of device for each stage so that no stage takes longer than `limit`; [] if that is impossible.

    at: sum of costs before each block. counts: number of devices of each of `speeds`.
    """
    blocks, all_of_them = len(at) - 1, tuple(counts)
    # For each set: the blocks at which its last stage may end, as bits. A later end is not always better: no later
    # stage may be empty, and the next device may be too slow for the next block.
    ends: dict[tuple[int, ...], int] = {}

    def reach(start: int, kind: int) -> int:
        return bisect_right(at, at[start] + limit * speeds[kind]) - 1

    for some in product(*(range(count + 1) for count in counts)):  # a set comes after the sets with one device less
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
