"""Test that a control always stores a result on its rank, and raises only an error that breaks the training."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbkit.bridge.training_requests import RESULTS_KEPT, Control, TrainingRequestHandler
from nbkit.errors import NotFinite, StrategyError, TrainingError
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.rank_sync import Integrity
from nbkit.rank.train.step.history import StepPace


class Refusing:
    """Imitates a Trainer whose switch raises."""

    step, strategy = 7, "dp=2"
    lr: float

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.job = SimpleNamespace(step=7, strategy="dp=2", pending=None, integrity=Integrity())

    def switch(self, strategy: str, *, beside: bool) -> Any:
        raise self.error


@pytest.fixture
def controls(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingRequestHandler]:
    monkeypatch.setattr(step_boundary, "_newest", None)
    estimates = "nbkit.rank.train.estimate.strategy_table"
    monkeypatch.setattr(f"{estimates}.predicted_switch", lambda job, text: {})  # no model
    monkeypatch.setattr(f"{estimates}.findings", lambda job: iter(()))
    yield TrainingRequestHandler()
    step_boundary.handlers.pop("control")


def served(controls: TrainingRequestHandler, owner: Any, do: str = "switch", **args: Any) -> dict[str, Any]:
    step_boundary.note(owner)
    controls.serve(Control("a", do, args))
    return dict(controls.result("a")["result"])


def test_a_refusal_is_a_result_and_raises_nothing(controls: TrainingRequestHandler) -> None:
    told = served(controls, Refusing(StrategyError("No.", numbers="3 x 2 = 6", hint="tp=2")), strategy="tp=3")

    assert (told["ok"], told["error"], told["what"]) == (False, "StrategyError", "No.")
    assert (told["numbers"], told["hint"], told["step"], told["strategy"]) == ("3 x 2 = 6", "tp=2", 7, "dp=2")


@pytest.mark.parametrize("error", [RuntimeError("peer gone"), KeyboardInterrupt(), NotFinite("NaN.", step=7, rank=0)])
def test_an_error_that_breaks_the_training_is_raised_and_stored(
    controls: TrainingRequestHandler, error: BaseException
) -> None:
    owner = Refusing(error)
    with pytest.raises(type(error)):
        served(controls, owner, strategy="tp=2")

    told = controls.result("a")["result"]
    assert told is not None
    assert not told["ok"]
    assert told["error"] == type(error).__name__


def test_a_refusal_in_a_step_of_a_trial_ends_the_training(
    controls: TrainingRequestHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raise the error, because only this rank may refuse while the others wait in that step."""
    owner = Refusing(TrainingError("A stage returned other tensors than before."))
    owner.job.integrity.broken_off = True
    monkeypatch.setattr(step_boundary, "_training", owner)
    with pytest.raises(TrainingError):
        served(controls, owner, strategy="pp")


def test_controls_without_a_trainer_or_without_a_meaning_are_refused(controls: TrainingRequestHandler) -> None:
    controls.serve(Control("a", "undo", {}))
    assert "no Trainer" in controls.result("a")["result"]["what"]
    owner = Refusing(StrategyError("No."))
    assert "not a control" in served(controls, owner, "explode")["what"]
    refused = served(controls, owner, "pause")
    assert "nothing to pause" in refused["what"] and "trainer.fit" in refused["hint"]
    assert "not paused" in served(controls, owner, "resume")["what"]


def test_a_pause_is_reported_after_the_training_is_held(
    controls: TrainingRequestHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the order: if reversed, the panel shows a running training, and an immediate resume is refused."""
    owner = Refusing(StrategyError("No."))
    owner.job.device = torch.device("cpu")
    monkeypatch.setattr(step_boundary, "_training", owner)
    tell, held = controls._tell, []

    def telling(*args: Any, **told: Any) -> None:
        held.append(step_boundary.is_held())
        tell(*args, **told)
        step_boundary.let_go()

    monkeypatch.setattr(controls, "_tell", telling)
    # If the pause came later, the rank would wait here for requests of other ranks.
    monkeypatch.setattr(step_boundary, "largest", lambda *_, **__: pytest.fail("it was told before it was held"))
    assert served(controls, owner, "pause")["ok"]
    assert held == [True] and not step_boundary.is_held()


def test_the_learning_rate_is_set_on_a_trainer_and_refused_on_other_jobs(controls: TrainingRequestHandler) -> None:
    owner = Refusing(StrategyError("No."))
    assert "Only a Trainer" in served(controls, owner, "lr", value=0.1)["what"]
    owner.lr = 0.5
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        assert "a number above 0" in served(controls, owner, "lr", value=wrong)["what"]
    assert served(controls, owner, "lr", value=0.1)["result"] == {"old": 0.5, "new": 0.1}
    assert owner.lr == 0.1


def test_a_control_that_comes_too_late_is_refused(controls: TrainingRequestHandler) -> None:
    controls.unserved(Control("b", "switch", {"strategy": "tp"}))

    assert "ended before its next step boundary" in controls.result("b")["result"]["what"]
    assert controls.result("c") == {"result": None, "known": False}


def test_only_the_newest_results_are_kept(controls: TrainingRequestHandler) -> None:
    for number in range(RESULTS_KEPT + 9):
        controls.serve(Control(str(number), "undo", {}))

    assert len(controls.results) == RESULTS_KEPT
    assert controls.result("0") == {"result": None, "known": False}


def training(strategy: str) -> SimpleNamespace:
    """Return the parts of a training that the table of strategies reads, at step 300."""
    return SimpleNamespace(
        step=300,
        strategy=strategy,
        device=torch.device("cpu"),
        ledger=SimpleNamespace(paces=SimpleNamespace(trials=0)),
    )


def test_the_table_is_made_again_when_a_step_of_the_strategy_is_timed(
    controls: TrainingRequestHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, timed, made = training("tp=2"), [], []
    monkeypatch.setattr("nbkit.bridge.training_requests.newest", lambda: owner)
    monkeypatch.setattr("nbkit.bridge.training_requests.measured_pace", lambda job, strategy: next(iter(timed), None))
    monkeypatch.setattr(
        "nbkit.rank.train.estimate.strategy_table.table",
        lambda job: made.append(job.step) or {"strategy": "tp=2", "step": job.step},
    )

    def look(step: int) -> None:
        owner.step = step
        controls.strategies()
        assert controls._tabling is not None
        controls._tabling.join()

    look(300)
    look(301)
    controls._rest = float("inf")  # as if the last table took long
    timed.append(StepPace(0.1, None, None, 1, ago=200))  # measured before the last switches
    look(301)
    timed[0] = StepPace(0.1, None, None, 1)
    look(302)
    look(303)
    assert made == [300, 302]
    controls._rest = 0.0
    for step, seconds in ((304, 0.1), (305, 0.103), (306, 0.106), (307, 0.109)):
        timed[0] = StepPace(seconds, None, None, 1)
        look(step)
    assert made[2:] == [306]  # the pace has changed by more than 5 %


def test_the_table_is_updated_after_each_switch_and_each_finding_of_the_analysis(
    controls: TrainingRequestHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, go_on, made = training("dp=2"), threading.Semaphore(0), []

    def findings(job: Any) -> Iterator[None]:
        for number in range(2):
            assert go_on.acquire(timeout=60)
            made.append(f"finding {number}")
            assert sys.getswitchinterval() < 0.001  # so the thread of the training rarely waits for this one
            yield

    def table(job: Any) -> dict[str, Any]:
        made.append(job.strategy)
        return {"strategy": job.strategy, "step": job.step}

    monkeypatch.setattr("nbkit.bridge.training_requests.newest", lambda: owner)
    monkeypatch.setattr(
        "nbkit.bridge.training_requests.measured_pace", lambda job, strategy: StepPace(0.1, None, None, 1)
    )
    monkeypatch.setattr("nbkit.rank.train.estimate.strategy_table.table", table)
    monkeypatch.setattr("nbkit.rank.train.estimate.strategy_table.findings", findings)
    controls._rest = float("inf")

    def look(until: str) -> None:
        deadline = time.monotonic() + 60
        while made[-1:] != [until]:
            assert time.monotonic() < deadline, made
            controls.strategies()
            time.sleep(0.005)

    look("dp=2")
    owner.strategy = "tp=2"  # a switch before the first finding
    look("tp=2")
    go_on.release()
    look("finding 0")
    look("tp=2")
    go_on.release()
    look("finding 1")
    look("tp=2")
    assert made == ["dp=2", "tp=2", "finding 0", "tp=2", "finding 1", "tp=2"]
    assert sys.getswitchinterval() == pytest.approx(0.005)
