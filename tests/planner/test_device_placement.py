"""Test that no other assignment of devices to stages, with its shares of rows and blocks, is faster."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest

from nbkit.device_speeds import of_stages
from nbkit.errors import StrategyError
from nbkit.mesh import Mesh
from nbkit.planner.stages import best_places, computing_seconds, rank_seconds
from nbkit.rank.train.control.rebalance import better
from nbkit.strategy import Strategy


@pytest.mark.parametrize("seed", range(30))
def test_no_assignment_of_devices_to_stages_has_a_faster_slowest_stage(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.choice([2, 3, 4])
    costs = tuple(float(draw.randint(1, 9)) for _ in range(draw.randint(stages, 8)))
    speeds = tuple(draw.randint(1, 4) for _ in range(stages))

    found = best_places(Strategy(pp=stages, speeds=speeds), 1, costs)

    cuts = [list(pairwise([0, *cut, len(costs)])) for cut in combinations(range(1, len(costs)), stages - 1)]
    every = (
        max(sum(costs[a:b]) / s for (a, b), s in zip(c, p, strict=True)) for c in cuts for p in permutations(speeds)
    )
    said = found.speeds or (1,) * stages  # in lowest terms
    assert max(rank_seconds(found, 1, costs)) * said[0] / speeds[0] == pytest.approx(min(every) / sum(costs))
    assert Strategy.parse(str(found), stages) == found


@pytest.mark.parametrize("speeds", [(2, 1, 1, 2), (1, 3, 2, 2), (4, 1, 2, 1), (1, 1, 1, 3)])
def test_no_assignment_with_replicas_has_a_faster_slowest_rank(speeds: tuple[int, ...]) -> None:
    strategy, costs = Strategy(dp=2, pp=2, speeds=speeds), (3.0, 1.0, 1.0, 1.0, 2.0, 1.0)
    found = best_places(strategy, 24, costs)

    every = []
    for places in permutations(range(4)):
        try:
            every.append(max(rank_seconds(replace(strategy, places=places), 24, costs)))
        except StrategyError:  # the ranks of a stage are not in ascending order
            continue
    assert len(every) == 6 and max(rank_seconds(found, 24, costs)) == pytest.approx(min(every))


@pytest.mark.long
def test_the_assignment_on_a_larger_cluster_is_not_slower_than_the_order_of_ranks() -> None:
    draw = random.Random(5)
    costs = tuple(draw.uniform(1, 3) for _ in range(24))
    for mesh in ({"dp": 2, "pp": 8}, {"dp": 2, "tp": 2, "pp": 4}):
        size = Mesh(**mesh).size
        each = mesh.get("tp", 1)
        speeds = tuple(s for _ in range(size // each) for s in [draw.randint(1, 3)] * each)
        strategy = Strategy(**mesh, speeds=speeds)
        found = best_places(strategy, 64, costs)
        took, usual = (max(rank_seconds(one, 64, costs)) for one in (found, strategy))
        assert took <= usual * (1 + 1e-6)
        assert {rank for group in found.mesh.groups("tp") for rank in group} == set(range(size))


def test_places_puts_each_rank_at_its_place_in_the_mesh() -> None:
    strategy = Strategy.parse("dp=2 pp=2 places=2:0:1:3 speeds=1:2:2:1", 4)

    assert strategy.mesh.groups("pp") == [(1, 0), (2, 3)] and strategy.mesh.groups("dp") == [(0, 3), (1, 2)]
    assert strategy.mesh.index(0) == {"pp": 1, "dp": 0, "cp": 0, "tp": 0}
    assert of_stages(strategy.speeds, strategy.mesh) == (2, 1)
    assert strategy.composed == Strategy(dp=2, pp=2, speeds=(2, 2, 1, 1))
    assert Strategy.parse("pp places=0:1", 2) == Strategy(pp=2)
    assert "each rank is at its own" in Strategy.parse("pp places=0:1", 2).without_effect[0]
    for text in ("pp places=0:0", "pp places=1:2", "pp places=1", "ddp places=1:0", "pp places=a:b"):
        with pytest.raises(StrategyError) as raised:
            Strategy.parse(text, 2)
        if "a:b" not in text:
            Strategy.parse(f"pp {raised.value.hint}", 2)


def test_rebalancing_moves_a_stage_to_another_device_if_moving_blocks_is_not_enough() -> None:
    # The first block is half of the work, and its rank has become four times as slow as the other.
    costs = (3.0, 1.0, 1.0, 1.0)
    found = better(Strategy(pp=2), 16, costs, (2.0, 0.5))
    assert found is not None and found[0].places == (1, 0) and found[0].speeds
    alone = better(Strategy(pp=2), 16, costs, (2.0, 0.5), movable=False)
    assert (alone[1] if alone else 0.0) < found[1] - 0.05
    # If moving blocks is as good, devices stay where they are.
    even = better(Strategy(pp=2), 16, (1.0,) * 12, (0.5, 1.0))
    assert even is not None and not even[0].places
    # At equal speeds, the original places are at least as fast.
    speeds = [1.0, 1.0]
    assert computing_seconds(found[0], 16, costs, speeds) >= computing_seconds(Strategy(pp=2), 16, costs, speeds)
