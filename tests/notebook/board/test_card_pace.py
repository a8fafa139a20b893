"""Test that the card shows new steps between two pictures of all ranks, which cost far more."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_run import FakeRun

from nbkit import read_run
from nbkit.notebook.cluster.why import RankState
from nbkit.notebook.widgets.training_card import LiveCard
from nbkit.records.records import StepRecord
from nbkit.wire.activity import Activity, CodeLine, Operation


def test_the_card_shows_new_steps_between_two_pictures(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 2, "dp=2")
    shown: list[dict[str, str]] = []
    execution = cast(Any, SimpleNamespace(observers=[]))
    card = LiveCard(execution, lambda: run.folder, lambda: True, lambda put, bundle: shown.append(bundle))

    for _ in range(2):
        run.step()
    card._look()
    card._picture_due = float("inf")
    run.step()
    card._look()

    assert [bundle["text/plain"].split(" · ")[0] for bundle in shown] == ["dp=2   step 2", "dp=2   step 3"]
    run.close()


def test_a_training_that_ends_between_two_looks_has_its_card(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 2, "dp=2")
    execution, put = cast(Any, SimpleNamespace(observers=[], sent=time.time())), []
    card = LiveCard(execution, lambda: run.folder, lambda: True, lambda *_: None)
    card._put = lambda bundle, last=False: put.append((bundle, last))  # type: ignore[method-assign]
    card._shown = True  # the clock, while the model was analysed
    assert card._rest(0.0) < 0.5  # only frequent looks find such a training

    card._look()
    for _ in range(20):
        run.step()
    run.close()
    card._finish(execution)

    assert [(bundle["text/plain"].split(" · ")[0], last) for bundle, last in put] == [("dp=2   20 steps", True)]
    assert card._rest(0.0) == 1.0


def test_the_clock_of_a_waiting_cell_names_what_the_ranks_do_after_ten_seconds() -> None:
    shown: list[dict[str, str]] = []
    execution = SimpleNamespace(observers=[], prompts={}, closing=False, waiting_for=[0, 1, 3], sent=time.time())
    states = {
        0: RankState(0, "answers", "", activity=Activity(0, 1, waits=Operation("all_reduce", "g", "dp", (0, 1), 17))),
        1: RankState(1, "answers", "", CodeLine("", 7, cell=4), Activity(1, 1)),
        2: RankState(2, "answers", "", activity=Activity(2)),
        3: RankState(3, "answers", "", CodeLine("", 7, cell=4), Activity(3, 1)),
    }
    card = LiveCard(cast(Any, execution), lambda: None, lambda: False, lambda put, bundle: shown.append(bundle))
    card.states = lambda: states

    card._look()
    assert shown == []
    execution.sent = time.time() - 5
    card._look()
    assert shown.pop()["text/plain"] == "5 s"
    execution.sent = time.time() - 125
    card._look()
    text = shown.pop()["text/plain"]
    assert text == "2:05 min · rank 0 waits in all_reduce #17 on dp; ranks 1,3 run cell 4 line 7"
    execution.prompts = {0: "a question"}
    card._look()
    assert shown == []


def test_an_interrupted_step_has_a_picture_without_ranks(tmp_path: Path) -> None:
    """Write a step of which no rank knows the parts."""
    run = FakeRun(tmp_path / "run", 2, "dp=2")
    run.step()
    for rank in range(2):
        run._write(rank, StepRecord(2, seconds=0.5, numbers={"step": 2, "loss": 1.0, "strategy": "dp=2"}))
    run.close()
    found = read_run(run.folder).picture(2)
    assert (found["seconds"], found["ranks"], found["reading"]) == (0.5, [], "")


def test_an_error_of_the_card_goes_only_to_the_kernels_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over = SimpleNamespace(done=lambda: bool(said))
    said: list[str] = []
    monkeypatch.setattr(sys, "__stderr__", SimpleNamespace(write=said.append, flush=lambda: None))
    card = LiveCard(cast(Any, SimpleNamespace(observers=[], done=over)), lambda: tmp_path, lambda: 1 / 0 > 0, print)
    card._keep_looking()
    assert "no card: ZeroDivisionError" in "".join(said)
    assert capsys.readouterr().err == ""
