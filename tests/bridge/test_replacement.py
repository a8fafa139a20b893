"""Test that a rank that dies in `fit` is replaced: a new process enters the cell, and the training is unchanged.

All cases share a cluster of four. Each kills ranks during the training, and compares with an undisturbed one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_cell import NETWORK, cluster_of, kill_at

from nbkit import Cluster
from nbkit.errors import CellError, RankDied
from nbkit.notebook.cluster.cells.results import Results

STEPS = 18
CELL = "before = 1\nhistory = trainer.fit(steps)\n[record['loss'] for record in history]"
SETUP = f"""{NETWORK}
steps = {STEPS}
slow = 0.05  # so long that the kill comes in mid-training
crash = {{}}

def mse(output, target):
    import os
    training = globals().get("trainer")
    once = int(os.environ.get(f"DIES{{rank}}", -1))  # a new process has the environment of the parent
    if training is not None and training.step in (crash.get(rank), once):
        os._exit(3)
    return F.mse_loss(output, target)

defaults = dict(loss=mse)
"""


@pytest.fixture(scope="module")
def four(nbkit_home: Path) -> Iterator[Cluster]:
    yield from cluster_of(4, "replaced", SETUP)


@pytest.fixture(scope="module")
def undisturbed(four: Cluster) -> list[float]:
    losses: list[float] = four.run(f"trainer = make()\n{CELL}").values[0]
    assert len(losses) == STEPS
    return losses


def run_killing(cluster: Cluster, ranks: list[int], cell: str = CELL) -> Results:
    killing = kill_at(cluster, ranks, 4)
    results: Results = cluster.run(cell, timeout=120)
    killing.join()
    return results


def check_whole(cluster: Cluster) -> None:
    """Check that every rank runs cells and is in the world, and that status has the ids of its processes."""
    results = cluster.run("import os\ntotal = torch.ones(1)\ndist.all_reduce(total)\n(int(total), os.getpid(), rank)")
    assert [results.values[rank][0] for rank in range(4)] == [4] * 4
    assert [results.values[rank][2] for rank in range(4)] == [0, 1, 2, 3]
    rows = cluster.status().rows
    assert [row.state for row in rows] == ["idle"] * 4
    assert [row.pid for row in rows] == [results.values[rank][1] for rank in range(4)]


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", [0, 3]),
        ("zero3", [2]),
        pytest.param("ddp", [1], marks=pytest.mark.long),
        pytest.param("dp=2 pp=2", [1], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_training_after_a_replacement_has_the_undisturbed_losses(
    four: Cluster, undisturbed: list[float], strategy: str, ranks: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    four.run(f"trainer = make(strategy={strategy!r})")
    results = run_killing(four, ranks)
    assert results.status == "ok"
    for rank in range(4):
        assert results.values[rank] == pytest.approx(undisturbed, abs=1e-10)
    lost = "0 steps" if strategy == "ddp" else r"\d steps?"  # since the last backup
    said, deadline = "", time.monotonic() + 10  # the line may come after the result
    while not (found := re.search(rf"replaced: {lost} and \d+\.\d s lost", said)) and time.monotonic() < deadline:
        time.sleep(0.05)
        said += capsys.readouterr().err
    assert found, said
    check_whole(four)
    # The new rank has the names that cells defined before and after, and the Trainer under its name.
    four.run("def later(): return trainer.step, before, int(total), len(rows()), make.__module__")
    assert four.run("later()").values == dict.fromkeys(range(4), (STEPS, 1, 4, 64, "__main__"))


def test_a_new_rank_enters_a_fit_inside_other_calls(four: Cluster, undisturbed: list[float]) -> None:
    four.run("trainer = make()")
    whole = "print(len(trainer.fit(\n    until=trainer.step + steps\n))); "
    results = run_killing(four, [3], whole + "[record['loss'] for record in trainer.history]")
    assert results.values[3] == pytest.approx(undisturbed, abs=1e-10)
    assert f"{STEPS}\n" in results.output[3]


DIES_ASKED = """
import os, threading
from nbkit.rank.train.control.step_boundary import inbox

def dies():
    while inbox.highest() == inbox.acted:
        time.sleep(0.001)
    os._exit(3)

if rank == 2: threading.Thread(target=dies, daemon=True).start()
trainer = make()
"""


def test_a_switch_is_made_although_a_rank_died_after_the_request(four: Cluster, undisturbed: list[float]) -> None:
    """Check that the new rank gets the request too. Otherwise all later requests, such as a stop, wait for it."""
    four.run(DIES_ASKED)
    before = four.entry.ranks[2]
    handle = four.run(CELL, detach=True)
    switched = four.switch("zero1")
    assert (switched.ok, switched.strategy) == (True, "dp=4 zero=1")
    assert switched.step < STEPS  # before the end of the training
    assert handle.wait(timeout=120).values[2] == pytest.approx(undisturbed, abs=1e-10)
    assert four.entry.ranks[2] != before
    check_whole(four)


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "where"), [("ddp", "callback"), ("zero3", "update")])
def test_a_death_in_the_last_step_is_replaced(
    four: Cluster, undisturbed: list[float], strategy: str, where: str
) -> None:
    """Kill a rank after the last reduction, when no rank waits for it in the step."""
    four.run(ENDING.format(strategy=strategy, where=where), timeout=60)
    results = four.run(CELL, timeout=120)
    assert results.status == "ok"
    for rank in range(4):
        assert results.values[rank] == pytest.approx(undisturbed, abs=1e-10)
    check_whole(four)


ENDING = """
import os

def ends(where, step):
    if step == steps and os.environ.get(f"ENDS{{rank}}") == where:
        os._exit(3)

class Ending(torch.optim.AdamW):
    def step(self, closure=None):
        super().step()
        ends("update", trainer.step + 1 if trainer is not None else 0)

trainer = None
trainer = make(
    strategy={strategy!r},
    recovery=nbkit.Recovery(backup_every=1),
    callbacks=[lambda trainer, record: ends("callback", record["step"])],
    optimizer=lambda model: Ending(model.parameters(), lr=1e-2),
)
if rank == 1: os.environ["ENDS1"] = {where!r}
"""
TORN = """
class Torn(torch.optim.AdamW):
    def step(self, closure=None):
        super().step()
        if trainer is not None and rank == 1 and trainer.step == 4 and not planted:
            planted.append(4)
            raise ValueError("planted")

planted, trainer = [], None
kept = nbkit.Recovery(backup_every={})
trainer = make(strategy="zero3", recovery=kept, optimizer=lambda model: Torn(model.parameters(), lr=1e-2))
"""


def test_an_update_that_an_error_interrupts_is_undone_by_the_next_fit(
    four: Cluster, undisturbed: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Use zero3, where no other rank has the half-updated part of a rank."""
    four.run(TORN.format(1))
    with pytest.raises(CellError, match="planted"):
        four.run(CELL, timeout=60)
    results = four.run("history = trainer.fit(until=steps)\n[record['loss'] for record in trainer.history]", timeout=60)
    for rank in range(4):
        assert results.values[rank] == pytest.approx(undisturbed, abs=1e-10)
    assert "all ranks continue from step" in "".join(results.output.values())


@pytest.mark.long
def test_an_interrupted_update_without_a_backup_is_refused_with_what_to_type(four: Cluster, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    four.run(TORN.format(0))
    for save, typed in (("", "build the Trainer again: nothing is saved"), (f"save({saved!r})", f"load({saved!r})")):
        if save:
            four.run(f"{TORN.format(0)}trainer.fit(1)\ntrainer.{save}", timeout=60)
        with pytest.raises(CellError, match="planted"):
            four.run(CELL, timeout=60)
        with pytest.raises(CellError) as refused:
            four.run("trainer.fit(until=steps)", timeout=60)
        assert typed in refused.value.traceback
    four.run(f"trainer.{typed}\ntrainer.fit(until=3)", timeout=60)


LEARNING = """
import os

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
unlike = nbkit.Balanced([(row, 5 * row.prod().reshape(1)) for row in x], cost="loss")
pair = [unlike, x]

class Warm(Net):
    def __init__(self):
        super().__init__()
        self.warmth = 1.0

    def forward(self, x):
        return self.warmth * super().forward(x)

def cool(trainer, record):
    if record["step"] == 5:
        trainer.model.warmth = 0.5

trainer, steps = make(model=Warm, data=unlike, callbacks=[pace, cool]), 16
"""


@pytest.mark.long
def test_an_epoch_ordered_by_learned_losses_continues_after_a_death(four: Cluster) -> None:
    """Train two epochs of eight steps. Rank 1 dies in the second, which is ordered by the losses of the first."""
    left_alone = four.run(LEARNING + CELL, timeout=60).values[0]
    four.run(LEARNING + "if rank == 1: os.environ['DIES1'] = '11'")
    results = four.run(CELL, timeout=120)
    for rank in range(4):
        assert results.values[rank] == pytest.approx(left_alone, abs=1e-10)
    # The model of the new rank also has the changed attribute, and `unlike` is the data of its training.
    assert four.run("trainer.model.warmth, unlike is trainer.loop.data, len(pair[0])").values == {
        rank: (0.5, True, 64) for rank in range(4)
    }
    # The losses that only this rank saw in the epoch are lost. All ranks use the same order in the next epoch.
    learned = four.run("trainer.fit(8)\n[record['loss'] for record in trainer.history], list(unlike.costs)").values
    for rank in range(1, 4):
        assert learned[rank][0] == pytest.approx(learned[0][0], abs=1e-10)
        assert learned[rank][1] == learned[0][1]


@pytest.mark.long
def test_deaths_in_other_trainings_do_not_count(four: Cluster) -> None:
    for _ in range(3):
        four.run("import os\ntrainer = make(log_dir=None)\nif rank == 1: os.environ['DIES1'] = '2'")
        assert four.run("len(trainer.fit(3))", timeout=60).values == dict.fromkeys(range(4), 3)
    check_whole(four)


@pytest.mark.long
def test_a_rank_that_dies_three_times_at_one_step_is_not_replaced(four: Cluster) -> None:
    """Run this test last: it ends the cluster."""
    four.run("trainer = make(); crash[1] = 2")
    with pytest.raises(RankDied, match=r"has died 3 times at step 3, so it is the program") as caught:
        four.run("trainer.fit(8)", timeout=120)
    assert caught.value.rank == 1
