"""Test the line of a run in the tab's list: its figures use the same steps as in the other views."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_run import FakeRun

import nbkit
from nbkit.figures import unit_of
from nbkit.notebook.board.plugin.plugin import RunCatalog
from nbkit.notebook.run.follower import PARTS, point_of
from nbkit.records.readings import bars
from nbkit.records.record_file import mean_of
from nbkit.records.records import StepRecord


def test_the_figures_of_a_line_use_the_same_steps_as_the_dashboard(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "one", 4, "ddp", late=2)
    for _ in range(15):
        run.step()
    run.switch("dp=2 pp=2 schedule=1f1b microbatches=4")
    for _ in range(15):
        run.step()
    run.between = 0.002  # seconds between two steps: part of the rate, but of no rank's bar
    for _ in range(15):
        run.step()
    run.close()

    line = RunCatalog(tmp_path).summaries()[0]

    assert line["unit"] == "tokens"
    assert line["rate"] == nbkit.read_run(tmp_path / "one").snapshot()["state"]["rate"]
    assert line["seconds"] == pytest.approx(4096 * 4 / line["rate"], rel=0.001)
    assert sum(line["parts"]) == pytest.approx(line["seconds"], rel=0.01)
    # The switch recorded the new groups. Without them, it is unknown which ranks wait for each other.
    assert line["parts"][PARTS.index("waiting")] > 0


def test_the_rate_is_in_rows_if_each_row_counts_as_one_token(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "one", 2, "ddp")
    run.of_rows = True
    for _ in range(5):
        run.step()
    run.close()

    line = RunCatalog(tmp_path).summaries()[0]

    assert line["unit"] == "rows" and line["rate"] > 0
    # The overview of a long run has means of steps. The last step of an epoch may have fewer rows.
    steps = [StepRecord(n, numbers={"samples": rows, "tokens": float(rows)}) for n, rows in enumerate((48, 48, 7))]
    assert unit_of(mean_of([mean_of(steps[:2]), steps[2]]).numbers) == "rows"


def test_a_point_of_the_run_has_the_wall_clock_seconds_of_its_step() -> None:
    parts = {**dict.fromkeys(("exposed", "bubble", "data", "optimizer"), 0.0), "compute": 0.9, "other": 0.1}
    steps = {rank: StepRecord(7, seconds=1.0, parts=parts, numbers={"seconds": 1.25}) for rank in (0, 1)}

    _, _, seconds, *found = point_of(steps, bars(steps, {}))

    assert seconds == 1.25
    assert dict(zip(PARTS, found, strict=False)) == pytest.approx({**parts, "waiting": 0.0, "other": 0.35})
