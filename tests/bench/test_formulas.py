"""Test the formulas that benchmarks compare nbkit with, on numbers computed by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.pipeline.balance import _least
from bench.rigs.formulas import Model, bytes_at_rest, wire_bytes
from bench.switch.switch import _bound, strategies, tour
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout

MODEL = Model(vocab=32, block=8, layers=4, width=16, batch=16)
BLOCK = 4 * 16 * 16 + 4 * 16 + 8 * 16 * 16 + 5 * 16 + 4 * 16
ENDS = 2 * 32 * 16 + 8 * 16 + 2 * 16
P = 4 * (4 * BLOCK + ENDS)
HIDDEN = 16 * 8 * 16 * 4


@pytest.mark.parametrize(
    ("text", "ranks", "each"),
    [("ddp", 4, 16), ("zero1", 4, 8 + 8 / 4), ("zero2", 8, 4 + 12 / 8), ("zero3", 2, 8), ("hsdp shard=2", 4, 8)],
)
def test_bytes_at_rest_equal_bytes_per_parameter_of_the_strategy(text: str, ranks: int, each: float) -> None:
    assert bytes_at_rest(MODEL, Strategy.parse(text, ranks)) == pytest.approx(ranks * each * P / 4)


def test_tensor_parallelism_replicates_the_parameters_it_does_not_split() -> None:
    whole = 4 * 6 * 16 + 8 * 16 + 2 * 16

    assert bytes_at_rest(MODEL, Strategy(tp=4)) == 16 * (P // 4 + 3 * whole)
    assert bytes_at_rest(MODEL, Strategy(pp=4)) == 4 * P


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Strategy(dp=4), {"dp": 6 * P}),
        (Strategy(dp=4, zero=2), {"dp": 6 * P}),
        (Strategy(dp=2, zero=3), {"dp": 3 * P - 4 * ENDS}),
        (Strategy(dp=4, zero=1, shard=2), {"shard": 4 * P, "replicate": 2 * P}),
        (Strategy(pp=4), {"pp": 6 * HIDDEN}),
        (Strategy(pp=4, schedule="zb"), {"pp": 14 * HIDDEN}),
        (Strategy(pp=4, schedule="zbv"), {"pp": 12 * HIDDEN}),
        (Strategy(tp=2), {"tp": 36 * HIDDEN + 6 * 16 * 8 * 4 + 2 * 4 * 4 * 6 * 16 + 4 * (8 + 4) * 16}),
        (
            Strategy(tp=2, pp=2),
            {"tp": 36 * HIDDEN + 6 * 16 * 8 * 4 + 2 * 4 * 4 * 6 * 16 + 4 * 4 * (8 + 4) * 16, "pp": 2 * HIDDEN},
        ),
        (Strategy(cp=2), {"cp": 26 * HIDDEN + 2 * 4 * 4 * BLOCK}),
        (Strategy(dp=2, pp=2), {"dp": 2 * P, "pp": 2 * HIDDEN}),
    ],
    ids=str,
)
def test_wire_bytes_equal_the_bytes_of_a_step_over_all_ranks(strategy: Strategy, expected: dict[str, int]) -> None:
    assert wire_bytes(MODEL, strategy) == expected


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_tour_of_switches_makes_every_ordered_pair_once(ranks: int) -> None:
    names = strategies(ranks)
    walk = tour(names)

    made = list(pairwise(walk))
    assert sorted(made) == sorted((a, b) for a in names for b in names if a != b)
    assert [Strategy.parse(name, ranks).mesh.size for name in names] == [ranks] * 8


def test_the_lower_bound_counts_the_bytes_that_a_rank_needs_and_lacks() -> None:
    whole = Layout.whole((6, 4))
    halves = [{"w": whole.part(0, 2, rank)} for rank in range(2)]
    columns = [{"w": whole.part(1, 2, rank)} for rank in range(2)]

    assert _bound(halves, [{"w": whole}] * 2) == 2 * 12 * 4
    assert _bound(halves, columns) == 2 * 6 * 4
    assert _bound([{"w": whole}] * 2, columns) == 0
    assert _bound([{"w": whole}, {}], [{}, {"w": whole}]) == 24 * 4


def test_least_finds_the_best_of_all_partitions() -> None:
    assert _least([3.0, 1.0, 1.0, 3.0], 2) == 4.0
    assert _least([5.0, 1.0, 1.0], 3) == 5.0
