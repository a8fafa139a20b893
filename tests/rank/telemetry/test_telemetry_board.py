"""Test that a run without TensorBoard warns once and goes on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from nbkit.rank.telemetry import tensorboard
from nbkit.records.events import RunStopped, StepDone


def test_without_tensorboard_one_line_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "tensorboard" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)

    with pytest.warns(UserWarning, match="pip install tensorboard") as caught:
        assert tensorboard.job_sink(tmp_path) is None

    assert len(caught) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_fails_warns_why_and_does_not_hang_or_end_the_run(tmp_path: Path) -> None:
    writer = tensorboard.job_sink(tmp_path)
    assert writer is not None
    writer.write(StepDone(1, record={}).as_dict())

    with pytest.warns(UserWarning, match="KeyError") as caught:
        writer.write(RunStopped(1).as_dict())
        writer.write(RunStopped(2).as_dict())

    assert len(caught) == 1
