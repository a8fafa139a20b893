"""Test the current strategy on another number of ranks: its degrees stay, and dp takes the rest."""

from __future__ import annotations

import pytest

from nbkit.errors import StrategyError
from nbkit.rank.train.resize.plan_resize import scaled
from nbkit.strategy import Strategy


@pytest.mark.parametrize(
    ("now", "before", "ranks", "then"),
    [
        ("ddp", 4, 2, "dp=2"),
        ("zero3", 4, 8, "dp=8 zero=3"),
        ("dp=2 tp=2", 4, 8, "dp=4 tp=2"),
        ("dp=2 pp=2 schedule=zbv microbatches=4", 4, 2, "pp=2 schedule=zbv microbatches=4"),
        ("dp=4 zero=3 shard=2", 4, 8, "dp=8 zero=3 shard=2"),
        ("dp=4 zero=3 shard=2", 4, 2, "dp=2 zero=3"),
        ("ep=2 experts=0:0-3", 4, 2, "dp=2 ep=2 experts=0:0-3"),
        ("ep=2 experts=0:0-3", 4, 3, "dp=3"),
        ("ep=4 experts=0:0-3", 8, 6, "dp=6 ep=2"),
        ("speeds=2:1:1:1", 4, 8, "dp=8"),
    ],
)
def test_degrees_stay_and_dp_takes_the_remaining_ranks(now: str, before: int, ranks: int, then: str) -> None:
    assert str(scaled(Strategy.parse(now, before), ranks)) == then


def test_degrees_that_do_not_divide_are_refused() -> None:
    with pytest.raises(StrategyError, match="the world has 3"):
        scaled(Strategy.parse("dp=2 tp=2", 4), 3)
