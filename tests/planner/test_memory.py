"""Bytes at rest are those of the textbook, and all ranks together hold the model, whatever divides whatever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformer_weights import transformer

from nbkit.planner.job_facts import Weight, held, holders
from nbkit.planner.memory import ADAM, MIXED_ADAM, SGD, Rest, at_rest, per_element
from nbkit.planner.stage_partition import place
from nbkit.strategy import Strategy

PLAIN = [Weight("up", (64, 16)), Weight("down", (16, 64)), Weight("bias", (64,))]
ELEMENTS = 64 * 16 * 2 + 64


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_formulas_of_zero(n: int) -> None:
    formulas = [16, 8 + 8 / n, 4 + 12 / n, 16 / n]

    for zero, formula in enumerate(formulas):
        strategy = Strategy(dp=n, zero=zero)
        assert per_element(strategy) == formula
        assert at_rest(PLAIN, strategy, rank=n - 1).total == formula * ELEMENTS
    assert at_rest(PLAIN, Strategy(dp=2 * n, zero=3, shard=n), rank=0).total == formulas[3] * ELEMENTS


def test_the_figures_of_the_zero_paper() -> None:
    """7.5 B parameters on 64 ranks, mixed precision, in GB: Rajbhandari et al. 2020, figure 1."""
    each = [7.5 * per_element(Strategy(dp=64, zero=zero), each=MIXED_ADAM) for zero in range(4)]

    assert [round(gb, 1) for gb in each] == [120.0, 31.4, 16.6, 1.9]


def test_tensor_and_pipeline_parallelism_divide_what_they_cut() -> None:
    weights = transformer(blocks=4, width=16, vocab=96)
    cut = sum(weight.numel for weight in weights if weight.tp_dim is not None)
    norms = sum(weight.numel for weight in weights) - cut
    block = sum(weight.numel for weight in weights if weight.blocks == (1,))

    assert at_rest(weights, Strategy(tp=4), rank=2).total == 16 * (cut / 4 + norms)
    assert at_rest(weights, Strategy(pp=4), rank=1).total == 16 * block
    assert at_rest(weights, Strategy(pp=4), rank=0).total == 16 * (block + 96 * 16)
    assert at_rest(weights, Strategy(pp=2), rank=0, cuts=[[(0, 1)], [(1, 4)]]).total == 16 * (block + 96 * 16)
    assert at_rest(weights, Strategy(dp=2, tp=2, zero=3), rank=0).total == 8 * (cut / 2 + norms)
    assert at_rest(weights, Strategy(cp=4), rank=3) == at_rest(weights, Strategy(), rank=0)


def test_each_part_is_counted_apart() -> None:
    frozen = [replace(PLAIN[0], trained=False), *PLAIN[1:]]
    trained = ELEMENTS - 64 * 16

    assert at_rest(frozen, Strategy(dp=2), rank=0) == Rest(4 * ELEMENTS, 4 * trained, 8 * trained)
    assert at_rest(frozen, Strategy(dp=2, zero=3), rank=0) == Rest(2 * ELEMENTS, 2 * trained, 4 * trained)
    assert at_rest(frozen, Strategy(dp=2, zero=2), rank=0, each=SGD) == Rest(4 * ELEMENTS, 2 * trained, 0)
    assert at_rest([Weight("scale", ())], Strategy(dp=2, zero=3), rank=1, each=ADAM) == Rest(4, 4, 8)


@pytest.mark.parametrize("strategy", Strategy.every(8), ids=str)
def test_all_ranks_together_hold_the_model(strategy: Strategy) -> None:
    """On sizes that no degree divides: each element as often as the strategy replicates it."""
    weights = transformer(blocks=19, width=11, vocab=101, tied=True)
    cuts = place([1.0] * 19, strategy) if strategy.pp > 1 else None

    for weight in weights:
        stages = len(holders(weight, cuts)) if cuts else 1
        whole = stages * strategy.cp * strategy.dp * (1 if weight.tp_dim is not None else strategy.tp)
        ranks = range(strategy.mesh.size)
        assert sum(held(weight, strategy, rank, cuts) for rank in ranks) == whole * weight.numel
        sharded = sum(held(weight, strategy, rank, cuts, sharded=True) for rank in ranks)
        assert sharded == whole // strategy.shard * weight.numel
