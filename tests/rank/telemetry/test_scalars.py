"""Test the scalars that one rank writes for TensorBoard. The tests read them back from the event files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbkit.rank.telemetry import tensorboard
from nbkit.rank.telemetry.sinks import InThread
from nbkit.records import tags
from nbkit.records.events import RunStarted, RunStopped, StepDone
from nbkit.records.record_file import RecordFile
from nbkit.records.records import Group, Header, MemoryRecord, StepRecord, Traffic

GROUP = Group("dp 0 [0,1]", "dp", (0, 1))


def step(number: int, strategy: str) -> StepRecord:
    return StepRecord(
        number,
        seconds=0.1 * number,
        parts={"compute": 0.06 * number, "exposed": 0.03 * number, "bubble": 0.01 * number},
        traffic=(
            Traffic("all_reduce", "dp", GROUP.label, None, 2, 1000, 2, 0.002, 0.001),
            Traffic("barrier", "dp", GROUP.label, None, 1, 0, 0, 0.0, 0.0),
        ),
        numbers={"strategy": strategy},
        own_seconds=0.001 * number,
        experts={"4": 10.0 * number, "5": 30.0 * number},
    )


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def sink_of(run_dir: Path, rank: int) -> InThread:
    sink = tensorboard.rank_sink(run_dir, rank)
    assert sink is not None
    return sink


@pytest.fixture
def records(tmp_path: Path) -> Iterator[RecordFile]:
    file = RecordFile(tmp_path / "telemetry" / "rank1.jsonl", lambda part: [Header(1, 2, part), GROUP])
    yield file
    file.close()


def test_a_rank_writes_means_into_its_own_directory(tmp_path: Path, records: RecordFile) -> None:
    writer = sink_of(tmp_path, 1)
    writer.write(RunStarted(0).as_dict())
    records.write([step(1, "ddp"), step(3, "ddp"), step(5, "zero1"), MemoryRecord(3, parameters=77, peak=99)])
    writer.write(RunStopped(5).as_dict())

    found = scalars(tmp_path / "rank1")

    near = pytest.approx
    # Steps 1 and 3 are one mean; the strategy of step 5 is another.
    assert found[tags.RANK_SECONDS] == [(3, near(0.2)), (5, near(0.5))]
    assert found[tags.part("compute")] == [(3, near(0.12)), (5, near(0.3))]
    assert found[tags.BUBBLE] == [(3, near(0.1)), (5, near(0.1))]
    assert found[tags.MEASURING] == [(3, near(0.01)), (5, near(0.01))]
    assert found[tags.EXPERTS] == [(3, 80), (5, 200)] and found[tags.expert("5")] == [(3, 60), (5, 150)]
    assert found[tags.moved("all_reduce", "dp", "bytes")] == [(3, 1000), (5, 1000)]
    assert found[tags.moved("all_reduce", "dp", "call_seconds")][0] == (3, near(0.001))
    assert found[tags.moved("all_reduce", "dp", "algbw")][0] == (3, near(500_000))
    assert found[tags.moved("all_reduce", "dp", "overlap")][0] == (3, near(0.5))
    assert found[tags.memory("parameters")] == [(3, 77)] and found[tags.memory("peak")] == [(3, 99)]
    # An operation that was not timed has no time.
    assert tags.moved("barrier", "dp", "call_seconds") not in found
    # A second run continues after the first, and writes nothing twice.
    writer.write(RunStarted(5).as_dict())
    records.write([step(6, "zero1")])
    writer.write(RunStopped(6).as_dict())
    assert [number for number, _ in scalars(tmp_path / "rank1")[tags.RANK_SECONDS]] == [3, 5, 6]


def test_a_rank_that_cannot_write_warns_why_and_goes_on(tmp_path: Path, records: RecordFile) -> None:
    writer = sink_of(tmp_path, 1)
    (tmp_path / "rank1").write_text("in the way")
    records.write([step(1, "ddp")])

    with pytest.warns(UserWarning, match="nothing more is written for TensorBoard"):
        writer.write(RunStopped(1).as_dict())
    writer.write(RunStopped(2).as_dict())


def test_the_layout_of_custom_scalars_names_only_tags_that_are_written(tmp_path: Path) -> None:
    writer = tensorboard.job_sink(tmp_path)
    assert writer is not None
    record: dict[str, Any] = {"loss": 1.0, "seconds": 0.5, "tokens": 50, "samples": 5, "mfu": 0.4}
    writer.write(
        StepDone(1, record={**record, "lr": 1e-3, "grad_norm": 2.0, "eval_loss": 3.0, "imbalance": 1.2}).as_dict()
    )
    writer.write(RunStopped(1).as_dict())

    found = scalars(tmp_path)
    assert found[tags.MFU] == [(1, pytest.approx(0.4))] and found[tags.SAMPLES_PER_SECOND] == [(1, 10.0)]
    of_ranks = [tags.RANK_SECONDS, tags.BUBBLE, tags.MEASURING, tags.part("data"), tags.memory("peak")]
    of_ranks += [tags.EXPERTS, tags.expert("0")]
    of_ranks += [tags.moved("send", "pp", what) for what in ("bytes", "call_seconds", "busbw")]
    for charts in tags.layout().values():
        for kind, expressions in charts.values():
            assert kind == "Multiline"
            for expression in expressions:
                assert any(re.search(expression, tag) for tag in [*found, *of_ranks]), expression
    assert "custom_scalars__config__" in b"".join(path.read_bytes() for path in tmp_path.iterdir()).decode("latin-1")
