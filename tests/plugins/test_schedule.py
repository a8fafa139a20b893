"""Test that a schedule from outside trains, and is predicted and checked, like one of nbkit's own."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
from jobs import one_process, points, quiet
from ranks import run_ranks

from nbkit import schedules
from nbkit.errors import StrategyError, TrainingError
from nbkit.planner.stages import makespan
from nbkit.schedules import Op, Schedule, simulate
from nbkit.strategy import Strategy

STRATEGY = "pp=2 schedule=waves microbatches=4"


def trained(world: Any, module: str) -> tuple[list[float], list[str], int]:
    importlib.import_module(module)
    trainer = quiet(strategy=STRATEGY)
    trainer.fit(3)
    trainer.switch("ddp")
    trainer.fit(2)
    trainer.switch(STRATEGY)
    trainer.fit(2)
    offered = [str(one) for one in Strategy.every(2)]
    return [record["loss"] for record in trainer.history], offered, len(schedules.registered())


def test_a_schedule_trains_like_one_process_and_is_offered_on_all_ranks() -> None:
    expected, *_ = one_process(points(), steps=7)
    for losses, offered, registered in run_ranks(trained, 2, "tests.plugins.waves"):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert STRATEGY in offered and registered == 1


@pytest.fixture
def registered() -> Any:
    importlib.import_module("tests.plugins.waves")
    yield
    schedules.schedule._types.pop("waves")
    del sys.modules["tests.plugins.waves"]


def test_a_schedule_is_simulated_and_its_makespan_predicted(registered: Any) -> None:
    schedule = Schedule.of("waves", 2, 4)
    timeline = simulate(schedule)
    assert max(timeline.peak) == 2 and timeline.makespan == 2 * 3 * (2 + 2 - 1)
    assert makespan("waves", 4, (12.0, 12.0)) == pytest.approx(18.0)
    assert not schedules.type_of("waves").holds_all and schedules.type_of("gpipe").holds_all


def by_turns(ranks: int, microbatches: int, rank: int) -> list[Op]:
    return [Op(kind, rank, micro) for micro in range(microbatches) for kind in ("F", "B")]  # type: ignore[arg-type]


def differently(world: Any) -> list[str]:
    """Register different functions on the ranks under one name; use it before and after a correct training."""
    waves, said = importlib.import_module("tests.plugins.waves").waves, []
    own = (waves, by_turns)[world.place.rank]
    schedules.register("mine", own)
    with pytest.raises(TrainingError) as raised:
        quiet(strategy="pp=2 schedule=mine")
    said.append(str(raised.value))
    schedules.register("mine", waves)
    trainer = quiet(strategy="pp=2 schedule=mine")
    trainer.fit(1)
    trainer.switch("ddp")
    schedules.register("mine", own)
    with pytest.raises(TrainingError) as raised:
        trainer.switch("pp=2 schedule=mine")
    said.append(str(raised.value))
    trainer.fit(1)
    return [*said, str(trainer.strategy)]


def test_different_functions_on_the_ranks_are_refused_before_a_deadlock() -> None:
    for first, later, strategy in run_ranks(differently, 2):
        for said in (first, later):
            assert "The ranks have different schedules: 'mine: rank 0 of 2, 2 micro-batches' differs" in said
            assert "'0F0 0F1 0B0 0B1', '0F0 0B0 0F1 0B1'; 6 in all" in said
        assert strategy == "dp=2"


def waits_for_ever(ranks: int, microbatches: int, rank: int) -> list[Op]:
    """Return a schedule in which each rank begins with its backward passes."""
    return [Op(kind, rank, micro) for micro in range(microbatches) for kind in ("B", "F")]  # type: ignore[arg-type]


def forgets(ranks: int, microbatches: int, rank: int) -> list[Op]:
    return [Op(kind, rank, 0) for kind in ("F", "B")]  # type: ignore[arg-type]


def in_pairs(ranks: int, microbatches: int, rank: int) -> list[tuple[str, int]]:
    return [("F", rank)]


def elsewhere(ranks: int, microbatches: int, rank: int) -> list[Op]:
    return [Op("F", 0, 0)]


def takes_two(ranks: int, microbatches: int) -> list[Op]:
    return []


@pytest.mark.parametrize(
    ("build", "more", "said"),
    [
        (
            waits_for_ever,
            {},
            r"wait for each other for ever(.|\n)*1 micro-batches; rank 0 before B of stage 0",
        ),
        (forgets, {}, r"stage 0, of rank 0, does not do all of micro-batch 1(.|\n)*it has nothing, expected FB"),
        (in_pairs, {}, r"'mine' gave no list of Op(.|\n)*build\(2, 1, 0\)"),
        (elsewhere, {}, "rank 1 has F of stage 0, micro-batch 0, whose stage it does not hold"),
        (takes_two, {}, r"'mine' raised an error(.|\n)*takes 2 positional arguments but 3 were given\n"),
        (waits_for_ever, {"stages_per_rank": 3, "v_shaped": True}, "two where the stages run down"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_and_not_registered(build: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        schedules.register("mine", build, **more)
    assert "mine" not in schedules.names()


def right_up_to_12(ranks: int, microbatches: int, rank: int) -> list[Op]:
    done = range(min(microbatches, 12))
    return [Op("F", rank, micro) for micro in done] + [Op("B", rank, micro) for micro in done]


def test_a_schedule_wrong_for_many_micro_batches_is_refused_for_those_strategies() -> None:
    schedules.register("mine", right_up_to_12)
    try:
        Strategy.parse("pp=2 schedule=mine microbatches=12", 2)
        for microbatches in (13, 40):
            with pytest.raises(StrategyError, match=r"mine: stage 0, of rank 0, does not do all of micro-batch 12"):
                Strategy.parse(f"pp=2 schedule=mine microbatches={microbatches}", 2)
        with pytest.raises(StrategyError, match=r"'mime' is not a schedule(.|\n)*schedule=mine"):
            Strategy.parse("pp=2 schedule=mime", 2)
    finally:
        schedules.schedule._types.pop("mine")


@pytest.mark.parametrize(("name", "said"), [("1f1b", "one of nbkit's own"), ("my own", "cannot be the name")])
def test_names_that_are_taken_or_cannot_be_typed_are_refused(name: str, said: str) -> None:
    for check in (True, False):
        with pytest.raises(StrategyError, match=said):
            schedules.register(name, forgets, check=check)


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StrategyError, match="'waves' is not a schedule") as raised:
        Strategy.parse(STRATEGY, 2)
    assert "dualpipev" in str(raised.value)
