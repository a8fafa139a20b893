"""A strategy has one spelling, and what this release cannot train is refused by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from nbkit.errors import StrategyError
from nbkit.strategy import Strategy


@pytest.mark.parametrize("text", ["ddp", "dp=4", "ddp dp=4", " DDP ", "dp=4 tp=1 pp=1 zero=0"])
def test_every_way_to_write_data_parallelism_is_one_value(text: str) -> None:
    strategy = Strategy.parse(text, 4)

    assert strategy == Strategy(dp=4)
    assert str(strategy) == "dp=4"
    assert Strategy.parse(str(strategy), 4) == Strategy.parse(strategy, 4) == strategy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zero3", ["'zero3' is not in this release", "available now: ddp"]),
        ("tp", ["'tp' is not in this release"]),
        ("dp=2 tp=2", ["'tp=2' is not in this release"]),
        ("ddp schedule=1f1b", ["'schedule=1f1b' is not in this release"]),
        ("dp=3", ["do not multiply to the world", "dp 3 = 3 ranks, the world has 4", "dp=4"]),
        ("dp=zero", ["not a degree"]),
        ("dp=0", ["not a degree"]),
        ("data", ["'data' is not a preset", "zero3"]),
        ("dp=4 ddp", ["a preset comes first"]),
        ("ranks=4", ["'ranks' is not a key", "microbatches"]),
        ("", ["empty"]),
    ],
)
def test_what_cannot_be_trained_says_what_can(text: str, words: list[str]) -> None:
    with pytest.raises(StrategyError) as raised:
        Strategy.parse(text, 4)

    assert [word for word in words if word not in str(raised.value)] == []
    assert raised.value.hint


def test_a_strategy_is_frozen_and_valid_from_birth() -> None:
    with pytest.raises(FrozenInstanceError):
        Strategy(dp=2).dp = 3  # type: ignore[misc]
    with pytest.raises(StrategyError):
        Strategy(dp=0)
