"""Test random numbers that are drawn while data is read, and the messages if ranks hold different data."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy
import pytest
import torch
from jobs import points, quiet
from ranks import run_ranks
from torch.utils.data import default_collate

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.data.data_rng import content


class Augmented:
    """Fixed data: row i plus noise that is drawn when it is read."""

    def __init__(self, draw: Any) -> None:
        self.rows, self.draw = points(16), draw

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        value, target = self.rows[i]
        return value + self.draw(), target


def own_rows(world: Any) -> list[Any]:
    torch.default_generator.seed()
    data = [(torch.randn(6), torch.tensor(0)) for _ in range(16)]
    with pytest.warns(UserWarning, match="Rank 1 holds different data than rank 0"):
        alone = quiet(data=data)
    alone.fit(1)
    with pytest.warns(UserWarning):
        together = quiet(data=data, strategy="tp")
    with pytest.raises(TrainingError) as raised:
        together.fit(1)
    return [str(raised.value), together.step]


def own_noise(world: Any) -> list[int]:
    torch.default_generator.seed()
    own = numpy.random.default_rng()
    drawn = (lambda: torch.randn(6), lambda: float(numpy.random.rand()), random.random, lambda: float(own.random()))
    before = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    data = [Augmented(draw) for draw in drawn]
    found = [content(lambda each=each: default_collate([each[0], each[-1]])) for each in data]
    after = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    assert (before[0], before[2]) == (after[0], after[2]) and torch.equal(before[1], after[1])
    return [*found, len(quiet(data=data[0]).fit(2))]


def noise_of_a_step(world: Any) -> list[Any]:
    numpy.random.seed(world.place.rank)
    random.seed(world.place.rank)
    drawn: list[float] = []

    def draw() -> float:
        drawn.append(float(numpy.random.rand()) + random.random())
        return drawn[-1]

    before = random.getstate(), numpy.random.get_state()[1].tolist()
    trainer = quiet(data=Augmented(draw), strategy="tp")
    # One rank checks the loss for all ranks, and reads more than the others.
    drawn.clear()
    trainer.fit(2)
    trainer.evaluate(Augmented(draw))
    return [drawn, before == (random.getstate(), numpy.random.get_state()[1].tolist())]


def test_ranks_that_read_the_same_rows_draw_the_same_numbers() -> None:
    first, second = run_ranks(noise_of_a_step, 2)

    assert first == second and first[1]
    assert len({*first[0]}) > 16


def test_data_made_without_a_seed_warns_and_may_not_be_shared_by_ranks() -> None:
    for found, steps in run_ranks(own_rows, 2):
        assert "different data than rank 0" in found and "2 of them work on each row together" in found
        assert "torch.manual_seed(0)" in found and steps == 0


def test_data_that_draws_while_it_is_read_is_equal_on_all_ranks() -> None:
    first, second = run_ranks(own_noise, 2)

    assert first == second
    assert 0 not in first[:3] and first[3] == 0 and first[4] == 2


def mixed(rows: list[Any]) -> Any:
    values, targets = default_collate(rows)
    return 0.7 * values + 0.3 * values.flip(0), targets


def masked(rows: list[Any]) -> Any:
    values, targets = default_collate(rows)
    return values * (torch.rand(values.shape) > 0.2), targets


def stacked(rows: list[Any]) -> Any:
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def said_of_collate(world: Any) -> list[list[str]]:
    found = []
    for collate in (mixed, masked, stacked):
        drawn = torch.get_rng_state()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quiet(loading=nbkit.Loading(collate=collate))
        assert torch.equal(torch.get_rng_state(), drawn)
        found.append([str(each.message) for each in caught])
    return found


def test_a_collate_function_that_mixes_rows_or_draws_numbers_is_reported() -> None:
    for (mixes,), (draws,), nothing in run_ranks(said_of_collate, 2):
        assert "collate= mixes rows" in mixes and "collate= draws random numbers" in draws and nothing == []
    assert run_ranks(said_of_collate, 1) == [[[], [], []]]
