"""Test live cells, which run on all ranks at a step boundary while the training continues."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbkit import Cluster
from nbkit.errors import CellError, RankDied, UsageError
from nbkit.notebook.cluster.cells.handle import CellHandle
from nbkit.notebook.widgets.panel.panel import controller_of

TRAINER = """
import time
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): time.sleep(0.002); return torch.full((4,), float(i)), torch.zeros(1)
torch.manual_seed(0)
trainer = nbkit.Trainer(
    model=lambda: torch.nn.Linear(4, 1), loss=torch.nn.functional.mse_loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-6),
    data=Slow(), batch_size=8, seed=0, log_dir=None, progress=False)
"""


@pytest.fixture
def training(two: Cluster) -> Iterator[CellHandle]:
    two.run(TRAINER)
    handle = two.run("trainer.fit(100_000)", detach=True)
    yield handle
    handle.stop()


def test_a_live_cell_runs_on_all_ranks_at_the_same_step(two: Cluster, training: CellHandle) -> None:
    steps = two.run("len(trainer.history)", at_step=True).values
    assert steps[0] == steps[1]
    assert training.status == "running"


def test_a_live_cell_may_use_collectives_and_change_the_training(two: Cluster, training: CellHandle) -> None:
    two.run("seen = torch.ones(1) * rank; dist.all_reduce(seen)\ntrainer.lr = 5e-7", at_step=True)
    assert two.run("seen.item(), trainer.lr", at_step=True).values == {0: (1.0, 5e-7), 1: (1.0, 5e-7)}
    time.sleep(0.2)
    training.stop()
    assert two.run("trainer.history[-1]['lr']").values == {0: 5e-7, 1: 5e-7}


def test_an_error_in_a_live_cell_is_shown_and_the_training_continues(
    two: Cluster, training: CellHandle, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CellError, match="Ranks 0-1 failed: ZeroDivisionError"):
        two.run("1 / 0", at_step=True)
    before = two.run("len(trainer.history)", at_step=True).values[0]
    assert two.run("len(trainer.history)", at_step=True).values[0] > before
    assert training.status == "running"


def test_output_of_a_live_cell_is_separate_from_the_training(
    two: Cluster, training: CellHandle, capsys: pytest.CaptureFixture[str]
) -> None:
    results = two.run("print('from the live cell', rank)", at_step=True)
    assert results.output == {0: "from the live cell 0\n", 1: "from the live cell 1\n"}
    assert "from the live cell" not in training.output[0]


def test_stop_ends_a_training_at_a_step_boundary_and_keeps_its_world(two: Cluster, training: CellHandle) -> None:
    before = two.connection.generation.number
    two.run("1", at_step=True)
    assert training.stop().status == "interrupted"
    lengths = two.run("len(trainer.history), trainer.history[-1]['step']").values
    assert lengths[0] == lengths[1]
    assert lengths[0][0] == lengths[0][1]
    assert two.connection.generation.number == before
    assert two.run("len(trainer.fit(3))").values == {0: 3, 1: 3}


def test_stop_ends_a_live_cell_that_holds_its_interpreter_but_not_the_training(
    two: Cluster, training: CellHandle
) -> None:
    # `re` blocks all other Python code, so the rank's threads cannot interrupt it.
    source = "if rank == 1:\n    import re; re.match(r'(a+)+$', 'a' * 40 + 'b')"
    live = two.run(source, at_step=True, detach=True)
    deadline = time.monotonic() + 60
    while 0 not in live._execution.records and time.monotonic() < deadline:
        time.sleep(0.02)  # rank 0 has finished it, so rank 1 has begun it too
    time.sleep(0.3)
    live.stop()
    assert live._execution.records[1].failure.ename == "KeyboardInterrupt"
    assert training.status == "running"
    before = two.run("len(trainer.history)", at_step=True).values[0]
    assert two.run("len(trainer.history)", at_step=True).values[0] > before


@pytest.mark.parametrize("rest", ["", "dist.all_reduce(torch.ones(1))"])
def test_a_rank_that_dies_in_a_live_cell_ends_it_but_not_the_training(
    two: Cluster, training: CellHandle, rest: str
) -> None:
    kill = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    with pytest.raises(RankDied, match="Rank 1"):
        two.run(kill + rest, at_step=True, timeout=60)
    before = two.run("len(trainer.history)", at_step=True).values
    assert before[0] == before[1]
    assert two.run("len(trainer.history)", at_step=True).values[0] > before[0]
    assert training.status == "running"


def test_a_live_cell_waits_for_a_training_that_is_about_to_begin(two: Cluster) -> None:
    two.run(TRAINER)
    handle = two.run("time.sleep(1); trainer.fit(100_000)", detach=True)
    assert two.run("len(trainer.history) >= 0", at_step=True).values == {0: True, 1: True}
    handle.stop()


def test_a_live_cell_without_a_training_is_refused(two: Cluster) -> None:
    with pytest.raises(UsageError, match="No training is running"):
        two.run("1", at_step=True)


def test_a_live_cell_that_comes_too_late_is_refused(two: Cluster) -> None:
    two.run(TRAINER + "\nimport time")
    handle = two.run("trainer.fit(3)\ntime.sleep(1.0)", detach=True)
    time.sleep(0.6)
    with pytest.raises((CellError, UsageError), match=r"training ended|No training"):
        two.run("1", at_step=True)
    handle.wait()
    assert len(two.run("trainer.fit(2)").values) == 2


def test_a_switch_during_the_last_step_acts_after_the_training(two: Cluster) -> None:
    """Ask for the switch during the last step, which no boundary follows."""
    two.run(f"{TRAINER}\ndef dawdle(trainer, record): time.sleep(2.5)\ntrainer._callbacks = (dawdle,)")
    handle = two.run("trainer.fit(1)", detach=True)
    while not two.training.look().get("training"):
        time.sleep(0.02)
    time.sleep(1.0)
    switched = two.training.switch("zero2")

    assert switched.ok and switched.step == 1 and switched.strategy == "dp=2 zero=2"
    handle.wait()
    assert two.run("len(trainer.fit(2)), str(trainer.strategy)").values[0] == (2, "dp=2 zero=2")


def test_a_switch_waits_for_a_cell_whose_training_has_just_ended(two: Cluster, tmp_path: Path) -> None:
    over = tmp_path / "over"
    two.run(TRAINER + "\nimport pathlib")
    handle = two.run(f"trainer.fit(1)\npathlib.Path({str(over)!r}).touch()\ntime.sleep(2.5)", detach=True)
    while not over.exists():
        time.sleep(0.02)

    assert two.training.switch("zero2").strategy == "dp=2 zero=2"
    assert handle.status == "ok"


def test_every_switch_has_its_prediction(two: Cluster, training: CellHandle) -> None:
    """Compare with the prediction of the ranks, which needs no table: no panel was shown."""
    panels = controller_of(two)
    for strategy in ("zero3", "ddp"):
        switched = two.training.switch(strategy)
        assert panels.look().results[0] == switched  # although no panel requested it
        assert switched.predicted["moved_bytes"] == switched.result["moved_bytes"], strategy
    assert switched.result["moved_bytes"] > 0  # to ddp; a switch of plain SGD to zero3 moves nothing
    undone = two.training.undo()
    assert undone.predicted["moved_bytes"] == undone.result["moved_bytes"]
    assert undone.predicted["switch_s"] > 0  # it is based on two switches


@pytest.mark.long
def test_a_switch_between_two_fits_has_its_prediction(two: Cluster) -> None:
    two.run(f"{TRAINER}\ntrainer.fit(2)")
    two.training.switch("zero3")
    switched = two.training.switch("ddp")
    assert switched.predicted["moved_bytes"] == switched.result["moved_bytes"] > 0
