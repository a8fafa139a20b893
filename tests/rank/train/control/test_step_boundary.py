"""Test that requests act on all ranks after the same step. Otherwise ranks would hang in their next collective."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import quiet
from ranks import run_ranks

import nbkit
from nbkit.errors import NbkitError, Stopped
from nbkit.rank.train.control import step_boundary


def stopped_when_posted_apart(world: Any) -> dict[str, Any]:
    rank = world.place.rank

    def post(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == 2 + 3 * rank:
            step_boundary.inbox.post(1, "stop")

    trainer = quiet(batch_size=9, callbacks=[post])
    raised = False
    try:
        trainer.fit(50)
    except Stopped:
        raised = True
    stopped_at, history, idle = trainer.step, list(trainer.history), step_boundary.training() is None
    after = trainer.fit(2)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return {
        "raised": raised,
        "step": stopped_at,
        "history": history,
        "idle": idle,
        "after": [r["step"] for r in after],
        "sum": float(ones),
    }


def test_a_stop_that_arrives_at_different_times_stops_all_ranks_together() -> None:
    found = run_ranks(stopped_when_posted_apart, 3)

    assert all(one == found[0] for one in found)
    # Rank 2 gets the stop while it reads step 8, at the boundary after it. Step 9 tells the others, and all act.
    assert found[0]["step"] == 9
    assert found[0] == found[0] | {"raised": True, "idle": True, "after": [10, 11], "sum": 3.0}
    assert [r["step"] for r in found[0]["history"]] == list(range(1, 10))


def live_cells(world: Any) -> dict[str, Any]:
    rank = world.place.rank
    acted: list[tuple[Any, int, float]] = []

    def cell(payload: str) -> None:
        trainer = step_boundary.training()
        trainer.lr = 0.01
        acted.append((payload, trainer.step, trainer.evaluate(trainer._stream.data)))

    def post(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == 2 + rank:
            step_boundary.inbox.post(1, "cell", "first")
        if record["step"] == 3:
            step_boundary.inbox.post(2, "cell", "second")

    step_boundary.handlers["cell"] = cell
    trainer = quiet(callbacks=[post])
    trainer.fit(12)
    return {"acted": acted, "lr": [r["lr"] for r in trainer.history], "progress": step_boundary.progress()["step"]}


def test_a_live_cell_runs_on_all_ranks_at_the_same_step_and_training_goes_on() -> None:
    found = run_ranks(live_cells, 2)

    assert found[0] == found[1]
    assert [payload for payload, _, _ in found[0]["acted"]] == ["first", "second"]
    first_step = found[0]["acted"][0][1]
    assert found[0]["lr"] == pytest.approx([0.1] * first_step + [0.01] * (12 - first_step))
    assert found[0]["progress"] == 12


def stopped_while_saving(world: Any) -> list[Any]:
    def post(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == 2:
            step_boundary.inbox.post(1, "cell", "seen")
            step_boundary.inbox.post(2, "stop")

    acted: list[Any] = []
    step_boundary.handlers["cell"] = acted.append
    trainer = quiet(checkpoints=nbkit.Checkpoints(every=1, path="saved.pt"), callbacks=[post])
    with pytest.raises(Stopped):
        trainer.fit(12)
    return [trainer.step < 12, acted]


def test_a_training_that_saves_every_step_can_be_stopped() -> None:
    """Check it, because save() reads the numbers of the step, which also say that all ranks have a request."""
    assert run_ranks(stopped_while_saving, 2) == [[True, ["seen"]]] * 2


def reached_one_rank(world: Any) -> list[Any]:
    """Send a request only to rank 1, one only to rank 0 in a pause, and a stop only to rank 0 during steps."""
    step_boundary.SHARE_SECONDS = 0.02
    rank, seen = world.place.rank, list[Any]()

    def post(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == 2 and rank == 1:
            step_boundary.inbox.post(1, "pause", ["held"])
        if record["step"] > 2 and len(seen) == 2 and rank == 0:
            step_boundary.inbox.post(3, "stop")

    def hold(words: list[str]) -> None:
        seen.append((words, trainer.step))
        if rank == 0:
            step_boundary.inbox.post(2, "resume")
        step_boundary.hold(trainer.job.device)

    step_boundary.handlers |= {"pause": hold, "resume": lambda _: seen.append(step_boundary.let_go())}
    trainer = quiet(callbacks=[lambda *_: time.sleep(0.01), post])
    with pytest.raises(Stopped):
        trainer.fit(500)
    return [*seen, trainer.step]


def test_a_request_that_reached_only_some_ranks_acts_on_all() -> None:
    """Lose some messages, as when a process dies. All later requests would wait for the lost one."""
    found = run_ranks(reached_one_rank, 2)

    assert found[0] == found[1]
    (words, step), let_go, end = found[0]
    assert (words, let_go) == (["held"], True)
    assert 2 < step < end < 500


def posted_too_late(world: Any) -> dict[str, Any]:
    unserved: list[Any] = []
    step_boundary.handlers["unserved"] = unserved.append
    trainer = quiet()
    trainer.fit(2)
    if world.place.rank == 0:
        step_boundary.inbox.post(1, "stop")
    trainer.fit(5)
    # This stop was for the previous training, and comes late on the other rank, so it is ignored.
    step_boundary.inbox.post(1, "stop")
    trainer.fit(5)
    # This request is for the running training, but only one rank has it until the training ends.
    trainer._callbacks = (lambda _, record: step_boundary.inbox.post(2, "cell") if world.place.rank == 1 else None,)
    trainer.fit(3)
    return {"steps": trainer.step, "unserved": unserved}


def test_a_request_for_a_finished_training_does_not_affect_the_next() -> None:
    found = run_ranks(posted_too_late, 2)

    assert [one["steps"] for one in found] == [15, 15]
    assert found[0]["unserved"] == [(1, "stop", None)]
    assert found[1]["unserved"] == [(2, "cell", None)]


def fit_in_a_live_cell(world: Any) -> list[str]:
    raised: list[str] = []

    def cell(_: Any) -> None:
        try:
            step_boundary.training().fit(1)
        except NbkitError as error:
            raised.append(error.what)

    step_boundary.handlers["cell"] = cell
    trainer = quiet(callbacks=[lambda _, record: step_boundary.inbox.post(1, "cell")])
    trainer.fit(6)
    return [*raised, str(trainer.step)]


def test_fit_inside_a_live_cell_is_refused_and_the_training_goes_on() -> None:
    assert run_ranks(fit_in_a_live_cell, 1) == [["A training runs already.", "6"]]


def test_a_served_request_number_is_not_accepted_again() -> None:
    inbox = step_boundary.Inbox()
    inbox.post(1, "stop")
    inbox.post(2, "cell", "x")

    assert inbox.take(1) == ("stop", None)
    inbox.post(1, "stop")
    assert inbox.stage(1) == 0
    assert inbox.stage(2) == step_boundary.READY and inbox.highest() == 2
    assert inbox.drop(2) == [(2, "cell", "x")]


def a_callback_that_raises(world: Any) -> list[Any]:
    def fail(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == 3:
            raise ValueError("mine")

    trainer = quiet(callbacks=[fail])
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(10)
    trainer._callbacks = ()
    trainer.fit(2)
    return [step_boundary.training(), [r["step"] for r in trainer.history]]


def test_a_trainer_can_train_on_after_an_error_in_a_callback() -> None:
    assert run_ranks(a_callback_that_raises, 2) == [[None, [1, 2, 3, 4, 5]]] * 2
