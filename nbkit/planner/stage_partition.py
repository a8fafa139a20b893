"""Divides the blocks of a model over the stages of a pipeline, so that the slowest stage is as fast as can be.

A dynamic program over (stage, first block), exact in whole numbers: the minimax of contiguous partition, as in
PipeDream (Narayanan et al. 2019, section 3.1) without its replication of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import inf, lcm

from nbkit.device_speeds import of_stages
from nbkit.errors import StrategyError
from nbkit.strategy import Strategy


def partition(costs: Sequence[float], stages: int, speeds: Sequence[Fraction | int] = ()) -> list[tuple[int, int]]:
    """First and one past the last block of each stage; every stage holds at least one.

    costs: of each block, in any unit. speeds: of each stage, where they are unequal: it takes its cost / speed.
    The longest stage is as short as any contiguous partition can make it; among those that reach this, the stages are
    as even as can be (least sum of squares), then earlier stages hold more.
    Raises StrategyError when there are fewer blocks than stages, or a cost that is none.
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
    """For each stage of the model, in order, its rank along pp.

    gpipe and 1f1b have one stage a rank; interleaved and zb deal two rounds of stages out; zbv and dualpipev go down
    the ranks and back up, so that the first rank holds the first stage and the last.
    """
    ranks = tuple(range(strategy.pp))
    if strategy.schedule in ("interleaved", "zb"):
        return ranks + ranks
    return ranks + ranks[::-1] if strategy.schedule in ("zbv", "dualpipev") else ranks


def place(costs: Sequence[float], strategy: Strategy) -> list[list[tuple[int, int]]]:
    """For each rank along pp, the ranges of blocks that it holds, balanced."""
    ranks, ranges = ranks_of_stages(strategy), stage_ranges(costs, strategy)
    return [[cut for cut, holder in zip(ranges, ranks, strict=True) if holder == rank] for rank in range(strategy.pp)]


def stage_ranges(costs: Sequence[float], strategy: Strategy) -> list[tuple[int, int]]:
    """First and one past the last block of each stage of a pipeline, balanced by the speeds of its ranks.

    Raises StrategyError as `partition` does.
    """
    ranks = ranks_of_stages(strategy)
    if len(costs) < len(ranks):
        what, numbers, hint = too_few(strategy, len(costs))
        raise StrategyError(what, numbers=numbers, hint=hint)
    speeds = of_stages(strategy.speeds, strategy.mesh) if strategy.speeds else ()
    return partition(costs, len(ranks), [speeds[rank] for rank in ranks] if speeds else ())


def too_few(strategy: Strategy, blocks: int) -> tuple[str, str, str]:
    """What is said where a pipeline has more stages than the model has blocks: what, numbers, hint."""
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
    """How many blocks each stage holds, for people: "3+3+2+2"."""
    return "+".join(str(stop - start) for start, stop in ranges)


def _check(costs: Sequence[float], stages: int) -> None:
    if not 1 <= stages <= len(costs):
        raise StrategyError(
            "A stage of a pipeline holds at least one block.",
            numbers=f"{len(costs)} block{'s' * (len(costs) != 1)}, {stages} stages",
            hint=f"pp={max(len(costs), 1)} or fewer",
        )
    if wrong := [cost for cost in costs if not 0 <= cost < inf]:
        raise StrategyError(
            "The cost of a block is a number >= 0.", numbers=f"{wrong[0]}", hint="costs=[1.0, 2.0, ...]"
        )


def _whole(values: Sequence[float | Fraction]) -> list[int]:
    """The values times one common factor. Equal sums stay equal, which they do not in floating point."""
    exact = [Fraction(value) for value in values]
    factor = lcm(*(value.denominator for value in exact))
    return [int(value * factor) for value in exact]


def _shortest_longest(at: list[int], slow: list[int]) -> int:
    """The shortest that the longest stage can be. at: sum of costs before each block; slow: time for a cost."""
    blocks, never, stages = len(at) - 1, at[-1] * max(slow) + 1, len(slow)
    # longest[start]: of blocks start.. over the stages from the present one on.
    longest = [never] * blocks + [0]
    for stage in reversed(range(stages)):
        later = stages - stage - 1
        following, longest = longest, [never] * (blocks + 1)
        for start in range(stage, blocks - later):
            least = never
            for stop in range(start + 1, blocks - later + 1):
                # Each later cut makes this stage longer. What is left behind it need not get faster: no stage is empty.
                if (time := slow[stage] * (at[stop] - at[start])) >= least:
                    break
                if (most := following[stop]) < least:
                    least = most if most > time else time
            longest[start] = least
    return longest[0]


def _evenest(at: list[int], slow: list[int], limit: int) -> list[list[int]]:
    """[stage][start]: the least sum of squared times of blocks start.. over stages stage.., none above `limit`."""
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
