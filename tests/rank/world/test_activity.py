"""Test that another thread sees what a rank does while its main thread waits, on gloo and on a pretended GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pretend import join
from ranks import next_generation, run_ranks

from nbkit.rank.telemetry import collectives
from nbkit.rank.telemetry.collectives import CollectiveCall, GroupInfo, Ring
from nbkit.rank.world import failure_alarm
from nbkit.rank.world.activity import activity
from nbkit.rank.world.world import World
from nbkit.wire.activity import Activity

CELLS = {__file__: 7}
MODES = ("time", "count", "off")


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(f"# {text}"))


def seen_in(wait: Callable[[], Any], rank: int) -> Activity:
    """Return what another thread sees while this one is in `wait`. Then break out of `wait`."""
    seen: list[Activity] = []

    def look() -> None:
        deadline = time.monotonic() + 20
        while (found := activity(rank, CELLS)).waits is None and time.monotonic() < deadline:
            time.sleep(0.02)
        seen.append(found)
        failure_alarm.break_out("a test")

    looking = threading.Thread(target=look)
    looking.start()
    try:
        wait()
    except Exception:
        pass
    looking.join()
    return seen[0]


def in_an_all_reduce(world: World) -> list[Activity | None]:
    """Return what another thread sees in an all-reduce, for each mode of the telemetry."""
    found: list[Activity | None] = []
    for mode in MODES:
        collectives.set_mode(mode)
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        if world.place.rank == 0:
            found.append(seen_in(lambda: dist.all_reduce(torch.ones(3, dtype=torch.float64)), 0))  # reduces
        next_generation(world)
    return found


@pytest.fixture(scope="module")
def by_mode() -> dict[str, Activity]:
    return dict(zip(MODES, run_ranks(in_an_all_reduce, 2, generations=len(MODES) + 1)[0], strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_the_operation_a_rank_waits_in_is_reported_in_every_telemetry_mode(
    by_mode: dict[str, Activity], mode: str
) -> None:
    found = by_mode[mode]

    assert found.waits is not None
    assert found.waits.name == "all_reduce #3 on world"
    assert found.waits.members == (0, 1) and 0 < found.waits.seconds < 30
    assert str(found.waits.line) == f"cell 7 line {line_of('reduces')}"
    log = found.groups["world"]
    assert (log.axis, log.issued) == ("world", 3)
    if mode != "off":  # "off" notes only the count
        told = [(each.op, each.number, each.bytes, each.dtype) for each in log.operations]
        assert told == [("all_reduce", 1, 4, "float32"), ("barrier", 2, 0, ""), ("all_reduce", 3, 24, "float64")]
        assert log.operations[-1].line == found.waits.line


def in_the_first_use_of_a_communicator(rank: int) -> Activity | None:
    join(rank, 2)
    group = dist.new_group([0, 1])
    if rank:
        time.sleep(2.0)
        return None
    return seen_in(lambda: dist.all_reduce(torch.ones(3), group=group), 0)  # meets


def test_a_rank_alone_in_the_first_use_of_a_communicator_is_seen_waiting_there() -> None:
    found = run_ranks(in_the_first_use_of_a_communicator, 2, join=False)[0]

    assert found is not None and found.waits is not None
    assert (found.waits.op, found.waits.number, found.waits.bytes) == ("all_reduce", 1, 12)
    assert str(found.waits.line) == f"cell 7 line {line_of('meets')}"


class Stream:
    """A device's stream that is blocked in a call, or is not."""

    def __init__(self, is_open: bool) -> None:
        self._open = is_open

    def is_open(self) -> bool:
        return self._open


def test_an_operation_that_stops_the_device_is_reported_after_the_host_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "ring", Ring())
    group = GroupInfo("dp 1 [0,1]", "dp", (0, 1))
    for number, is_open in ((1, False), (2, True), (3, True)):
        call = CollectiveCall("all_reduce", group, None, number, 8)
        call.on_device, call.issued = Stream(is_open), time.perf_counter_ns() - 2_000_000_000  # type: ignore[assignment]
        collectives.ring.put(call)
    before = activity(0, CELLS)
    assert before.on_device and before.waits is not None
    assert before.waits.name == "all_reduce #2 on dp"

    collectives.ring.generation = collectives.ring.end  # they belong to a world that is gone
    assert activity(0, CELLS).waits is None


def test_a_line_has_its_call_and_stacks_have_thread_names() -> None:
    ready, go_on = threading.Event(), threading.Event()
    seen: list[Activity] = []

    def look() -> None:
        ready.wait()
        time.sleep(0.1)
        seen.append(activity(0, CELLS, stacks=True))
        go_on.set()

    looking = threading.Thread(target=look)
    looking.start()
    ready.set()
    go_on.wait(30)  # waits
    looking.join()

    assert seen[0].line is not None
    assert (str(seen[0].line), seen[0].line.calls) == (f"cell 7 line {line_of('waits')}", "go_on.wait")
    assert seen[0].stacks.startswith("thread MainThread:\n") and "go_on.wait(30)" in seen[0].stacks
