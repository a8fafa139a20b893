"""Test that no other partition of blocks over stages is better."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations, pairwise

import pytest

from nbkit.errors import StrategyError
from nbkit.planner.stages import partition, place, ranks_of_stages, spelled
from nbkit.schedules import BUILT_IN as SCHEDULES
from nbkit.schedules import Schedule
from nbkit.strategy import Strategy


def by_trying_all(costs: list[float], stages: int) -> list[tuple[int, int]]:
    """Return the best contiguous partition by (longest stage, sum of squares), with larger stages first."""

    def worth(cut: list[tuple[int, int]]) -> tuple[object, ...]:
        times = [sum(map(Fraction, costs[a:b])) for a, b in cut]
        return max(times), sum(t * t for t in times), [-b for _, b in cut]

    every = []
    for inner in combinations(range(1, len(costs)), stages - 1):
        at = [0, *inner, len(costs)]
        every.append(list(pairwise(at)))
    return min(every, key=worth)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_partition_is_better(seed: int) -> None:
    draw = random.Random(seed)
    blocks = draw.randint(1, 12)
    # Few values make ties, thirds make sums that floating point rounds, and 0 is a block without work.
    values = draw.choice([[1.0], [0.1, 0.2, 0.3], [0.0, 1 / 3, 2 / 3], [draw.uniform(0.5, 5) for _ in range(9)]])
    costs = [draw.choice(values) for _ in range(blocks)]
    for stages in range(1, blocks + 1):
        assert partition(costs, stages) == by_trying_all(costs, stages)


@pytest.mark.parametrize(
    ("blocks", "stages", "text"), [(10, 4, "3+3+2+2"), (8, 4, "2+2+2+2"), (10, 5, "2+2+2+2+2"), (5, 3, "2+2+1")]
)
def test_equal_blocks_are_divided_by_number(blocks: int, stages: int, text: str) -> None:
    assert spelled(partition([0.1] * blocks, stages)) == text


def test_a_large_model_is_partitioned_without_gaps() -> None:
    draw = random.Random(0)
    ranges = partition([draw.uniform(1, 2) for _ in range(96)], 16)

    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])] and ranges[-1][1] == 96


@pytest.mark.parametrize(
    ("schedule", "ranks", "ranges"),
    [
        ("1f1b", (0, 1, 2), [[(0, 3)], [(3, 5)], [(5, 7)]]),
        ("zb", (0, 1, 2, 0, 1, 2), [[(0, 2), (4, 5)], [(2, 3), (5, 6)], [(3, 4), (6, 7)]]),
        ("zbv", (0, 1, 2, 2, 1, 0), [[(0, 2), (6, 7)], [(2, 3), (5, 6)], [(3, 4), (4, 5)]]),
    ],
)
def test_each_schedule_places_its_stages_on_ranks(
    schedule: str, ranks: tuple[int, ...], ranges: list[list[tuple[int, int]]]
) -> None:
    strategy = Strategy(pp=3, schedule=schedule)

    assert ranks_of_stages(strategy) == ranks
    assert place([1.0] * 7, strategy) == ranges
    assert ranks_of_stages(Strategy(dp=2)) == (0,)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 8])
def test_stages_are_on_the_ranks_where_the_schedule_runs_them(schedule: str, pp: int) -> None:
    run = Schedule.of(schedule, pp, 2 * pp)

    assert ranks_of_stages(Strategy(pp=pp, schedule=schedule)) == tuple(map(run.rank_of, range(run.num_stages)))


@pytest.mark.parametrize(
    ("costs", "stages", "words"),
    [
        ([1.0] * 3, 4, "3 blocks, 4 stages"),
        ([1.0], 0, "1 block, 0 stages"),
        ([], 1, "0 blocks, 1 stages"),
        ([1.0, -1.0], 2, "-1.0"),
        ([1.0, float("nan")], 2, "nan"),
        ([1.0, float("inf")], 2, "inf"),
    ],
)
def test_a_partition_that_is_impossible_is_refused_with_a_hint(costs: list[float], stages: int, words: str) -> None:
    with pytest.raises(StrategyError) as raised:
        partition(costs, stages)

    assert words in str(raised.value) and raised.value.hint


def test_too_few_blocks_for_several_stages_per_rank_are_refused_with_what_fits() -> None:
    with pytest.raises(StrategyError, match="8 stages, 4 blocks") as refused:
        place((1.0,) * 4, Strategy.parse("pp=4 schedule=zbv", 4))
    assert refused.value.hint.startswith("pp=2 or fewer or schedule=1f1b")
