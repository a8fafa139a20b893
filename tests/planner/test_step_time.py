"""A step that has not run is the present one, each part scaled by what it follows from."""

from __future__ import annotations

import pytest

from nbkit.planner.link_speed import Link, Way
from nbkit.planner.step_time import Seen, Sends, step_seconds
from nbkit.planner.traffic import Traffic
from nbkit.strategy import Strategy

WAYS = dict.fromkeys(("all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send"), Way(0.0, 1e9))
LINK = Link(4, WAYS, None, None, 1e10, (0,) * 4, crowded=False)
PARTS = {"compute": 1.0, "exposed": 0.75, "data": 0.1, "optimizer": 0.2, "other": 0.05}
GRADIENTS = Traffic("dp", "all_reduce", 4, 1, 10**9, "gradients")  # 1.5 s on this link, half of it hidden
DDP = Seen(Strategy.parse("ddp", 4), PARTS)
COSTS = (1.0,) * 8


def test_the_present_strategy_takes_what_it_takes() -> None:
    sends = Sends([GRADIENTS], 400)
    assert step_seconds(DDP, sends, DDP.strategy, sends, LINK, COSTS) == pytest.approx(sum(PARTS.values()))


def test_each_part_follows_from_its_own() -> None:
    zero1 = [Traffic("dp", op, 4, 1, 10**9, "") for op in ("reduce_scatter", "all_gather")]
    found = step_seconds(DDP, Sends([GRADIENTS], 400), Strategy.parse("zero1", 4), Sends(zero1, 100), LINK, COSTS)
    assert found == pytest.approx(1.0 + 0.75 + 0.1 + 0.05 + 0.05)  # a quarter of the updates

    hidden = [Traffic("tp", "all_reduce", 4, 1, 10**9, "hidden states")]
    found = step_seconds(DDP, Sends([GRADIENTS], 400), Strategy.parse("tp", 4), Sends(hidden, 100), LINK, COSTS)
    # Nothing hides what tp sends, and every rank reads all rows.
    assert found == pytest.approx(1.0 + 1.5 + 0.4 + 0.05 + 0.05)


def test_a_pipeline_idles_and_is_as_slow_as_its_longest_stage() -> None:
    even = Strategy.parse("pp microbatches=8", 4)
    found = step_seconds(DDP, Sends([GRADIENTS], 400), even, Sends([], 100), LINK, COSTS)
    assert found == pytest.approx(1.0 / (1 - 3 / 11) + 0.4 + 0.05 + 0.05)
    uneven = step_seconds(DDP, Sends([GRADIENTS], 400), even, Sends([], 100), LINK, (1.0,) * 6)
    assert uneven - 0.5 == pytest.approx(4 / 3 * (found - 0.5))


def test_across_nodes_the_slow_way_counts() -> None:
    link = Link(4, WAYS, Way(0.0, 1e10), Way(0.0, 1e9), 1e10, (0, 0, 1, 1), crowded=False)
    alone = Seen(Strategy.parse("dp=2 tp=2", 4), {"compute": 1.0})
    near = [Traffic("tp", "all_reduce", 2, 1, 10**9, "")]
    far = [Traffic("dp", "all_reduce", 2, 1, 10**9, "")]
    within, across = (
        step_seconds(alone, Sends([], 1), alone.strategy, Sends(terms, 1), link, COSTS) for terms in (near, far)
    )
    assert within == pytest.approx(1.1) and across == pytest.approx(2.0)
