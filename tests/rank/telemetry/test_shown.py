"""Test that the tab shows what real ranks measured and wrote, and TensorBoard's page gets the same."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_run import forecast_of
from ranks import run_ranks

from nbkit.notebook.run.follower import Run
from nbkit.notebook.run.step_picture import lateness, of_step, picture
from nbkit.planner import forecast
from nbkit.planner.job_facts import Facts, Weight
from nbkit.rank.telemetry import tensorboard
from nbkit.rank.telemetry.health import memory_of
from nbkit.rank.telemetry.phases import clock, phase
from nbkit.rank.telemetry.session import Session
from nbkit.rank.telemetry.sinks import Bus
from nbkit.rank.world.world import World
from nbkit.records.events import RunStarted, RunStopped, StepDone, Switched
from nbkit.schedules import Schedule, simulate
from nbkit.strategy import Strategy

STEPS, SWITCH = 12, 8
SIZE = 64
FORWARD, BACKWARD = 0.01, 0.02
PIPELINE = "pp=2 schedule=1f1b microbatches=4"


def train(world: World, folder: str) -> None:
    """Make eight steps of ddp with rank 1 late, and four of a pipeline whose stages sleep."""
    rank, run_dir = world.place.rank, Path(folder)
    model = torch.nn.Linear(SIZE, SIZE, bias=False)
    groups = {axis: dist.new_group([0, 1], group_desc=axis) for axis in ("dp", "pp")}
    if rank == 0:
        weights = [Weight("weight", (SIZE, SIZE))]
        forecast.append(run_dir, forecast_of(weights, Facts(), Strategy.parse("ddp", 2)))
    session = Session(run_dir, rank=rank, world_size=2, strategy="dp=2", detail_every=2)
    bus = Bus()
    bus.add(session)
    bus.add(tensorboard.rank_sink(run_dir, rank))
    tell = bus.emit

    tell(RunStarted(0, strategy="dp=2"))
    for number in range(1, STEPS + 1):
        if number <= SWITCH:
            strategy = "dp=2"
            with phase("forward"):
                loss = model(torch.ones(4, SIZE)).sum()
                time.sleep(0.1 * rank)
            with phase("backward"):
                loss.backward()
                dist.all_reduce(model.weight.grad, group=groups["dp"])
            if number == 2:
                session.memory(memory_of(model, step=number))
        else:
            strategy = PIPELINE
            pipe(rank, groups["pp"])
        model.zero_grad()
        clock.step(number)
        tell(StepDone(number, record={"step": number, "loss": 1.0 / number, "seconds": 0.03, "strategy": strategy}))
        if number == SWITCH:
            tell(Switched(number, old="dp=2", new=PIPELINE, pause_s=0.1))
    tell(RunStopped(STEPS))


def pipe(rank: int, group: Any) -> None:
    """Run one step of the schedule, stage by stage, with messages of one number."""
    for op in Schedule.of("1f1b", 2, 4).ops[rank]:
        if (op.kind == "F") == (rank == 1):
            dist.recv(torch.ones(1), 1 - rank, group=group)
        done = clock.on_op(op.kind, op.stage, op.micro)
        with phase("forward" if op.kind == "F" else "backward"):
            time.sleep(FORWARD if op.kind == "F" else BACKWARD)
        done()
        if (op.kind == "F") == (rank == 0):
            # Sends in one direction must not wait for receives in the other.
            waiting.append(dist.isend(torch.ones(1), 1 - rank, group=group))
    while waiting:
        waiting.pop().wait()


waiting: list[Any] = []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "lesson"
    run_ranks(train, 2, str(folder), timeout=120)
    run = Run(folder)
    run.refresh()
    return run


def test_the_run_has_every_step_and_event(run: Run) -> None:
    assert run.newest == STEPS and run.world_size == 2
    assert [point[0] for point in run.timeline.points] == list(range(1, STEPS + 1))
    assert [event["kind"] for event in run.curve.events] == ["run_started", "switch", "run_stopped"]


def test_the_picture_has_traffic_its_formula_memory_and_the_late_rank(run: Run) -> None:
    step = picture(run, SWITCH - 1)

    (row,) = step["table"]
    assert (row["op"], row["axis"], row["calls"]) == ("all_reduce", "dp", 1)
    assert row["bytes"] == row["formula_bytes"] == 2 * 4 * SIZE * SIZE
    assert step["late"]["rank"] == 1 and step["late"]["cause"] == "compute"
    assert lateness(run)["of"] == STEPS - SWITCH  # lateness before the switch is forgotten
    for memory in step["memory"]:
        assert memory["formula"][:2] == [memory["parameters"], memory["gradients"]]


def test_the_picture_has_the_measured_and_the_planned_pipeline(run: Run) -> None:
    step = picture(run, STEPS)

    assert step["strategy"] == PIPELINE
    assert {(row["op"], row["axis"]) for row in step["table"]} >= {("send", "pp"), ("recv", "pp")}
    assert [cell[:2] for cell in sorted(step["traffic"]["sent"])] == [[0, 1], [1, 0]]
    moments = step["moments"]
    assert (moments["kind"], moments["step"], moments["ranks"]) == ("pipeline", STEPS, [0, 1])
    order = [[(op.kind, op.micro) for op in ops] for ops in Schedule.of("1f1b", 2, 4).ops]
    for drawn in (moments["planned"], moments["measured"]):
        assert [[(kind, micro) for kind, _, micro, *_ in row] for row in drawn] == order
    # The record of a step does not have the places of experts. They do not change the order of operations.
    assert of_step(run, STEPS, f"{PIPELINE} experts=6-moved-1f0c2a9b") == of_step(run, STEPS, PIPELINE)
    # On a busy machine an operation takes longer than it sleeps, so the plan uses the measured seconds.
    cost = {
        kind: [fmean(stop - start for op, _, _, start, stop in row if op == kind) for row in moments["measured"]]
        for kind in "FB"
    }
    plan = simulate(Schedule.of("1f1b", 2, 4), forward=cost["F"], backward_input=cost["B"], backward_weight=0.0)
    assert moments["planned_bubble"] == pytest.approx(plan.bubble, abs=2e-3) and plan.bubble > 0
    busy = 4 * (sum(cost["F"]) + sum(cost["B"]))
    assert moments["measured_bubble"] == pytest.approx(1 - busy / 2 / moments["measured_span"], abs=2e-3)


def test_each_rank_has_its_own_scalars(run: Run) -> None:
    assert [len(list((run.folder / f"rank{rank}").glob("events.*"))) for rank in range(2)] == [1, 1]
