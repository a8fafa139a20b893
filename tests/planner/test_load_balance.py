"""Test that rows and blocks for ranks of unequal speed make a simulated step as short as the best division."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from nbkit.planner.stages import _full, best_speeds, computing_seconds, makespan
from nbkit.schedules import Schedule, simulate
from nbkit.strategy import Strategy

ROWS, BLOCKS = 12, 12


def every_division(strategy: Strategy, costs: list[float], speeds: list[float]) -> float:
    """Return the seconds of the shortest step among all divisions into whole rows and blocks."""
    mesh, whole = strategy.mesh, sum(costs)
    best = float("inf")
    for cut in combinations(range(1, BLOCKS), strategy.pp - 1):
        ranges = list(pairwise([0, *cut, BLOCKS]))
        row = []
        for first in mesh.ranks("dp", 0):
            ranks = zip(ranges, mesh.ranks("pp", first), strict=True)
            each = [sum(costs[a:b]) / whole / speeds[rank] / 3 / (strategy.microbatches or 1) for (a, b), rank in ranks]
            run = Schedule.of(strategy.schedule or "1f1b", strategy.pp, strategy.microbatches or 1)
            row.append(simulate(run, forward=each, backward_input=each, backward_weight=each).makespan)
        for rows in product(range(1, ROWS), repeat=strategy.dp - 1):
            last = ROWS - sum(rows)
            if last > 0:
                best = min(best, max(n * seconds for n, seconds in zip((*rows, last), row, strict=True)))
    return best


@pytest.mark.parametrize(
    ("mesh", "slow"),
    [({"pp": 2}, 0), ({"pp": 2}, 1), ({"pp": 3}, 1), ({"dp": 2, "pp": 2}, 1), ({"dp": 2, "pp": 2}, 2), ({"dp": 3}, 1)],
)
def test_the_division_for_a_rank_at_half_speed_is_near_the_best(mesh: dict[str, int], slow: int) -> None:
    draw = random.Random(slow)
    for strategy in (Strategy(**mesh), Strategy(**mesh, schedule="gpipe" if "pp" in mesh else None)):
        for costs in ([1.0] * BLOCKS, [draw.uniform(0.5, 2.0) for _ in range(BLOCKS)]):
            speeds = [0.5 if rank == slow else 1.0 for rank in range(strategy.mesh.size)]
            found = replace(strategy, speeds=best_speeds(strategy, ROWS, costs, speeds))

            took = computing_seconds(found, ROWS, costs, speeds)
            assert took <= 1.031 * every_division(strategy, costs, speeds)


def test_a_slow_last_stage_gets_less_only_if_the_gain_exceeds_the_simulation_error() -> None:
    # 8 and 4 blocks take equally long. With 9 + 3 the simulated step is 1/40 shorter, which is within the error.
    strategy, costs, speeds = Strategy(pp=2), [1.0] * BLOCKS, [1.0, 0.5]
    assert best_speeds(strategy, ROWS, costs, speeds) == (100, 50)
    least, even = (computing_seconds(replace(strategy, speeds=each), ROWS, costs, speeds) for each in ((3, 1), (2, 1)))
    assert least / even == pytest.approx(117 / 120)
    # At 0.45 of the speed, even shares are 8 + 4 too, but 9 + 3 are more than 5 % faster.
    assert best_speeds(strategy, ROWS, costs, [1.0, 0.45]) == (900, 300)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("ranks, micros", [(2, 8), (4, 16), (8, 16), (4, 32)])
@pytest.mark.parametrize("last", [1.0, 1.2, 2.0])
def test_the_sum_for_long_pipelines_equals_the_simulation(schedule: str, ranks: int, micros: int, last: float) -> None:
    each = [2.0] * (ranks * (2 if schedule == "interleaved" else 1))
    each[-1] *= last
    for transfer in (0.0, 0.3):
        run = simulate(
            Schedule.of(schedule, ranks, micros),
            forward=each,
            backward_input=each,
            backward_weight=each,
            transfer=transfer,
        )
        stages = tuple(3 * micros * one for one in each)
        assert _full(schedule, micros, stages, transfer, ranks) == pytest.approx(run.makespan, rel=3e-2 * transfer)


def test_the_sum_for_uneven_stages_is_never_shorter_than_the_simulation() -> None:
    for stages in ((8.0, 8.0, 8.0, 12.0), (12.0, 8.0, 8.0, 8.0), (8.0, 12.0, 9.0, 8.0)):
        assert _full("1f1b", 8, stages, 0.0, 4) >= makespan("1f1b", 8, stages) - 1e-9
