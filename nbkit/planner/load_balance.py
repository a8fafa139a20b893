"""Divides rows and blocks over ranks of unequal speed, judged by the simulated time of the pipeline's schedule.

The longest stage alone does not say how long a step is: while a pipeline fills and drains, other stages are waited for,
so that a slow last stage is better off with a little less than its even share. Stages are found by moving one cut by
one block at a time; given the stages, no other whole numbers of rows are better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from nbkit.device_speeds import rows_by_speed
from nbkit.planner.stage_partition import ranks_of_stages, stage_ranges
from nbkit.schedules import Schedule, simulate
from nbkit.strategy import Strategy

_FORWARD = 1 / 3
"""A backward pass takes twice as long as its forward."""
_FINE = 100
_MOST, _MANY, _FEW = 64, 1024, 32
"""Stages times micro-batches up to which a division is worth its simulations, and a forecast is worth one, of equal
stages too."""
_EQUAL = 1e-6
_SIMULATED = 0.03
"""Of a step, by which a division has to win. Unequal stages wait longer than simulated: with 9 and 3 blocks on two
ranks, the second at half speed, a step was 9 % longer, with 8 and 4 less than 1 % (python -m bench slow_rank)."""


def computing_seconds(strategy: Strategy, batch: int, costs: Sequence[float], speeds: Sequence[float]) -> float:
    """Of a step of `batch` rows, from its first forward to its last backward, with what ranks wait for each other.

    costs: of each block, in any unit. speeds: of each rank, in rows of the whole model per second, forward and
    backward. Links take no time.
    """
    ranges = stage_ranges(costs, strategy) if strategy.pp > 1 else [(0, len(costs))]
    rows = [stop - start for start, stop in strategy.rows(batch)]
    return max(n * each for n, each in zip(rows, _row_seconds(strategy, ranges, costs, speeds), strict=True))


def best_speeds(strategy: Strategy, batch: int, costs: Sequence[float], speeds: Sequence[float]) -> tuple[int, ...]:
    """What `speeds=` has to be for the shortest step on ranks of such speeds; arguments as of `computing_seconds`.

    The measured speeds themselves, unless another division is shorter by more than what a simulation leaves out.
    """
    fastest = max(speeds)
    own = tuple(max(round(_FINE * speed / fastest), 1) for speed in speeds)
    if strategy.schedule not in ("gpipe", "1f1b") or strategy.pp * (strategy.microbatches or 1) > _MOST:
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
    """Seconds of a pipeline's step. stages: of each, for all micro-batches, forward and backward.

    transfer: of a message between two ranks. schedule: None where there is no pipeline. ranks: 0 where the schedule
    says how many stages each has. forward: the share of a stage before its backward.
    """
    if schedule is None:
        return sum(stages)
    ranks = ranks or len(stages) // (1 if schedule in ("gpipe", "1f1b") else 2)
    if _is_sum(schedule, micros, stages, transfer, ranks):
        return _full(schedule, micros, stages, transfer, ranks)
    each, back = tuple(forward * stage / micros for stage in stages), (1 - forward) / 2 / micros
    half = tuple(back * stage for stage in stages)
    run = Schedule.of(schedule, ranks, micros)
    return simulate(run, forward=each, backward_input=half, backward_weight=half, transfer=transfer).makespan


def _is_sum(schedule: str, micros: int, stages: Sequence[float], transfer: float, ranks: int) -> bool:
    """Whether no simulation is needed, or worth its time."""
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
    """The same as a sum, exact where stages are equal but for a longer last one: full, the busiest rank is never waited
    for, and each of the others is passed once on the way in and out."""
    sums = [sum(stages[rank::ranks]) for rank in range(ranks)]
    filling = (sum(stages[:ranks]) - max(stages[:ranks])) / micros
    waits = 2 * (len(stages) - 1) * transfer
    if schedule == "1f1b" and ranks > 1:
        # With as few under way as there are ranks, each comes back to the first before that one goes on: so many
        # micro-batches take all stages and all messages, if that is longer than what the busiest rank computes.
        around = (sum(stages) + 2 * (ranks - 1) * transfer * micros) / ranks
        waits = max(waits, around - max(sums) + 2 * (ranks - 2) * transfer)
    return max(sums) + filling + waits


def _row_seconds(
    strategy: Strategy, ranges: Sequence[tuple[int, int]], costs: Sequence[float], speeds: Sequence[float]
) -> list[float]:
    """Of each replica: seconds of its pipeline for each row."""
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
    """Every way to move one cut by one block."""
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
    """Speeds whose even shares are these stages, and the rows that suit them."""
    mesh, whole = strategy.mesh, sum(costs)
    seconds = _row_seconds(strategy, ranges, costs, speeds)
    rows = rows_by_speed(batch, tuple(1 / Fraction(each) for each in seconds))
    shares = [max(round(_FINE * sum(costs[start:stop]) / whole), 1) for start, stop in ranges]
    places = [mesh.index(rank) for rank in range(mesh.size)]
    return tuple(max(rows[at["dp"]][1] - rows[at["dp"]][0], 1) * shares[at["pp"]] for at in places)
