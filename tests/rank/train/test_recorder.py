"""Test that every training writes its own records, of every rank and every part of the step, without a user's call."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Recording, mean_loss, net, points, quiet
from ranks import run_ranks

from nbkit.errors import TrainingError
from nbkit.planner import forecast
from nbkit.rank.telemetry.phases import clock
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.estimate.cost_model import CostModel
from nbkit.rank.train.job import prepare
from nbkit.rank.train.step.step_stats import DeviceScalar
from nbkit.records.readings import bars, members_of, table
from nbkit.records.record_file import rank_files, read_since
from nbkit.records.records import MEMORY_KINDS, Detail, EventRecord, Group, Header, MemoryRecord, Record, StepRecord
from nbkit.trainer_options import Checkpoints

STEPS = 5
PIPELINE = "pp=2 schedule=1f1b microbatches=4"


def trained(world: Any, folder: str) -> dict[str, Any]:
    trainer = quiet(log_dir=folder, eval_data=points(8), eval_every=2, checkpoints=Checkpoints(every=5))
    trainer.fit(STEPS)
    trainer.try_out("zero2", 2)
    trainer.loop = replace(trainer.loop, eval_every=None)
    trainer.switch(PIPELINE)
    trainer.fit(STEPS)
    return {"run": str(trainer.run_dir), "history": list(trainer.history)}


def looped(world: Any, folder: str) -> str:
    job = prepare(net, Recording, loss=mean_loss, strategy="zero1", log_dir=folder, name="loop")
    data = [points()[at : at + 8] for at in range(0, 32, 8)]
    for batch in job.batches([tuple(map(torch.stack, zip(*rows, strict=True))) for rows in data]):
        job.backward(batch)
        job.optimizer.step()
        job.optimizer.zero_grad()
    return str(job.run_dir)


def without_formula(world: Any, folder: str) -> tuple[int, list[str]]:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a number that the formulas did not expect")

    CostModel.forecast = broken
    trainer = quiet(log_dir=folder)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        trainer.fit(3)
    return trainer.step, [str(one.message) for one in heard if "no formula" in str(one.message)]


def placed(world: Any, folder: str) -> list[tuple[str, str]]:
    """Return (action of a step besides forward, backward and update, state of the training thread), in order."""
    seen: list[tuple[str, str]] = []

    def watch(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def told(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, clock.state))
            return inner(*args, **kwargs)

        setattr(owner, name, told)

    trainer = quiet(log_dir=folder, lr_schedule=lambda step: 1.0)
    trainer.fit(2)
    watch(trainer._rate, "prepare")
    watch(trainer.job, "seed_data")
    watch(trainer._stream, "next")
    watch(trainer.job.training_step, "backward")
    watch(trainer.job.ledger, "check")
    watch(DeviceScalar, "read")
    trainer.fit(1)
    return seen


def back_by_one(world: Any, folder: str) -> str:
    """Go back one step in a live cell, and return the run's folder."""
    trainer = quiet(log_dir=folder, checkpoints=Checkpoints(snapshot_every=1))

    def ask(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == 2 and step_boundary.inbox.acted == before:
            step_boundary.inbox.post(before + 1, "back")

    before = step_boundary.inbox.acted
    step_boundary.handlers["back"] = lambda _: trainer.rewind(trainer.step - 1)
    trainer._callbacks = (ask,)
    trainer.fit(6)
    return str(trainer.run_dir)


def nowhere(world: Any, folder: str) -> str:
    (Path(folder) / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot make a directory"):
        quiet(log_dir=str(Path(folder) / "file"))
    return "refused"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = run_ranks(trained, 2, str(tmp_path_factory.mktemp("runs")), timeout=180)
    assert found[0]["run"] == found[1]["run"]
    return found[0]


def read(run: str) -> dict[int, list[Record]]:
    return {rank: read_since(path)[0] for rank, path in rank_files(Path(run)).items()}


def of(records: list[Record], kind: type[Any]) -> list[Any]:
    return [one for one in records if isinstance(one, kind)]


def test_every_rank_has_every_step_with_its_parts_and_numbers(run: dict[str, Any]) -> None:
    written = read(run["run"])
    assert sorted(written) == [0, 1]
    for rank, records in written.items():
        assert of(records, Header)[0].world_size == 2 and of(records, Header)[0].rank == rank
        # A trial leaves nothing, because it is not part of the training.
        assert all(one.parts for one in of(records, StepRecord))
        steps = {one.step: one for one in of(records, StepRecord)}
        # Each step is recorded once, even with a checkpoint, which reads its numbers before the step ends.
        assert [one.step for one in of(records, StepRecord)] == list(range(1, 2 * STEPS + 1))
        for number, step in steps.items():
            assert math.isclose(sum(step.parts.values()), step.seconds, abs_tol=1e-6)
            assert step.parts["compute"] > 0 and step.parts["optimizer"] > 0 and step.parts["data"] > 0
            assert step.numbers["loss"] == pytest.approx(run["history"][number - 1]["loss"])
            assert {row.axis for row in step.traffic} >= ({"dp"} if number <= STEPS else {"pp"})
        assert [one.event["kind"] for one in of(records, EventRecord)].count("switch") == 1  # none from the trial


def test_a_repeated_step_is_recorded_again(tmp_path: Path) -> None:
    steps = of(read(run_ranks(back_by_one, 1, str(tmp_path))[0])[0], StepRecord)
    numbers = [one.step for one in steps]
    assert len(numbers) == 6 and len(set(numbers)) == 5
    assert all(one.parts and "loss" in one.numbers for one in steps)


def test_evaluation_is_not_part_of_a_step(run: dict[str, Any]) -> None:
    for records in read(run["run"]).values():
        calls = [row.op for one in of(records, StepRecord) if one.step == 2 for row in one.traffic if row.axis == "dp"]
        assert calls.count("all_reduce") == 1


def test_the_first_steps_and_those_after_a_switch_are_recorded_in_detail(run: dict[str, Any]) -> None:
    for records in read(run["run"]).values():
        kept = {one.step: one for one in of(records, Detail)}
        # The switches of a trial do not belong to the training.
        assert sorted(kept) == [1, 2, 3, STEPS + 1, STEPS + 2, STEPS + 3]
        for step in (STEPS + 1, STEPS + 2, STEPS + 3):
            ops = sorted((op.op, op.micro) for op in kept[step].pipeline)
            assert ops == sorted((kind, micro) for kind in "BF" for micro in range(4))


def test_memory_and_bytes_equal_the_formulas(run: dict[str, Any]) -> None:
    written = read(run["run"])
    said = forecast.read(Path(run["run"]))
    assert [one.strategy.split()[0] for one in said] == ["dp=2", "pp=2"]
    for rank, records in written.items():
        counted = {one.step: one for one in of(records, MemoryRecord)}
        for step in (2, STEPS + 2):
            predicted = forecast.in_force(said, step)
            assert predicted is not None and counted[step].parameters == predicted.memory[rank].parameters
            # The buffer for sending gradients has a canary and padding too.
            assert 0 <= counted[step].gradients - predicted.memory[rank].gradients < 256
            named, peak = counted[step].named, counted[step].peak
            # Every byte of the peak has a kind, and nearly all of them have a module.
            assert sum(part.bytes for part in named) == peak > counted[step].at_rest / 2
            assert {part.kind for part in named} <= set(MEMORY_KINDS) - {"other"}
            assert sum(part.bytes for part in named if part.module) >= 0.95 * peak
            own = {kind: sum(part.bytes for part in named if part.kind == kind) for kind in MEMORY_KINDS}
            assert own["parameters"] == counted[step].parameters and own["activations"] > 0
    groups = [one for records in written.values() for one in of(records, Group)]
    steps = {rank: next(one for one in of(records, StepRecord) if one.step == 3) for rank, records in written.items()}
    measured = {(row.op, row.axis): row.bytes for row in table(steps, members_of(groups))}
    assert [(term.op, term.axis) for term in said[0].traffic] == [("all_reduce", "dp")]
    assert measured["all_reduce", "dp"] == pytest.approx(said[0].traffic[0].bytes, abs=256)
    assert len(bars(steps, members_of(groups))) == 2


def test_work_for_a_part_of_a_step_counts_as_that_part(tmp_path: Path) -> None:
    assert run_ranks(placed, 2, str(tmp_path))[0] == [
        ("prepare", "optimizer"),
        ("seed_data", "data"),
        ("next", "data"),
        ("backward", "backward"),
        ("check", "backward"),
        ("read", "backward"),
        ("check", "other"),  # for the record, at the end of the run
    ]


def test_a_users_own_loop_is_recorded_too(tmp_path: Path) -> None:
    found = run_ranks(looped, 2, str(tmp_path), timeout=120)
    for records in read(found[0]).values():
        steps = of(records, StepRecord)
        assert [one.step for one in steps] == [1, 2, 3, 4]
        assert all(one.parts["data"] > 0 and one.parts["compute"] > 0 for one in steps)
    assert "loop-dp2" in found[0]


def test_a_formula_that_fails_on_rank_0_does_not_block_the_others(tmp_path: Path) -> None:
    (first, said), (second, other) = run_ranks(without_formula, 2, str(tmp_path))
    assert (first, second, other) == (3, 3, [])
    assert said == ["no formula for dp=2: ZeroDivisionError: a number that the formulas did not expect"]


def test_a_run_that_cannot_be_written_is_refused_on_every_rank(tmp_path: Path) -> None:
    assert run_ranks(nowhere, 2, str(tmp_path)) == ["refused"] * 2
