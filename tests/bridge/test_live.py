"""Test a live cell on a rank: its stop, its status beside the cell that trains, and the error if it does not run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from nbkit import Cluster
from nbkit.errors import CellError
from nbkit.notebook.cluster.cells.handle import CellHandle
from nbkit.notebook.cluster.cells.submit import request_for
from nbkit.notebook.cluster.output import display
from nbkit.wire.cells import CellRequest
from nbkit.wire.messages import GetStatus, StopCell

TRAINER = """
import asyncio, time
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): time.sleep(0.001); return torch.full((4,), float(i)), torch.zeros(1)
class Kept:
    live = []
    def write(self, event):
        if event["kind"] == "live_cell": self.live.append((event["what"], event["seconds"] > 0))
trainer = nbkit.Trainer(
    model=lambda: torch.nn.Linear(4, 1), loss=torch.nn.functional.mse_loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-6),
    data=Slow(), batch_size=8, seed=0, log_dir=None, progress=False, sinks=[Kept()])
"""
ENDLESS = "while True: time.sleep(0.01)"


@pytest.fixture
def training(two: Cluster) -> Iterator[CellHandle]:
    two.run(TRAINER)
    handle = two.run("await asyncio.sleep(0)\ntrainer.fit(100_000)", detach=True)
    yield handle
    handle.stop()


def until_it_runs(cluster: Cluster) -> dict[int, dict[str, object]]:
    """Wait until a live cell runs on all ranks. Return the status of each rank."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        states = cluster.connection.client.ask(range(2), GetStatus())
        if len(states) == 2 and all(state["live"] for state in states.values()):
            return states
        time.sleep(0.02)
    raise AssertionError("the live cell does not begin")


def test_stopping_a_live_cell_leaves_the_training_alone(two: Cluster, training: CellHandle) -> None:
    live = two.run(ENDLESS, at_step=True, detach=True)
    states = until_it_runs(two)
    assert {state["source"] for state in states.values()} == {"await asyncio.sleep(0)\ntrainer.fit(100_000)"}
    assert live.stop().status == "interrupted"
    before = two.run("len(trainer.history)", at_step=True).values[0]
    assert two.run("time.sleep(0.2)\nKept.live", at_step=True).values[0][-1] == ("len(trainer.history)", True)
    assert two.run("len(trainer.history)", at_step=True).values[0] > before
    assert training.status == "running"


@pytest.mark.long
def test_a_live_cell_may_await_while_the_training_is_awaited(two: Cluster, training: CellHandle) -> None:
    assert two.run("await asyncio.sleep(0)\nrank", at_step=True).values == {0: 0, 1: 1}


def test_a_live_cell_stopped_before_its_step_boundary_runs_on_no_rank(two: Cluster, training: CellHandle) -> None:
    two.run("begun = False", at_step=True)
    # The stop reaches one rank before the cell does. The other rank learns of it from that rank.
    first = request_for(two.connection, "begun = True", None, at_step=True)
    for future in two.connection.client.request([1], StopCell(first.id, 0, live=True)).values():
        future.result(timeout=10)
    running = two.connection.send(first, display.here(), live=True)
    running.reason = "stopped"
    assert running.done.result(timeout=20).status == "interrupted"
    assert two.run("begun", at_step=True).values == {0: False, 1: False}
    assert training.status == "running"


def test_a_live_cell_that_comes_after_the_training_is_an_error(two: Cluster) -> None:
    request = CellRequest("too-late", "1", 1, (0, 1))
    results = two.connection.send(request, display.here(), live=True).done
    with pytest.raises(CellError, match="the training ended"):
        results.result(timeout=10)
