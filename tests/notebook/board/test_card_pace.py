"""The card follows the steps also while it is too early for another picture of all ranks, which costs far more."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_run import FakeRun

from nbkit import read_run
from nbkit.notebook.widgets.training_card import LiveCard
from nbkit.records.records import StepRecord


def test_steps_are_followed_between_two_pictures(tmp_path: Path) -> None:
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


def test_a_step_that_was_left_half_way_has_a_card_and_a_picture(tmp_path: Path) -> None:
    """No rank knows the parts of this step."""
    run = FakeRun(tmp_path / "run", 2, "dp=2")
    run.step()
    for rank in range(2):
        run._write(rank, StepRecord(2, seconds=0.5, numbers={"step": 2, "loss": 1.0, "strategy": "dp=2"}))
    run.close()
    found = read_run(run.folder).picture(2)
    assert (found["seconds"], found["ranks"], found["reading"]) == (0.5, [], "")


def test_a_card_that_cannot_be_drawn_says_so_in_the_kernels_log_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over = SimpleNamespace(done=lambda: bool(said))
    said: list[str] = []
    monkeypatch.setattr(sys, "__stderr__", SimpleNamespace(write=said.append, flush=lambda: None))
    card = LiveCard(cast(Any, SimpleNamespace(observers=[], done=over)), lambda: tmp_path, lambda: 1 / 0 > 0, print)
    card._keep_looking()
    assert "no card: ZeroDivisionError" in "".join(said)
    assert capsys.readouterr().err == ""
