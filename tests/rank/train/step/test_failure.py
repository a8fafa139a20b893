"""Test that every rank reports the end of a run and a refused switch once, with the rank that failed first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Recording, heard, mean_loss, net, points, quiet
from ranks import run_ranks

import nbkit
from nbkit.errors import NotFinite, SwitchError
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.job import prepare
from nbkit.rank.train.step.failure import failure_of
from nbkit.records.events import Failed
from nbkit.records.record_file import rank_files, read_since
from nbkit.records.records import EventRecord


def failing(world: Any, folder: str) -> dict[str, Any]:
    data = points()
    data[9] = (torch.full((6,), float("nan")), data[9][1])
    trainer = quiet(data=data, loading=nbkit.Loading(shuffle=False), log_dir=folder)
    with pytest.raises(NotFinite):
        trainer.fit(3)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SwitchError):
        patch.setattr(job_state, "allocate", lambda *args: 1 / 0)
        trainer.switch("zero2")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SwitchError):
        patch.setattr(job_state, "allocate", lambda *args: 1 / 0)
        trainer.try_out("zero2", 2)  # a trial, which is no event
    trainer.fit(1)
    return {"run": str(trainer.run_dir)}


def test_a_loss_that_is_not_finite_and_a_failed_switch_are_events_on_every_rank(tmp_path: Path) -> None:
    found = run_ranks(failing, 2, str(tmp_path), timeout=120)

    run = Path(found[0]["run"])
    for path in rank_files(run).values():
        told = [one.event for one in read_since(path)[0] if isinstance(one, EventRecord)]
        nan, switch = (one for one in told if one["kind"] == "failure")
        assert (nan["step"], nan["rank"], nan["error"]) == (1, 0, "NotFinite") and "step 2 is not finite" in nan["what"]
        assert (switch["rank"], switch["error"]) == (None, "SwitchError")
        assert "making room for the new sharded model" in switch["what"] and "ZeroDivisionError" in switch["what"]
        kinds = [one["kind"] for one in told]
        assert kinds == ["run_started", "failure", "run_stopped", "failure", "run_started", "run_stopped"]
    assert ["NotFinite" in text for text in board_texts(run)].count(True) == 2  # the failure, and the end of the run
    assert any(text.startswith("failure: step 1, error SwitchError") for text in board_texts(run))


def board_texts(run: Path) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    read = EventAccumulator(str(run)).Reload()
    return [
        make_ndarray(event.tensor_proto).item().decode()
        for tag in read.Tags()["tensors"]
        if "event" in tag
        for event in read.Tensors(tag)
    ]


def alone(world: Any) -> list[Any]:
    job = prepare(net, Recording, loss=mean_loss, log_dir=None)
    looped = heard(job, "failure", "run_stopped")
    batch = tuple(map(torch.stack, zip(*points()[:8], strict=True)))
    with pytest.raises(RuntimeError, match="shapes"):
        for inputs, target in job.batches([batch]):
            job.backward((inputs[:, :5], target))
    trainer = quiet(callbacks=[lambda *_: 1 / 0])
    fitted = heard(trainer, "failure", "run_stopped")
    with pytest.raises(ZeroDivisionError):
        trainer.fit(3)
    return [*looped, *fitted]


def test_an_error_is_reported_by_its_rank_in_a_users_own_loop_too() -> None:
    (told,) = run_ranks(alone, 1)

    loop, _, callback, stopped = told
    assert (loop.rank, loop.error) == (0, "RuntimeError") and "shapes" in loop.what
    assert (callback.rank, callback.error, callback.what) == (0, "ZeroDivisionError", "division by zero")
    assert stopped.reason == "ZeroDivisionError"


def released(world: Any) -> list[Any]:
    world.dirty = "rank 1 died"
    gone = failure_of(RuntimeError("Connection closed by peer"), step=4)
    world.dirty = "the cell was stopped while it waited"
    stopped = failure_of(RuntimeError("Connection closed by peer"), step=4)
    world.dirty = ""
    return [gone, stopped, failure_of(RuntimeError("[/pair.cc] Connection closed by peer\nmore"), step=4)]


def test_a_released_rank_names_the_rank_it_waited_for() -> None:
    ((gone, stopped, unknown),) = run_ranks(released, 1)

    assert gone == Failed(4, rank=1, what="rank 1 died")
    assert stopped is None
    assert unknown == Failed(4, rank=None, error="RuntimeError", what="[/pair.cc] Connection closed by peer")


def test_a_reported_error_can_be_encoded_whatever_its_text() -> None:
    told = failure_of(ValueError("odd " + chr(0xD800)), step=1)  # half of a surrogate pair, which UTF-8 cannot hold

    assert told is not None and told.what == r"odd \ud800"
