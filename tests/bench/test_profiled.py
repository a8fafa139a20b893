"""Test the reference of `bench attached`, which is computed from a trace of torch's profiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.telemetry.profiled import parts_of


def test_operations_that_overlap_count_once_and_the_rest_of_a_step_is_compute(tmp_path: Path) -> None:
    marks = [
        ("Optimizer.step#AdamW.step", 0, 10),
        ("enumerate(DataLoader)#_Single.__next__", 10, 90),
        ("aten::mm", 90, 200),
    ]
    marks += [("gloo:all_reduce", 300, 400), ("gloo:all_reduce", 301, 450), ("Optimizer.step#AdamW.step", 450, 470)]
    events = [{"ph": "X", "name": name, "ts": 1e3 * start, "dur": 1e3 * (stop - start)} for name, start, stop in marks]
    (tmp_path / "trace0.json").write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}))

    parts = parts_of(tmp_path / "trace0.json")

    assert parts == pytest.approx({"compute": 0.210, "communication": 0.150, "data": 0.080})
