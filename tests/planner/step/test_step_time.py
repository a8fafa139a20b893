"""Test that the prediction of a step scales each part of the measured step by what the part depends on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nbkit.mesh import BETWEEN, WITHIN
from nbkit.planner.link_speed import OperationSpeed, WorldLinks
from nbkit.planner.step import MeasuredStep, StepTraffic, StepUnit, predicted
from nbkit.planner.traffic import TrafficTerm
from nbkit.strategy import Strategy

WAYS = dict.fromkeys(("all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send"), OperationSpeed(0.0, 1e9))
LINK = WorldLinks(4, WAYS, None, None, 1e10, (0,) * 4, crowded=False)
PARTS = {"compute": 1.0, "exposed": 0.75, "data": 0.1, "optimizer": 0.2, "other": 0.05}
GRADIENTS = TrafficTerm("dp", "all_reduce", 4, 1, 10**9, "gradients")  # 1.5 s on this link, of which half is hidden
DDP = MeasuredStep(Strategy.parse("ddp", 4), PARTS)
COSTS = (1.0,) * 8


def total(
    seen: MeasuredStep,
    now: StepTraffic,
    strategy: Strategy,
    then: StepTraffic,
    link: WorldLinks,
    costs: Sequence[float],
) -> float:
    return predicted(seen, now, strategy, then, link, costs).total


def test_the_present_strategy_is_predicted_as_measured() -> None:
    sends = StepTraffic([GRADIENTS], 400)
    assert total(DDP, sends, DDP.strategy, sends, LINK, COSTS) == pytest.approx(sum(PARTS.values()))


def test_each_part_of_a_step_is_scaled_separately() -> None:
    zero1 = [TrafficTerm("dp", op, 4, 1, 10**9, "") for op in ("reduce_scatter", "all_gather")]
    found = total(DDP, StepTraffic([GRADIENTS], 400), Strategy.parse("zero1", 4), StepTraffic(zero1, 100), LINK, COSTS)
    assert found == pytest.approx(1.0 + 0.75 + 0.1 + 0.05 + 0.05)  # a quarter of the updates

    hidden = [TrafficTerm("tp", "all_reduce", 4, 1, 10**9, "hidden states")]
    found = total(DDP, StepTraffic([GRADIENTS], 400), Strategy.parse("tp", 4), StepTraffic(hidden, 100), LINK, COSTS)
    # The messages of tp are not hidden, and every rank reads all rows.
    assert found == pytest.approx(1.0 + 1.5 + 0.4 + 0.05 + 0.05)


@pytest.mark.parametrize(
    ("size", "hidden"), [(10**9, 1 / 9), (10**8, 0.075)]
)  # limit: the matrix product, or half of the messages
def test_pieces_of_a_tp_all_reduce_overlap_with_the_matrix_product(size: int, hidden: float) -> None:
    at_once, in_pieces = (TrafficTerm("tp", "all_reduce", 4, 1, size, "", pieces=pieces) for pieces in (1, 4))
    plain, found = (
        total(DDP, StepTraffic([GRADIENTS], 400), Strategy.parse("tp", 4), StepTraffic([term], 100), LINK, COSTS)
        for term in (at_once, in_pieces)
    )
    assert plain - found == pytest.approx(3 / 4 * hidden)


def test_a_pipeline_has_a_bubble_and_waits_for_its_longest_stage() -> None:
    even = Strategy.parse("pp microbatches=8", 4)
    found = total(DDP, StepTraffic([GRADIENTS], 400), even, StepTraffic([], 100), LINK, COSTS)
    assert found == pytest.approx(1.0 / (1 - 3 / 11) + 0.4 + 0.05 + 0.05)
    # Of four stages, two have two blocks. Those with one block add time only while the pipeline fills and drains.
    uneven = total(DDP, StepTraffic([GRADIENTS], 400), even, StepTraffic([], 100), LINK, (1.0,) * 6)
    assert 4 / 6 * 8 * 2 / 8 < uneven - 0.5 < 4 / 6 * (8 * 2 + 2 + 1 + 1) / 8
    # The delay of a message makes filling and draining longer, and each micro-batch too if no rank has slack.
    sent = TrafficTerm("pp", "send", 2, 8, 8 * 10**6, "hidden states")  # 1 ms each
    late = total(DDP, StepTraffic([GRADIENTS], 400), even, StepTraffic([sent], 100), LINK, COSTS)
    assert 6e-3 <= late - found <= 6e-3 + 14e-3


def test_backward_hides_the_buckets_that_are_sent_before_it_ends() -> None:
    alone, mb = MeasuredStep(Strategy(), {"compute": 4 * 1.2}), 1 << 20
    units = tuple(StepUnit(0.25, (26 * mb,)) for _ in range(4))
    for text, op in (("ddp", "all_reduce"), ("zero1", "reduce_scatter")):
        strategy = Strategy.parse(text, 4)
        terms = [TrafficTerm("dp", op, 4, 1, 4 * 26 * mb, "")]
        if strategy.zero:
            terms.append(TrafficTerm("dp", "all_gather", 4, 1, 4 * 26 * mb, ""))
        slow = WorldLinks(4, dict.fromkeys(WAYS, OperationSpeed(0.001, 1e9)), None, None, 1e10, (0,) * 4, crowded=False)
        found = total(alone, StepTraffic((), 0), strategy, StepTraffic(terms, 0, units), slow, COSTS)
        one = 0.001 + (1.5 if op == "all_reduce" else 0.75) * 26 * mb / 1e9
        # Backward takes 0.8 s of 1.2. The last of four buckets follows it, and forward waits for the first gather.
        assert found == pytest.approx(1.2 + one + (one if strategy.zero else 0.0))
        crawling = WorldLinks(
            4, dict.fromkeys(WAYS, OperationSpeed(0.0, 1e8)), None, None, 1e10, (0,) * 4, crowded=False
        )
        found = total(alone, StepTraffic((), 0), strategy, StepTraffic(terms, 0, units), crawling, COSTS)
        one = (1.5 if op == "all_reduce" else 0.75) * 26 * mb / 1e8  # longer than the backward pass of a unit
        # The part of forward after the last gather hides nothing.
        assert found == pytest.approx(0.4 + 0.2 + 4 * one + (4 * one - 0.3 if strategy.zero else 0.0))


def test_tp_messages_wait_for_the_bucket_on_the_same_link() -> None:
    alone, mb, strategy = MeasuredStep(Strategy(), {"compute": 4 * 1.2}), 1 << 20, Strategy.parse("dp=2 tp=2", 4)
    units = tuple(StepUnit(0.25, (26 * mb,)) for _ in range(4))
    gradients = TrafficTerm("dp", "all_reduce", 2, 1, 4 * 26 * mb, "")
    hidden = TrafficTerm("tp", "all_reduce", 2, 8, 8 * 10**6, "")  # one for each unit and direction, 1 ms each
    link = WorldLinks(4, dict.fromkeys(WAYS, OperationSpeed(0.0, 1e9)), None, None, 1e10, (0,) * 4, crowded=False)
    # Each bucket is sent before the next unit sends its messages, so the step waits only for the last bucket.
    bucket, backward = 26 * mb / 1e9, 0.2
    assert bucket < backward
    found = total(alone, StepTraffic((), 0), strategy, StepTraffic([gradients, hidden], 0, units), link, COSTS)
    assert found == pytest.approx(1.2 + 8e-3 + bucket)
    slow = WorldLinks(4, dict.fromkeys(WAYS, OperationSpeed(0.0, 1e8)), None, None, 1e10, (0,) * 4, crowded=False)
    found = total(alone, StepTraffic((), 0), strategy, StepTraffic([gradients, hidden], 0, units), slow, COSTS)
    # Forward and the first unit's backward; then the bucket and the message of each unit; then the last bucket.
    assert found == pytest.approx(0.4 + 4 * 0.01 + backward + 0.01 + 4 * 10 * bucket + 3 * 0.01)
    # Between nodes, the buckets have a separate link.
    nodes = WorldLinks(
        4, slow.ways, OperationSpeed(0.0, 1e8), OperationSpeed(0.0, 1e8), 1e10, (0, 0, 1, 1), crowded=False
    )
    apart = total(alone, StepTraffic((), 0), strategy, StepTraffic([gradients, hidden], 0, units), nodes, COSTS)
    assert apart == pytest.approx(0.4 + 4 * 0.01 + backward + 0.01 + 4 * 10 * bucket)


def test_operations_overlap_on_a_link_whose_gap_is_below_its_latency() -> None:
    alone, mb, strategy = MeasuredStep(Strategy(), {"compute": 4 * 1.2}), 1 << 20, Strategy.parse("ddp", 4)
    units = tuple(StepUnit(0.25, (26 * mb,)) for _ in range(4))
    terms = [TrafficTerm("dp", "all_reduce", 4, 1, 4 * 26 * mb, "")]
    took = {}
    for gap in (None, 0.0):
        link = WorldLinks(
            4, dict.fromkeys(WAYS, OperationSpeed(0.3, 1e8, gap)), None, None, 1e10, (0,) * 4, crowded=False
        )
        took[gap] = total(alone, StepTraffic((), 0), strategy, StepTraffic(terms, 0, units), link, COSTS)
    one = 1.5 * 26 * mb / 1e8
    assert took[None] == pytest.approx(0.4 + 0.2 + 4 * (0.3 + one))
    assert took[0.0] == pytest.approx(0.4 + 0.2 + 4 * one + 0.3)


def test_backward_hides_compressed_gradients_too() -> None:
    alone, mb, strategy = (
        MeasuredStep(Strategy(), {"compute": 4 * 1.2}),
        1 << 20,
        Strategy.parse("ddp compress=bf16", 4),
    )
    units, half = tuple(StepUnit(0.25, (26 * mb,)) for _ in range(4)), 2 * 26 * mb
    terms = [TrafficTerm("dp", op, 4, 1, half, "") for op in ("all_to_all", "all_gather")]
    found = total(alone, StepTraffic((), 0), strategy, StepTraffic(terms, 0, units), LINK, COSTS)
    # After backward come only the last bucket, and the all_gather of the bucket before it.
    assert found == pytest.approx(1.2 + 3 * 0.75 * half / 4 / 1e9)


def test_a_pipeline_step_takes_at_least_the_time_to_send_its_messages() -> None:
    alone, strategy = MeasuredStep(Strategy(), {"compute": 4.0}), Strategy.parse("pp schedule=gpipe microbatches=16", 4)
    sent = TrafficTerm("pp", "send", 2, 32, 32 * 10**9, "hidden states and their gradients")  # 1 s each
    found = total(alone, StepTraffic((), 0), strategy, StepTraffic([sent], 0), LINK, COSTS)
    assert found == pytest.approx(32.0)


def test_a_pipeline_step_includes_the_synchronization_of_its_ranks() -> None:
    alone = MeasuredStep(Strategy(), {"compute": 4.0})
    sent = TrafficTerm("pp", "send", 2, 16, 0, "hidden states")
    link = WorldLinks(4, dict.fromkeys(WAYS, OperationSpeed(0.01, 1e9)), None, None, 1e10, (0,) * 4, crowded=False)
    strategy = Strategy.parse("pp microbatches=8", 4)
    late, even = (
        total(alone, StepTraffic((), 0), strategy, StepTraffic(terms, 0), link, COSTS) for terms in ([sent], [])
    )
    # 2 x 3 hops to fill and drain, 10 waits of micro-batches, and two rounds to synchronize four ranks.
    assert late - even == pytest.approx((16 + 2) * 0.01)


def test_zero3_gathers_the_next_unit_while_one_computes() -> None:
    alone, mb = MeasuredStep(Strategy(), {"compute": 4 * 1.2}), 1 << 20
    units = tuple(StepUnit(0.25, (20 * mb,)) for _ in range(4))
    terms = [TrafficTerm("dp", op, 4, 1, 4 * 20 * mb, "") for op in ("reduce_scatter", "all_gather")]
    found = total(alone, StepTraffic((), 0), Strategy.parse("zero3", 4), StepTraffic(terms, 0, units), LINK, COSTS)
    one = 0.75 * 20 * mb / 1e9  # shorter than a forward
    # The step waits for the first gather of forward and of backward, and for the last reduction.
    assert found == pytest.approx(1.2 + 3 * one)


def test_a_collective_across_nodes_takes_the_speed_of_the_slow_link() -> None:
    link = WorldLinks(4, WAYS, OperationSpeed(0.0, 1e10), OperationSpeed(0.0, 1e9), 1e10, (0, 0, 1, 1), crowded=False)
    alone = MeasuredStep(Strategy.parse("dp=2 tp=2", 4), {"compute": 1.0})
    near = [TrafficTerm("tp", "all_reduce", 2, 1, 10**9, "")]
    far = [TrafficTerm("dp", "all_reduce", 2, 1, 10**9, "")]
    within, across = (
        total(alone, StepTraffic([], 1), alone.strategy, StepTraffic(terms, 1), link, COSTS) for terms in (near, far)
    )
    assert within == pytest.approx(1.1) and across == pytest.approx(2.0)


@pytest.mark.parametrize("units", [(), (StepUnit(1.0, (10**9,)),)])
def test_an_all_reduce_in_two_levels_sends_only_one_part_over_the_slow_link(units: tuple[StepUnit, ...]) -> None:
    link = WorldLinks(4, WAYS, OperationSpeed(0.0, 1e10), OperationSpeed(0.0, 1e9), 1e10, (0, 0, 1, 1), crowded=False)
    levels = [
        TrafficTerm("dp", "reduce_scatter", 2, 1, 10**9, "", WITHIN),
        TrafficTerm("dp", "all_reduce", 2, 1, 5 * 10**8, "", BETWEEN),
        TrafficTerm("dp", "all_gather", 2, 1, 10**9, "", WITHIN),
    ]
    alone, ddp = MeasuredStep(Strategy(), {"compute": 1e-9}), Strategy.parse("ddp", 4)
    ring, two = (
        total(alone, StepTraffic([], 1), ddp, StepTraffic(terms, 1, units), link, COSTS)
        for terms in ([GRADIENTS], levels)
    )
    assert ring == pytest.approx(1.5) and two == pytest.approx(0.5 + 2 * 0.05)
