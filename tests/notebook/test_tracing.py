"""Test `cluster.trace`: the next steps of a real training in one file, and the errors if there are none."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from forked_parents import forked_parents

from nbkit.errors import TrainingError, UsageError
from nbkit.notebook.cluster.cluster import Cluster
from nbkit.records.record_file import rank_files, read_since
from nbkit.records.records import Detail, StepRecord

RANKS, MICROS = 4, 4
TRAINER = """
import time
torch.set_num_threads(1)
trainer = nbkit.Trainer(
    model=lambda: nbkit.GPT(nbkit.GPTConfig(block=16, layers=2, heads=2, width=16)),
    loss=lambda logits, target: torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    data=nbkit.TextDataset(block=16, limit=20_000), batch_size=16, progress=False,
    strategy="dp=2 pp=2 schedule=1f1b microbatches=4", callbacks=[lambda *_: time.sleep(0.03)],
    recovery=nbkit.Recovery(backup_every=0))  # a backup within the traced steps is sent too, and would be counted
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("traced")
    with forked_parents(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("NBKIT_HOME", str(home / "clusters"))
        made = Cluster.start(RANKS, name="traced", cpu=True, ttl=120)
        yield made
        made.stop()


def test_trace_without_a_running_training_is_refused(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match="no Trainer on the ranks"):
        cluster.trace(3)
    cluster.run(TRAINER)
    with pytest.raises(UsageError, match="Nothing makes steps"):
        cluster.trace(3)
    assert not list(Path().glob("trace-*"))


def test_the_next_steps_of_every_rank_are_one_valid_trace(cluster: Cluster) -> None:
    handle = cluster.run("trainer.fit(100_000)", detach=True)
    try:
        wait_for_step(cluster, 5)  # after the steps that are always kept
        found = cluster.trace(3)
        with pytest.raises(UsageError, match="at least 1"):
            cluster.trace(0)
    finally:
        handle.stop()

    assert (found.ranks, found.last - found.first) == (RANKS, 2) and found.first > 5
    assert found.path.name.endswith(f"-{found.first}-{found.last}.json.gz") and found.path.parent == Path.cwd()
    events = json.loads(gzip.decompress(found.path.read_bytes()))["traceEvents"]
    check_format(events)
    assert {event["pid"] for event in events} == set(range(RANKS))
    for rank in range(RANKS):
        check_rank([event for event in events if event["pid"] == rank], range(found.first, found.last + 1))
    check_messages(events)
    check_against_records(cluster, events, found.first, found.last)


def test_other_steps_are_kept_as_without_a_trace(cluster: Cluster) -> None:
    run = Path(cluster.run("str(trainer.run_dir)").values[0])
    for path in rank_files(run).values():
        kept = [one.step for one in read_since(path)[0] if isinstance(one, Detail)]
        assert kept[:3] == [1, 2, 3] and len([step for step in kept if step % 50]) == 6


@pytest.mark.long
def test_a_training_that_ends_early_gives_a_trace_of_its_steps(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(TRAINER)
    slow = "import time\ntrainer._callbacks += (lambda *_: time.sleep(0.1),)\ntrainer.fit(40)\ntrainer.step"
    handle = cluster.run(slow, detach=True)
    found = cluster.trace(10_000, tmp_path / "some.json.gz")
    assert found.path == tmp_path / "some.json.gz" and 0 < found.last - found.first < 40
    assert found.last == handle.wait().values[0]  # up to the very last step
    check_format(json.loads(gzip.decompress(found.path.read_bytes()))["traceEvents"])


@pytest.mark.long
def test_trace_of_an_unrecorded_or_paused_training_is_refused(cluster: Cluster) -> None:
    cluster.run(TRAINER.replace("progress=False", "progress=False, log_dir=None"))
    handle = cluster.run("trainer.fit(100_000)", detach=True)
    try:
        with pytest.raises(UsageError, match="is not recorded"):
            cluster.trace(3)
        cluster.training.pause()
        with pytest.raises(UsageError, match="paused"):
            cluster.trace(3)
        cluster.training.resume()
    finally:
        handle.stop()


def wait_for_step(cluster: Cluster, step: int) -> None:
    deadline = time.monotonic() + 60
    while cluster.training.look().get("step", 0) < step:
        assert time.monotonic() < deadline, "no step is made"
        time.sleep(0.05)


def check_format(events: list[dict[str, Any]]) -> None:
    """Check that the events follow the description of the format."""
    lines: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
        else:
            assert event["ts"] >= 0 and isinstance(event["cat"], str)
            assert event["ph"] in ("X", "s", "f")
        if event["ph"] == "X":
            assert event["dur"] >= 0
            start = round(event["ts"] * 1e3)
            lines.setdefault((event["pid"], event["tid"]), []).append((start, start + round(event["dur"] * 1e3)))
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == set(lines)
    for spans in lines.values():
        spans.sort()
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
    ends = Counter((event["id"], event["ph"]) for event in events if event["ph"] in "sf")
    assert set(ends.values()) <= {1} and {(id, "s") for id, _ in ends} == {key for key in ends if key[1] == "s"}
    assert len(ends) % 2 == 0


def inside(event: dict[str, Any], outer: dict[str, Any]) -> bool:
    start, stop = event["ts"], event["ts"] + event.get("dur", 0.0)
    return bool(outer["ts"] - 1e-3 <= start and stop <= outer["ts"] + outer["dur"] + 1e-3)


def check_rank(events: list[dict[str, Any]], numbers: range) -> None:
    spans = [event for event in events if event["ph"] == "X"]
    steps = {event["name"]: event for event in spans if event["cat"] == "steps"}
    assert sorted(steps) == sorted(f"step {number}" for number in numbers)
    assert all(
        event["args"]["loss"] > 0 and "calls that are not shown" not in event["args"] for event in steps.values()
    )
    for number in numbers:
        own = [event for event in spans if event["cat"] != "steps" and inside(event, steps[f"step {number}"])]
        names = Counter(event["name"] for event in own if event["cat"] == "pipeline")
        assert names == {f"{what} {micro}": 1 for what in ("forward", "backward") for micro in range(MICROS)}
        states = [event for event in own if event["cat"] == "what the training thread does"]
        assert {"forward", "backward", "optimizer"} <= {event["name"] for event in states}
        step = steps[f"step {number}"]
        assert sum(event["dur"] for event in states) == pytest.approx(step["dur"], abs=0.01)
        assert any(event["name"] == "all reduce" and event["args"]["bytes"] > 0 for event in own)
    # Every event is within a step.
    assert all(any(inside(event, step) for step in steps.values()) for event in spans)


def check_messages(events: list[dict[str, Any]]) -> None:
    def holds(end: dict[str, Any], event: dict[str, Any]) -> bool:
        return bool(event["pid"] == end["pid"] and event["tid"] == end["tid"] and inside(end, event))

    spans = [event for event in events if event["ph"] == "X"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    sends = [event for event in spans if event["name"].startswith("send to")]
    # Each micro-batch of a step and pipeline sends one forward and one backward. Messages that synchronize are empty.
    assert len(starts) == len(sends)
    assert sum(event["args"]["bytes"] > 0 for event in sends) == 2 * MICROS * 3 * (RANKS // 2)
    for id, start in starts.items():
        send = next(event for event in sends if holds(start, event))
        recv = [event for event in spans if event["name"].startswith("recv from") and holds(ends[id], event)]
        assert recv and recv[0]["args"]["peer"] == send["pid"] and send["args"]["peer"] == recv[0]["pid"]
        assert recv[0]["args"]["bytes"] == send["args"]["bytes"] and recv[0]["args"]["number"] == send["args"]["number"]


def check_against_records(cluster: Cluster, events: list[dict[str, Any]], first: int, last: int) -> None:
    """Check that the events have as many calls and bytes as the records of these steps."""
    run = Path(cluster.run("str(trainer.run_dir)").values[0])
    for rank, path in rank_files(run).items():
        steps = [one for one in read_since(path)[0] if isinstance(one, StepRecord) and first <= one.step <= last]
        shown = [event for event in events if event["pid"] == rank and "bytes" in event.get("args", {})]
        assert len(shown) == sum(row.calls for one in steps for row in one.traffic)
        assert sum(event["args"]["bytes"] for event in shown) == sum(row.bytes for one in steps for row in one.traffic)


def test_an_end_before_the_first_traced_step_is_an_error() -> None:
    from nbkit.notebook.tracing import KeptRecords

    kept = KeptRecords()
    kept.first, kept.last = 4, 6
    with pytest.raises(TrainingError, match="ended before"):
        kept.write(None)
