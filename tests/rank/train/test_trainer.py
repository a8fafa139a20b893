"""Test the Trainer as a user sees it: progress, events, learning rate, evaluation, callbacks."""

from __future__ import annotations

import contextlib
import io
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import SEED, dict_loss, flat, heard, mean_loss, net, one_process, points, quiet, weighted_loss
from ranks import run_ranks
from torch import nn

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.telemetry.sinks import progress_line
from nbkit.rank.train import runs_dir
from nbkit.rank.train.checkpoint import autosave
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.step_boundary import DETACHED
from nbkit.records import tags
from nbkit.records.events import Event


def seen_by_a_user(world: Any, folder: Path) -> dict[str, Any]:
    events: list[Event] = []
    printed = io.StringIO()
    records: list[int] = []
    trainer = quiet(
        progress=True,
        log_dir=str(folder),
        eval_data=points(21),
        eval_every=2,
        checkpoints=nbkit.Checkpoints(every=3),
        clip_norm=1.0,
        callbacks=[lambda trainer, record: records.append(record["step"])],
    )
    events = heard(trainer)
    with contextlib.redirect_stdout(printed):
        trainer.fit(3)
        trainer.lr = 0.05
        trainer.fit(2)
    return {
        "printed": printed.getvalue(),
        "kinds": [event.kind for event in events],
        "records": records,
        "history": trainer.history,
        "run_dir": trainer.run_dir and str(trainer.run_dir),
        "repr": repr(trainer),
    }


def test_a_run_prints_writes_and_records_its_steps_and_events(tmp_path: Path) -> None:
    first, second = run_ranks(seen_by_a_user, 2, tmp_path)

    assert first["history"] == second["history"]
    assert second["printed"] == "" and second["run_dir"] == first["run_dir"]
    lines = first["printed"].splitlines()
    assert lines[0] == "global 8 = micro 4 x accum 1 x dp 2"
    assert "step 3/3 · loss " in first["printed"] and " rows/s" in first["printed"]
    assert first["printed"].count("\r") >= 2 and first["printed"].endswith("\n")
    assert first["kinds"][0] == "run_started" and first["kinds"].count("step") == 5
    assert [k for k in first["kinds"] if k != "step"] == [
        "run_started", "checkpoint", "run_stopped", "lr_changed", "run_started", "run_stopped",
    ]  # fmt: skip
    assert first["records"] == [1, 2, 3, 4, 5]
    record = first["history"][1]
    assert record["strategy"] == "dp=2" and record["samples"] == record["tokens"] == 8 and record["seconds"] > 0
    assert [r["lr"] for r in first["history"]] == pytest.approx([0.1] * 3 + [0.05] * 2)
    assert ["eval_loss" in r for r in first["history"]] == [False, True, False, True, False]
    assert "step 5" in first["repr"] and "dp=2" in first["repr"]

    run = Path(first["run_dir"])
    assert "dp2-b8" in run.name and (run / "checkpoint" / ".metadata").exists()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run)).Reload()
    for tag, key in (
        (tags.LOSS, "loss"),
        (tags.LR, "lr"),
        (tags.GRAD_NORM, "grad_norm"),
        (tags.STEP_SECONDS, "seconds"),
    ):
        written = [(scalar.step, scalar.value) for scalar in board.Scalars(tag)]
        assert [step for step, _ in written] == [1, 2, 3, 4, 5]
        assert [value for _, value in written] == pytest.approx([r[key] for r in first["history"]], rel=1e-5)
    assert [scalar.step for scalar in board.Scalars(tags.EVAL_LOSS)] == [2, 4]
    assert tags.TOKENS_PER_SECOND in board.Tags()["scalars"]
    texts = [t.tensor_proto.string_val[0].decode() for t in board.Tensors(f"{tags.EVENTS}/text_summary")]
    assert any("lr_changed" in text and "0.05" in text for text in texts)


def averaged(world: Any, strategy: str, on: tuple[int, ...]) -> list[float]:
    """Return the differences of a mean over steps, and of the weights of the best step, from plain torch.

    on: ranks with the callback.
    """
    seen: dict[str, Any] = {"mean": None, "best": (float("inf"), None)}

    def look(loss: float, weights: torch.Tensor) -> None:
        seen["mean"] = weights if seen["mean"] is None else 0.9 * seen["mean"] + 0.1 * weights
        seen["best"] = min(seen["best"], (loss, weights), key=lambda pair: pair[0])

    def called(trainer: Any, record: dict[str, Any]) -> None:
        look(record["loss"], flat(trainer.model))

    quiet(strategy=strategy, callbacks=[called] if world.place.rank in on else []).fit(7)
    found = seen["mean"], seen["best"][1]
    seen.update(mean=None, best=(float("inf"), None))
    for steps in range(1, 8):
        losses, _, model = one_process(points(), steps=steps)
        look(losses[-1], flat(model))
    expected = seen["mean"], seen["best"][1]
    return [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True) if a is not None]


@pytest.mark.parametrize(("strategy", "on"), [("zero1", (0, 1)), ("ddp", (0,))])
def test_a_callback_sees_the_model_of_its_step(strategy: str, on: tuple[int, ...]) -> None:
    found = run_ranks(averaged, 2, strategy, on)

    assert [len(each) for each in found] == [2 * (rank in on) for rank in range(2)]
    assert all(far < 1e-6 for each in found for far in each)


def counted(world: Any, folder: Path) -> list[str]:
    """Return the progress line at each step of three trainings. The last one loads a checkpoint in the middle."""
    seen: list[str] = []

    def note(trainer: Any, record: dict[str, Any]) -> None:
        seen.append(progress_line(step_boundary.progress()).partition(" · ")[0])
        if len(seen) == 7:
            trainer.load(folder)

    trainer = quiet(callbacks=[note])
    trainer.fit(2)
    trainer.save(folder)
    trainer.fit(3)
    trainer.fit(4)
    return [*seen, f"ended at {trainer.step}"]


def test_the_progress_line_counts_steps_over_all_trainings(tmp_path: Path) -> None:
    (found,) = run_ranks(counted, 1, tmp_path / "kept")

    assert found == [
        "step 1/2", "step 2/2",
        "step 3/5", "step 4/5", "step 5/5",
        "step 6/9", "step 7/9",  # after the load, two of the four steps are left, from step 2 on
        "step 3/4", "step 4/4", "ended at 4",
    ]  # fmt: skip


def evaluated(world: Any) -> list[float]:
    found = []
    for loss in (mean_loss, weighted_loss):
        trainer = quiet(loss=loss, compute=nbkit.Compute(microbatch_size=1))
        before = flat(trainer.model)
        for num in (21, 2, 8):
            found += [trainer.evaluate(points(num)), trainer.evaluate(iter(points(num)), batch_size=5)]
            assert torch.equal(before, flat(trainer.model)) and trainer.model.training
    dicts = [{"input": x, "label": y} for x, y in points(21)]
    return [*found, quiet(loss=dict_loss, inputs=["input"], data=dicts).evaluate(dicts)]


def test_evaluation_counts_every_sample_once_on_any_number_of_ranks() -> None:
    _, _, model = one_process(points(), steps=0)
    expected = []
    for loss in (mean_loss, weighted_loss):
        for num in (21, 2, 8):
            x, y = (torch.stack(part) for part in zip(*points(num), strict=True))
            value = loss(model(x), y)
            expected += [float((value[0] / value[1] if isinstance(value, tuple) else value).detach())] * 2
    for ranks in (1, 4):
        for found in run_ranks(evaluated, ranks):
            assert found == pytest.approx([*expected, expected[0]], rel=1e-5)


def until(world: Any) -> list[Any]:
    trainer = quiet(progress=True)
    made = [[r["step"] for r in records] for records in (trainer.fit(2), trainer.fit(until=5))]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        made.append([r["step"] for r in trainer.fit(until=4)])
    made.append(said.getvalue().strip())
    refused = []
    for asked in ({}, {"steps": 2, "until": 9}, {"until": 0}):
        with pytest.raises(TrainingError) as error:
            trainer.fit(**asked)
        refused.append(error.value.what)
    return [made, trainer.step, refused]


def test_fit_takes_a_number_of_steps_or_a_last_step() -> None:
    either = "fit() takes either steps or until."

    nothing = "5 steps are finished: until=4 leaves none to make"
    made = [[1, 2], [3, 4, 5], [], nothing]
    assert run_ranks(until, 1) == [[made, 5, [either, either, "until must be a whole number of at least 1."]]]


class Slow(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.rows = points(64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return self.rows[index]


def saved_by_time(world: Any, folder: Path) -> list[Any]:
    trainer = quiet(data=Slow(), checkpoints=nbkit.Checkpoints(every="0.05s", path=folder))
    saved = heard(trainer, "checkpoint")
    for _ in range(3):
        trainer.fit(6)
    return [[event.step for event in saved], [record["seconds"] for record in trainer.history]]


def test_checkpoints_by_time_are_due_at_the_same_step_on_every_rank(tmp_path: Path) -> None:
    (saved, seconds), other = run_ranks(saved_by_time, 2, tmp_path / "kept")

    assert other == [saved, seconds]
    assert len(saved) >= 2
    for before, step in zip([0, *saved], saved, strict=False):
        assert sum(seconds[before:step]) >= 0.05


def saved_by_default(world: Any, folder: Path) -> list[Any]:
    """Return for each training (whether it saved at least twice, its step, printed text, run directory)."""
    autosave.DETACHED_SAVE_EVERY = "0.02s"
    told = []
    for detached, asked in (
        (True, {"log_dir": str(folder / "runs")}),
        (True, {"checkpoints": nbkit.Checkpoints(path=folder / "kept")}),
        (True, {"log_dir": str(folder / "full")}),
        (True, {}),
        (True, {"log_dir": str(folder / "runs"), "checkpoints": nbkit.Checkpoints(every=False)}),
        (False, {"log_dir": str(folder / "runs")}),
    ):
        printed = io.StringIO()
        outer = DETACHED.set(detached)
        runs_dir.MAX_BYTES = 1 if asked.get("log_dir", "").endswith("full") else 0
        with contextlib.redirect_stdout(printed), warnings.catch_warnings(action="error"):
            trainer = quiet(data=Slow(), **asked)
            saved = heard(trainer, "checkpoint")
            trainer.fit(6)
            trainer.fit(6)
        DETACHED.reset(outer)
        told.append([len(saved) >= 2, trainer.step, printed.getvalue(), str(trainer.run_dir)])
    return told


@pytest.mark.long
def test_a_detached_training_saves_by_default(tmp_path: Path) -> None:
    first, second = run_ranks(saved_by_default, 2, tmp_path)

    assert [each[:2] for each in first] == [[True, 12], [True, 12], *[[False, 12]] * 4]
    (_, _, default, run), (_, _, named, _), (_, _, failed, _), *silent = first
    why = ", as every 0.02s in a detached cell (nbkit.Checkpoints(every=False): never)\n"
    assert (default, named) == (f"\rsaved to {run}/checkpoint{why}", f"\rsaved to {tmp_path}/kept{why}")
    assert re.match(
        r"\rnot saved at step \d+, training continues: The folder of runs is full: no checkpoint is written\. ", failed
    )
    assert [each[2] for each in [*silent, *second]] == [""] * 9
    assert Path(run).stat().st_mode & 0o077 == 0  # no other user reads it
    assert (Path(run) / "checkpoint" / ".metadata").exists() and (tmp_path / "kept" / ".metadata").exists()


def test_checkpoints_every_zero_are_refused() -> None:
    assert run_ranks(refused_never, 1) == [
        ["every is a whole number of steps, at least 1, or a time such as '10min'.", "every=0"]
    ]


def refused_never(world: Any) -> list[str]:
    with pytest.raises(TrainingError) as error:
        quiet(checkpoints=nbkit.Checkpoints(every=0))
    return [error.value.what, error.value.numbers]


def scheduled(world: Any) -> list[Any]:
    def groups(model: nn.Module) -> torch.optim.Optimizer:
        first, second = list(model.parameters())[:2], list(model.parameters())[2:]
        return torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.2}])

    trainer = quiet(optimizer=groups, lr_schedule=lambda step: 0.5**step)
    trainer.fit(3)
    trainer.lr = 1.0
    trainer.fit(2)
    return [[r["lr"] for r in trainer.history], trainer.optimizer.param_groups[1]["lr"]]


def test_a_rate_set_by_hand_keeps_the_schedule_and_the_ratio_of_groups() -> None:
    ((rates, second),) = run_ranks(scheduled, 1)

    # The rate was set while the factor of the third step, 0.25, was in force; the fourth step has half of it.
    assert rates == pytest.approx([0.1, 0.05, 0.025, 0.5, 0.25])
    assert second == pytest.approx(0.5)


def tensor_rate(world: Any) -> list[float]:
    trainer = quiet(
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.1)), lr_schedule=lambda step: 0.5**step
    )
    return [r["lr"] for r in trainer.fit(3)]


def test_a_rate_in_a_tensor_is_recorded_with_the_value_of_its_step() -> None:
    assert run_ranks(tensor_rate, 1) == [pytest.approx([0.1, 0.05, 0.025])]


def with_dropout(world: Any) -> list[Any]:
    trainer = quiet(model=lambda: net(dropout=0.5))
    torch.manual_seed(world.place.rank + 100)
    trainer.fit(2)
    again = quiet(model=lambda: net(dropout=0.5))
    torch.rand(17)
    again.fit(2)
    return [[r["loss"] for r in trainer.history], [r["loss"] for r in again.history], flat(trainer.model)]


def test_randomness_of_a_step_depends_only_on_seed_and_step() -> None:
    first, second = run_ranks(with_dropout, 2)

    assert first[0] == first[1] == second[0]
    assert torch.equal(first[2], second[2])


def own_weights(world: Any) -> list[torch.Tensor]:
    torch.manual_seed(world.place.rank)
    module = net()
    trainer = quiet(model=module)
    built = quiet()
    return [flat(trainer.model), flat(built.model)]


def test_every_rank_starts_with_the_weights_of_rank_0() -> None:
    found = run_ranks(own_weights, 2)

    for which, seed in ((0, 0), (1, SEED)):
        torch.manual_seed(seed)
        expected = flat(net())
        assert all(torch.equal(one[which], expected) for one in found)


def two_runs(world: Any, folder: Path) -> list[str]:
    return [quiet(log_dir=str(folder), name="same").run_dir.name for _ in range(2)]


def test_two_runs_never_share_a_directory(tmp_path: Path) -> None:
    assert run_ranks(two_runs, 1, tmp_path) == [["same-dp1-b8", "same-dp1-b8-2"]]
