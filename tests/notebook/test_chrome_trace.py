"""Test a trace: aligned clocks, lines without overlaps, linked messages, and no invented durations."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from nbkit.notebook.tracing import chrome_trace, compressed
from nbkit.records.records import Detail, Group, Header, PipelineOp, StepRecord, TimedCall, Traffic

MS = 1_000_000
DP, PP = Group("dp 1 [0,1]", "dp", (0, 1)), Group("pp 2 [0,1]", "pp", (0, 1))
HEADERS = {0: Header(0, 2, 0, host="a"), 1: Header(1, 2, 0, host="b", offset_ns=-5 * MS)}


def call(op: str, group: Group, issued: int, done: int | None, peer: int | None = None, place: int = 1) -> TimedCall:
    return TimedCall(op, group.label, peer, place, 64, issued * MS, None, None if done is None else done * MS, 7000)


def traced(own: list[TimedCall], theirs: list[TimedCall], **more: Any) -> list[dict[str, Any]]:
    """Return the events of a step that lasts from 100 to 110 ms on both ranks' clocks. Rank 1's clock is 5 ms ahead."""
    details = {
        0: [Detail(4, (("forward", 100 * MS, 104 * MS), ("wait dp", 104 * MS, 110 * MS)), tuple(own))],
        1: [Detail(4, (("forward", 105 * MS, 115 * MS),), tuple(theirs), (PipelineOp("I", 1, 3, 106 * MS, 107 * MS),))],
    }
    made = chrome_trace(details, HEADERS, [DP, PP], **more)
    events: list[dict[str, Any]] = made["traceEvents"]
    return events


def spans(events: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [one for one in events if one["ph"] == "X" and all(one[key] == value for key, value in wanted.items())]


def test_all_ranks_use_the_clock_of_rank_0_from_the_first_event() -> None:
    events = traced([], [])
    assert [(one["pid"], one["ts"], one["dur"]) for one in spans(events, cat="steps")] == [
        (0, 0.0, 10_000.0), (1, 0.0, 10_000.0)
    ]  # fmt: skip
    (op,) = spans(events, cat="pipeline")
    assert (op["name"], op["ts"], op["args"]) == ("backward input 3", 1000.0, {"stage": 1, "micro-batch": 3})
    assert [one["args"]["name"] for one in events if one["name"] == "process_name"] == ["rank 0 on a", "rank 1 on b"]


def test_overlapping_calls_are_on_separate_lines_and_each_axis_has_its_lines() -> None:
    own = [call("all_reduce", DP, 100, 104, place=1), call("all_reduce", DP, 102, 105, place=2)]
    own += [call("all_reduce", DP, 104, 106, place=3), call("broadcast", PP, 103, 104)]
    found = spans(traced(own, []), pid=0)
    lines = {one["args"]["number"]: one["tid"] for one in found if one["name"] == "all reduce"}
    assert lines[1] == lines[3] != lines[2]
    assert {one["cat"] for one in found if "bytes" in one["args"]} == {
        "dp communication", "dp communication (2)", "pp communication"
    }  # fmt: skip


def test_a_late_rank_is_visible_in_the_delay_of_its_calls() -> None:
    found = spans(traced([call("all_reduce", DP, 101, 109)], [call("all_reduce", DP, 112, 114)]), name="all reduce")
    assert [one["args"]["issued after the first rank, us"] for one in found] == [0.0, 6000.0]
    assert found[0]["args"]["stood still, us"] == 7.0 and found[0]["args"]["ranks"] == [0, 1]


def test_a_send_is_linked_only_to_its_receive() -> None:
    own = [call("send", PP, 101, 102, peer=1, place=1), call("send", PP, 103, 104, peer=1, place=2)]
    theirs = [call("recv", PP, 106, 109, peer=0, place=2), call("recv", PP, 105, 107, peer=-1, place=1)]
    events = traced(own, theirs)
    (start,) = [one for one in events if one["ph"] == "s"]
    (end,) = [one for one in events if one["ph"] == "f"]
    assert (start["pid"], start["ts"], end["pid"], end["bp"]) == (0, 3000.0, 1, "e")
    assert 1000.0 <= end["ts"] < 4000.0
    assert [one["name"] for one in spans(events, pid=1) if "peer" in one["args"]] == ["recv", "recv from 0"]


def test_a_call_that_was_not_timed_has_no_length_and_an_unknown_duration() -> None:
    (found,) = spans(traced([call("send", PP, 101, None, peer=1)], []), name="send to 1")
    assert found["dur"] == 0 and found["args"]["duration"] == "not known"


def test_a_trace_begins_with_the_host_if_it_runs_ahead_of_the_device() -> None:
    events = traced([call("all_reduce", DP, 97, 98)], [])
    assert min(one["ts"] for one in spans(events)) == 0.0
    assert spans(events, cat="steps", pid=0)[0]["ts"] == 3000.0


def test_calls_that_were_left_out_are_counted() -> None:
    row = Traffic("all_reduce", "dp", DP.label, None, 9, 64, 9, 0.1, 0.1)
    record = StepRecord(4, numbers={"loss": 2.5, "strategy": "dp=2"}, traffic=(row,))
    step, other = spans(traced([call("all_reduce", DP, 101, 102)], [], steps=[(0, record)]), cat="steps")
    assert step["args"] == {"loss": 2.5, "strategy": "dp=2", "calls that are not shown": 8} and other["args"] == {}


def test_the_file_is_the_same_each_time_it_is_written(tmp_path: Path) -> None:
    made = chrome_trace({}, {})
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(compressed(made))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert json.loads(gzip.decompress((tmp_path / "one").read_bytes()))["traceEvents"] == []
