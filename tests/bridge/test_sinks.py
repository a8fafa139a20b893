"""Test that a user's sink stays open during its training: a new rank 0 opens it again, and a stop closes it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from training_cell import NETWORK

from nbkit import Cluster

SINKS = """
import json, pathlib, warnings

class Lines:
    def __init__(self, path):
        self.path = path

    def note(self, **item):
        with open(self.path, "a") as file:
            file.write(json.dumps({**item, "pid": os.getpid()}) + "\\n")

    def open(self, run):
        self.note(kind="open", name=run["name"])

    def write(self, event):
        self.note(kind=event["kind"], step=event["step"])

    def close(self):
        self.note(kind="close")

class Unpicklable(Lines):
    def __reduce__(self):
        raise TypeError("a connection of this process")
"""
STEPS = 16


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def two(nbkit_home: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # ipykernel does not watch stdout if it sees this
        cluster = Cluster.start(2, cpu=True, name="sinks", ttl=600)
    yield cluster
    if cluster.entry.is_alive():
        cluster.stop()


def test_a_sink_is_reopened_on_a_new_rank_0_and_closed_by_stop(
    two: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, lost = tmp_path / "kept.jsonl", tmp_path / "lost.jsonl"
    two.run(f"import os\n{NETWORK}\n{SINKS}\nslow, crash, steps = 0.05, {{}}, {STEPS}")
    two.run(f"trainer = make(sinks=[Lines({str(kept)!r}), Unpicklable({str(lost)!r})], name='tracked')")
    victim = two.entry.ranks[0].pid

    def kill() -> None:
        while not any(one["kind"] == "step" and one["step"] >= 4 for one in lines(kept)):
            time.sleep(0.02)
        os.kill(victim, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    results = two.run("history = trainer.fit(steps)\nlen(history)", timeout=120)
    thread.join()

    assert results.values == {0: STEPS, 1: STEPS}
    told = lines(kept)
    opened = [one for one in told if one["kind"] == "open"]
    assert [one["pid"] == victim for one in opened] == [True, False]
    assert {one["name"] for one in opened} == {"tracked"}
    assert told[-1]["kind"] == "run_stopped" and told[-1]["pid"] == opened[1]["pid"]
    assert {one["pid"] for one in lines(lost)} == {victim}
    said, deadline = "", time.monotonic() + 10  # the line may come after the result
    while "the sink Unpicklable gets no more events" not in said:
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
        captured = capsys.readouterr()
        said += captured.out + captured.err

    # A change of the number of ranks does not reopen the sink.
    two.resize(1)
    two.run("trainer.fit(2)")
    after = [one["kind"] for one in lines(kept)[len(told) :]]
    assert after.count("step") == 2 and "resized" in after and not {"open", "close"} & {*after}

    two.stop()
    assert lines(kept)[-1]["kind"] == "close"
