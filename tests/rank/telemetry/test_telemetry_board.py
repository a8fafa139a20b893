"""Without TensorBoard a run says so once and goes on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from nbkit.rank.telemetry.tensorboard import BoardWriter
from nbkit.records.events import RunStopped, StepDone


def test_without_tensorboard_one_line_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "tensorboard" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)

    with pytest.warns(UserWarning, match="pip install tensorboard") as caught:
        writer = BoardWriter(tmp_path)

    assert len(caught) == 1
    writer(StepDone(1, record={"loss": 1.0}))
    writer(RunStopped(1))
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_fails_says_why_and_neither_hangs_nor_ends_a_run(tmp_path: Path) -> None:
    writer = BoardWriter(tmp_path)
    writer(StepDone(1, record={}))

    with pytest.warns(UserWarning, match="KeyError") as caught:
        writer(RunStopped(1))
        writer(RunStopped(2))

    assert len(caught) == 1
