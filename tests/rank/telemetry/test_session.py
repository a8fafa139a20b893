"""Test that planted delays are found from the files alone, in the right part of the step and on the right rank."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from nbkit.rank.telemetry import collectives
from nbkit.rank.telemetry.health import memory_of
from nbkit.rank.telemetry.phases import clock, phase
from nbkit.rank.telemetry.session import Session, record_path, traffic_of
from nbkit.rank.world.world import World
from nbkit.records import readings, record_file, records
from nbkit.records.events import Checkpointed, RunStarted, RunStopped, StepDone
from nbkit.records.readings import late_rank
from nbkit.records.run_advice import reading

N = 3
DELAY = 0.1
EACH = 6
PLAIN, LOADER, LATE_COMPUTE, LATE_LOADER, PIPELINE = range(5)
TRACED = 17


def train(world: World, folder: str) -> None:
    rank, model = world.place.rank, nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    dp = dist.new_group([0, 1, 2], group_desc="dp")
    pp = dist.new_group([0, 1], group_desc="pp")
    session = Session(Path(folder), rank=rank, world_size=N, strategy="dp=3")
    session.write(RunStarted(0, strategy="dp=3").as_dict())
    for number in range(1, 5 * EACH + 1):
        kind = (number - 1) // EACH
        if number == TRACED:
            session.detail(1)
        with phase("data"):
            if kind == LOADER or (kind == LATE_LOADER and rank == 2):
                time.sleep(DELAY)
        with phase("forward"):
            loss = model(torch.ones(8, 64)).sum()
            if kind == LATE_COMPUTE and rank == 1:
                time.sleep(DELAY)
        if kind == PIPELINE and rank == 0:
            done = clock.on_op("F", 0, 0)
            with phase("forward"):
                time.sleep(DELAY)
            done()
            dist.send(torch.ones(5), 1, group=pp)
        if kind == PIPELINE and rank == 1:
            dist.recv(torch.ones(5), 0, group=pp)
        with phase("backward"):
            loss.backward()
            work = dist.all_reduce(model.weight.grad, group=dp, async_op=True)
            assert work is not None
            work.wait()
        if number == 2:
            session.memory(memory_of(model, optimizer, step=number))
        with phase("optimizer"):
            optimizer.step()
        clock.step(number)
        if number > 1:
            session.write(StepDone(number - 1, record={"step": number - 1, "loss": 1.0 / number, "lr": 1e-5}).as_dict())
    session.write(Checkpointed(number, path="model.pt").as_dict())
    session.write(RunStopped(number).as_dict())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[records.Record]]:
    folder = tmp_path_factory.mktemp("run")
    run_ranks(train, N, str(folder), timeout=120)
    return {rank: record_file.read_since(record_path(folder, rank))[0] for rank in range(N)}


def steps_of(written: dict[int, list[records.Record]], kind: int) -> list[dict[int, records.StepRecord]]:
    """Return by rank the steps with one kind of delay, except the first, which the previous delay still affects."""
    wanted = range(kind * EACH + 2, (kind + 1) * EACH + 1)
    found: list[dict[int, records.StepRecord]] = [{} for _ in wanted]
    for rank, those in written.items():
        for one in those:
            if isinstance(one, records.StepRecord) and one.step in wanted:
                found[one.step - wanted[0]][rank] = one
    return found


def members(written: dict[int, list[records.Record]]) -> dict[str, tuple[int, ...]]:
    every = [one for those in written.values() for one in those if isinstance(one, records.Group)]
    return readings.members_of(every)


def bars_of(written: dict[int, list[records.Record]], kind: int) -> list[readings.Bar]:
    return readings.usual_bars(steps_of(written, kind), members(written))


def near(seconds: float) -> Any:
    # A sleep is never shorter than requested; on a busy machine it is longer.
    return pytest.approx(1.5 * seconds, rel=0.45)


def test_the_parts_of_a_step_add_up_to_its_seconds(written: dict[int, list[records.Record]]) -> None:
    for kind in range(5):
        for bar in (bar for step in steps_of(written, kind) for bar in readings.bars(step, members(written))):
            parts = (bar.compute, bar.exposed, bar.waiting, bar.bubble, bar.data, bar.optimizer, bar.other)
            assert sum(parts) == pytest.approx(bar.seconds, rel=1e-3)


def test_a_slow_loader_on_every_rank_counts_as_data(written: dict[int, list[records.Record]]) -> None:
    found = bars_of(written, LOADER)

    assert [bar.data for bar in found] == [near(DELAY)] * N
    assert late_rank(found, at_least=0.3) is None
    assert "of the step is waiting for data: try more loader workers" in reading(found)


def test_a_slow_rank_is_named_with_its_cause_and_the_others_wait(written: dict[int, list[records.Record]]) -> None:
    for kind, rank, cause in ((LATE_COMPUTE, 1, "compute"), (LATE_LOADER, 2, "data")):
        found = bars_of(written, kind)
        late = late_rank(found)

        assert late is not None and (late.rank, late.cause) == (rank, cause)
        assert late.seconds == near(DELAY)
        assert getattr(found[rank], cause) - min(getattr(bar, cause) for bar in found) == near(DELAY)
        assert [bar.waiting for bar in found if bar.rank != rank] == [near(DELAY)] * (N - 1)
        assert found[rank].waiting < 0.4 * DELAY
        assert f"for rank {rank}" in reading(found)
        # Three steps are enough to name it.
        first = late_rank(readings.usual_bars(steps_of(written, kind)[:3], members(written)))
        assert first is not None and first.rank == rank


def test_waiting_in_the_pipeline_counts_as_bubble(written: dict[int, list[records.Record]]) -> None:
    found = bars_of(written, PIPELINE)

    assert found[1].bubble == near(DELAY)
    assert found[0].bubble < 0.4 * DELAY and found[2].bubble == 0
    matrix = readings.traffic_matrix(steps_of(written, PIPELINE)[0], members(written), N)
    assert matrix.sent == ((0, 20, 0), (0, 0, 0), (0, 0, 0))
    ring = 2 * 2 / 3 * 64 * 64 * 4
    assert [[round(cell) for cell in row] for row in matrix.modelled] == [
        [0, round(ring), 0], [0, 0, round(ring)], [round(ring), 0, 0]
    ]  # fmt: skip


def test_an_asynchronous_collective_has_a_wait_in_all_steps_an_end_in_some(
    written: dict[int, list[records.Record]],
) -> None:
    for those in written.values():
        steps = [one for one in those if isinstance(one, records.StepRecord)]
        rows = {one.step: next(row for row in one.traffic if row.op == "all_reduce") for one in steps}
        # The first three steps and the requested one have the times of each call. Most other steps have only the time
        # in wait().
        timed = sorted({1, 2, 3, TRACED, *range(records.LISTEN_EVERY, 5 * EACH + 1, records.LISTEN_EVERY)})
        assert [step for step, row in rows.items() if row.timed] == timed
        assert all((row.seconds > 0) == (row.timed == 1) and row.blocked > 0 for row in rows.values())
        details = [one for one in those if isinstance(one, records.Detail)]
        assert [one.step for one in details] == [1, 2, 3, TRACED]
        assert all(call.done is not None for one in details for call in one.calls)


def test_an_operation_with_an_untimed_call_has_no_seconds() -> None:
    group = collectives.GroupInfo("dp 1 [0,1]", "dp", (0, 1))
    calls = [
        collectives.CollectiveCall(op, group, None, i, 8)
        for i, op in enumerate(("all_reduce", "all_reduce", "all_gather"))
    ]
    for call in calls:
        call.done, call.blocked = call.issued + 1_000_000_000, 500_000_000
    calls[0].done, calls[0].heard = None, False

    reduced, gathered = traffic_of(calls)

    assert (reduced.calls, reduced.timed, reduced.seconds, reduced.blocked) == (2, 0, 0, 1.0)
    assert (gathered.calls, gathered.timed, gathered.seconds) == (1, 1, 1.0)


def test_the_files_have_numbers_memory_events_and_traffic(written: dict[int, list[records.Record]]) -> None:
    for rank, those in written.items():
        steps = [one for one in those if isinstance(one, records.StepRecord)]
        assert [one.step for one in steps] == list(range(1, 5 * EACH + 1))
        assert all(one.numbers["loss"] == pytest.approx(1 / (one.step + 1), rel=1e-5) for one in steps[:-1])
        assert steps[3].numbers["lr"] == 1e-5
        memory = next(one for one in those if isinstance(one, records.MemoryRecord))
        size = 4 * (64 * 64 + 64)
        assert (memory.step, memory.parameters, memory.gradients) == (2, size, size)
        assert memory.optimizer == 2 * size  # two moments, without the step counters
        assert memory.at_rest == 4 * size < memory.now and memory.activations is None
        events = [one.event["kind"] for one in those if isinstance(one, records.EventRecord)]
        assert events == ["run_started", "checkpoint", "run_stopped"]
        rows = readings.table({rank: steps[0]}, members(written))
        assert [(row.op, row.axis, row.calls, row.bytes) for row in rows] == [("all_reduce", "dp", 1, 64 * 64 * 4)]
    first = next(one for one in written[0] if isinstance(one, records.Detail))
    assert first.step == 1


def test_ending_a_closed_session_does_not_wait_for_ever(tmp_path: Path) -> None:
    session = Session(tmp_path, rank=0, world_size=1)
    session.close()
    waiting = threading.Thread(target=session.end, daemon=True)
    waiting.start()
    waiting.join(20)

    assert not waiting.is_alive()


def test_an_unreferenced_session_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    session = Session(tmp_path, rank=0, world_size=1)
    own = set(threading.enumerate()) - before
    assert len(own) == 2
    del session
    gc.collect()
    for thread in own:
        thread.join(10)
        assert not thread.is_alive(), thread.name
