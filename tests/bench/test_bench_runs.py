"""Test that the quickest benchmarks run a few rounds on real kernels. `make bench` runs all of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.notebook import control_plane
from bench.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def test_a_benchmark_runs_end_to_end_and_writes_the_table(tmp_path: Path) -> None:
    """Check the table, not whether a bar is met, which depends on the load of the machine."""
    out = tmp_path / "results"
    command = [sys.executable, "-m", "bench", "loadext", "--rounds", "2", "--out", str(out)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)

    assert done.returncode == 0, done.stderr
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    table = out.with_suffix(".md").read_text()
    assert table.strip() in done.stdout, done.stderr
    assert "failed" not in table, done.stderr
    assert [row["what"] for row in rows] == ["`%load_ext nbkit`, torch not imported"]
    assert len(rows[0]["samples"]["nbkit"]) == 2
    assert "| what | nbkit | peer | ratio [95 %] | A/A | bar | met |" in table


@pytest.mark.long
def test_the_control_plane_benchmark_runs_on_engines_without_torch(tmp_path: Path) -> None:
    out = tmp_path / "results"
    command = [sys.executable, "-m", "bench", "control_plane", "--ranks", "64", "--rounds", "3", "--out", str(out)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)

    assert done.returncode == 0, done.stderr
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [row["what"].partition(", ")[2].partition(",")[0] for row in rows] == [
        f"64 {kind} engines: {figure}"
        for kind in ("light", "bare")
        for figure in ("wall", "CPU of the kernel", "CPU of the busiest controller process")
    ]
    assert all(value > 0 for row in rows for value in row["samples"]["s"])


@pytest.mark.long
def test_the_experts_benchmark_compares_with_expert_parallelism_of_transformers(tmp_path: Path) -> None:
    """Compare the losses too: the benchmark fails if they differ."""
    out = tmp_path / "results"
    command = [sys.executable, "-m", "bench", "experts", "--quick", "--rounds", "1", "--out", str(out)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)

    assert done.returncode == 0, done.stderr
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [row["peer"].partition(",")[0] for row in rows[:4]] == ["transformers"] * 4
    assert len(rows) == 6 and all(value > 0 for row in rows for value in row["samples"]["nbkit"])


def test_a_number_of_engines_that_does_not_fit_becomes_a_row_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane, "SIZES", {"bare": (2, 10**9)})
    monkeypatch.setattr(control_plane, "ENGINE_BYTES", {"bare": 1 << 20})
    rows = control_plane.run(Settings(tmp_path, isolated=False, rounds=1))

    assert [row.what.partition(":")[0] for row in rows] == [
        *["trivial cell, 2 bare engines"] * 3,
        "control plane, 1000000000 bare engines",
    ]
    assert "MemoryError: 1000000000 engines take" in rows[-1].peer


@pytest.mark.long
@pytest.mark.parametrize("kind", ["light", "bare"])
def test_engines_and_their_controller_end_when_the_benchmark_is_killed(kind: str, tmp_path: Path) -> None:
    controller = subprocess.Popen(["sleep", "600"])
    command = [sys.executable, "-m", f"bench.rigs.{kind}_engine", str(tmp_path), "two", "2", str(controller.pid)]
    engines = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True)
    assert engines.stdin is not None

    engines.stdin.close()  # the system closes it when the benchmark ends

    assert engines.wait(60) == controller.wait(60) == -signal.SIGKILL


def test_an_unknown_benchmark_is_refused_with_the_known_names() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "sells"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 2
    assert "sells" in done.stderr and "cells" in done.stderr
