"""Test that records are read as they were written, also during the writing, after a crash, and in long runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from nbkit.errors import UsageError
from nbkit.records import record_file, records
from nbkit.records.event_words import brief, recorded
from nbkit.records.record_file import Overview, RecordFile, mean_of
from nbkit.records.records import Group, Header, Record, StepRecord, Traffic

ROW = Traffic("all_reduce", "dp", "dp 1 [0,1]", None, 2, 1024, 2, 0.25, 0.125)
DETAIL = records.Detail(
    7,
    laps=(("data", 1, 5), ("wait dp", 5, 9)),
    calls=(records.TimedCall("send", "pp 2 [0,1]", 1, 3, 64, 10, None, 20, 0),),
    pipeline=(records.PipelineOp("F", 0, 1, 2, 3),),
)
EVERY: list[Record] = [
    Header(3, 4, 0, host="a", clock="cuda", strategy="dp=4", clock_ns=10**15 + 1, offset_ns=-5, unix_s=1795170000.125),
    Group("dp 1 [0,1]", "dp", (0, 1)),
    StepRecord(
        7, start_ns=10**15 + 3, seconds=0.5, parts={"compute": 0.5}, traffic=(ROW,), numbers={"loss": 1.25, "lr": 1e-9}
    ),
    records.Outside(7, (ROW,)),
    DETAIL,
    records.MemoryRecord(7, parameters=4, peak=9),
    records.HealthRecord(
        7, 5, 0.5, 9, "GPU-a", 1.5, 4, 2400.0, (records.GpuHealth("GPU-a", 0, 1.0, slowed="power cap"),)
    ),
    records.EventRecord(7, ns=3, event={"kind": "checkpoint", "path": "x"}),
]


def step(number: int) -> StepRecord:
    return StepRecord(number, seconds=1.0, numbers={"step": number, "loss": float(number)}, traffic=(ROW,))


def head(part: int) -> Sequence[Record]:
    return [Header(0, 2, part), Group("dp 1 [0,1]", "dp", (0, 1))]


def numbers(found: Sequence[Record]) -> list[int]:
    return [one.step for one in found if isinstance(one, StepRecord)]


@pytest.mark.parametrize("record", EVERY, ids=[one.kind for one in EVERY])
def test_a_record_is_equal_after_writing_and_reading(record: Record) -> None:
    line = records.to_line(record)

    assert line.count("\n") == 1 and line.endswith("\n")
    assert records.from_line(line) == record


def test_a_recorded_strategy_has_a_digest_of_its_experts() -> None:
    place = "+".join(f"{layer}:{','.join(f'{n}-{n + 128}' for n in range(100))}" for layer in range(60))
    short = recorded(f"dp=8 ep=8 experts={place} speeds=1:2")

    assert len(place) > 40_000 and re.fullmatch(r"dp=8 ep=8 experts=12000-moved-[0-9a-f]{8} speeds=1:2", short)
    assert recorded(short) == short and recorded("dp=8 ep=8 speeds=1:2") == "dp=8 ep=8 speeds=1:2"
    one, other = (recorded(f"ep=2 experts=0:1-{n},2-7+3:0-4") for n in (5, 6))
    assert one != other and one.startswith("ep=2 experts=6-moved-") and brief(one) == brief(other) == "ep=2 experts=…"


def test_unreadable_lines_and_new_fields_are_ignored() -> None:
    assert records.from_line('{"kind":"step","st') is None
    assert records.from_line('{"kind":"hologram"}') is None
    assert records.from_line("[]") is None
    assert records.from_line("[" * 100_000) is None
    assert records.from_line('{"kind":"memory","step":1,"colour":2}') == records.MemoryRecord(1)


def test_a_run_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine" / "telemetry" / "rank0.jsonl"
    RecordFile(path, head).close()
    record_file.check_format(tmp_path / "mine")
    path.write_text(path.read_text().replace('"format":1', '"format":2'))

    with pytest.raises(UsageError, match=r"'mine'(.|\n)*rank0.jsonl is of format 2; this release reads 1"):
        record_file.check_format(tmp_path / "mine")
    assert record_file.read_since(path) == ([], record_file.START)


def test_times_of_ranks_are_aligned_to_one_clock() -> None:
    header = Header(1, 2, 0, clock_ns=1_000, offset_ns=50, unix_s=100.0)

    assert header.aligned(2_000) == 2_050
    assert header.unix(2_000_001_000) == 102.0


def test_a_reader_gets_only_new_and_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    assert record_file.read_since(path) == ([], record_file.START)
    file = RecordFile(path, head)
    file.write([step(1), step(2)])

    found, cursor = record_file.read_since(path)
    assert found == [*head(0), step(1), step(2)]
    assert record_file.read_since(path, cursor) == ([], cursor)

    file.write([step(3)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert record_file.read_since(path, cursor) == ([], cursor)
    path.write_bytes(whole)
    assert numbers(record_file.read_since(path, cursor)[0]) == [3]


def test_a_cursor_follows_into_new_parts_and_each_part_is_readable_alone(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    file = RecordFile(path, head, part_bytes=4_000)
    cursor, seen = record_file.START, []
    for number in range(200):
        file.write([step(number)])
        if number % 7 == 0:
            found, cursor = record_file.read_since(path, cursor)
            seen += numbers(found)
    found, cursor = record_file.read_since(path, cursor)

    assert seen + numbers(found) == list(range(200))
    assert record_file.read_head(path)[1] == head(0)[1]
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) < 10_000
    # A reader that missed several parts gets the remaining ones, which begin with a header.
    late, _ = record_file.read_since(path, (0, 100))
    assert isinstance(late[0], Header)
    assert numbers(late) == list(range(numbers(late)[0], 200))


def test_a_process_that_takes_over_begins_a_new_part(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    RecordFile(path, head).write([step(1)])
    _, cursor = record_file.read_since(path)
    with path.open("a") as file:
        file.write('{"kind":"step","st')  # killed here
    RecordFile(path, head).write([step(2)])

    found, cursor = record_file.read_since(path, cursor)
    assert numbers(found) == [2] and isinstance(found[0], Header)
    assert cursor[0] == 1


def test_a_long_file_can_be_read_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    RecordFile(path, head).write([step(number) for number in range(2_000)])

    found, _ = record_file.read_since(path, record_file.cursor_near_end(path, num_bytes=2_000))

    assert 3 < len(found) < 20
    assert numbers(found)[-1] == 1_999


def test_the_overview_of_a_long_run_is_short_and_its_means_are_right(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    overview = Overview(path, lines=64)
    for number in range(1, 10_001):
        overview.add(step(number))

    kept = record_file.read_overview(path)

    assert 32 <= len(kept) < 64
    assert {one.span for one in kept} == {overview.span} == {256}
    assert kept[0].numbers["loss"] == pytest.approx((1 + 256) / 2)
    assert kept[0].step == 256 and kept[-1].step == 9984
    assert kept[0].traffic == (ROW,)


def test_a_mean_weights_by_steps_and_keeps_texts_and_rare_numbers() -> None:
    one = StepRecord(3, start_ns=5, seconds=1.0, parts={"data": 0.3}, numbers={"loss": 1.0, "strategy": "dp=4"}, span=3)
    other = StepRecord(4, start_ns=9, seconds=5.0, parts={"data": 0.7}, numbers={"loss": 5.0, "strategy": "zero3"})
    other.numbers["eval_loss"] = 8.0

    mean = mean_of([one, other])

    assert (mean.step, mean.start_ns, mean.span, mean.seconds) == (4, 5, 4, 2.0)
    assert mean.parts == {"data": pytest.approx(0.4)}
    assert mean.numbers == {"loss": 2.0, "strategy": "zero3", "eval_loss": 8.0, "step": 4}


def test_laps_outside_of_a_step_are_not_in_its_timeline() -> None:
    laps = (("outside", 0, 3_200), ("data", 3_200, 3_300), ("outside", 3_300, 3_350), ("forward", 3_350, 3_450))
    detail = records.Detail(350, laps)
    assert detail.inside == (("data", 0, 100), ("forward", 100, 200)) and detail.span == 200 / 1e9
