"""Test that a training is saved if a rank dies in a loop or a function, where a new rank cannot enter the cell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from training_cell import NETWORK, cluster_of

from nbkit import Cluster
from nbkit.errors import CellError, RankDied

SETUP = f"""{NETWORK}
import os
dies = {{}}

def mse(output, target):
    once = int(os.environ.get(f"DIES{{rank}}", -1))  # a new process has the environment of the parent
    if globals().get("trainer") is not None and trainer.step == once:
        os._exit(3)
    return F.mse_loss(output, target)

defaults = dict(loss=mse, recovery=nbkit.Recovery(backup_every=1))

def inside(trainer):
    trainer.fit(5)
    return trainer.fit(5)
"""
LOOP = "for epoch in range(2):\n    trainer.fit(5)"
CURVE = "[record['loss'] for record in trainer.history]"


@pytest.fixture(scope="module")
def two(nbkit_home: Path) -> Iterator[Cluster]:
    yield from cluster_of(2, "elsewhere", SETUP)


@pytest.fixture(scope="module")
def undisturbed(two: Cluster) -> list[float]:
    losses: list[float] = two.run(f"trainer = make()\ntrainer.fit(10)\n{CURVE}", timeout=60).values[0]
    return losses


@pytest.mark.long
@pytest.mark.parametrize(
    ("cell", "strategy"), [(LOOP, "zero3"), pytest.param("inside(trainer)", "ddp", marks=pytest.mark.long)]
)
def test_a_training_in_a_loop_is_saved_and_the_error_says_how_to_continue(
    two: Cluster, undisturbed: list[float], tmp_path: Path, cell: str, strategy: str
) -> None:
    saved = str(tmp_path / "saved")
    saves = f"checkpoints=nbkit.Checkpoints(path={saved!r})"
    two.run(f"trainer = make(strategy={strategy!r}, {saves})\nif rank == 1: os.environ['DIES1'] = '8'")
    with pytest.raises(CellError, match="A rank died in fit, and a new rank cannot continue this cell") as caught:
        two.run(cell, timeout=120)
    said = caught.value.traceback
    assert "rank 1 died (it exited with code 3)" in said and f"saved to {saved}" in said
    assert "trainer.fit(until=10)   as a statement of its own" in said
    # All ranks have the Trainer, so the command of the hint works unchanged.
    again = two.run(f"trainer.fit(until=10)\n{CURVE}", timeout=60)
    for rank in range(2):
        assert again.values[rank] == pytest.approx(undisturbed, abs=1e-10)
    # The training also continues from the checkpoint alone.
    loaded = f"trainer = make()\ntrainer.load({saved!r})\ntrainer.fit(until=10)\n{CURVE}"
    assert two.run(loaded, timeout=60).values[1] == pytest.approx(undisturbed, abs=1e-10)


def test_a_death_that_is_not_replaced_names_the_newest_checkpoint(two: Cluster, tmp_path: Path) -> None:
    """Run this test last: it ends the cluster."""
    saved = str(tmp_path / "saved")
    stop = "recovery=nbkit.Recovery(on_failure='stop')"
    stop += f", checkpoints=nbkit.Checkpoints(path={saved!r}, every=5)"
    two.run(f"trainer = make({stop})\nif rank == 1: os.environ['DIES1'] = '8'")
    with pytest.raises(RankDied, match="Rank 1 died") as caught:
        two.run(LOOP, timeout=120)
    assert f"trainer.load({saved!r})   of step 5" in caught.value.hint
