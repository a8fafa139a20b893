"""The benchmarks run as a user runs them: the two quickest, a few rounds, on real kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_two_benchmarks_run_end_to_end_and_write_the_table(tmp_path: Path) -> None:
    """Whether a bar is met is not asserted: that depends on what else the machine does."""
    out = tmp_path / "results"
    command = [sys.executable, "-m", "bench", "loadext", "cells", "--rounds", "3", "--ranks", "2", "--out", str(out)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)

    assert done.returncode == 0, done.stderr
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    table = out.with_suffix(".md").read_text()
    assert table.strip() in done.stdout, done.stderr
    assert "failed" not in table, done.stderr
    assert {row["what"] for row in rows} == {"`%load_ext nbkit`, torch not imported", "trivial cell, 2 ranks"}
    assert [len(row["samples"]["nbkit"]) for row in rows if row["samples"]] == [3] * sum(
        bool(r["samples"]) for r in rows
    )
    assert any("`%%px`" in row["peer"] for row in rows)
    assert any("nbdistributed" in row["peer"] for row in rows)
    assert "| what | nbkit | peer | ratio [95 %] | A/A | bar | met |" in table


def test_an_unknown_benchmark_is_refused_with_the_names_of_those_there_are() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "sells"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 2
    assert "sells" in done.stderr and "cells" in done.stderr
