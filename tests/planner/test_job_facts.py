"""Test that all ranks together hold the model, even if a degree does not divide a size."""

from __future__ import annotations

import pytest
from transformer_weights import transformer

from nbkit.planner.job_facts import held, holders
from nbkit.planner.stages import place
from nbkit.strategy import Strategy


@pytest.mark.parametrize("strategy", Strategy.every(8), ids=str)
def test_all_ranks_together_hold_the_model(strategy: Strategy) -> None:
    """Check, for sizes that no degree divides, that ranks hold each element as often as the strategy replicates it."""
    weights = transformer(blocks=19, width=11, vocab=101, tied=True)
    cuts = place([1.0] * 19, strategy) if strategy.pp > 1 else None

    for weight in weights:
        stages = len(holders(weight, cuts)) if cuts else 1
        whole = stages * strategy.cp * strategy.dp * (1 if weight.tp_dim is not None else strategy.tp)
        ranks = range(strategy.mesh.size)
        assert sum(held(weight, strategy, rank, cuts) for rank in ranks) == whole * weight.numel
        sharded = sum(held(weight, strategy, rank, cuts, sharded=True) for rank in ranks)
        assert sharded == whole // strategy.shard * weight.numel
