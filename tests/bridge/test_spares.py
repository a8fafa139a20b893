"""Test `--spares`: a rank whose device seems bad moves to a spare one, and the curve is that of a run without deaths.

Two ranks are on one core, and the other core is the spare. Each training is compared with an undisturbed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from training_cell import NETWORK

from nbkit import Cluster
from nbkit.errors import CellError
from nbkit.notebook.cluster.registry import running

STEPS = 12
SETUP = f"""{NETWORK}
import os, signal
slow = 0.005
plan = {{}}  # step -> what happens to rank 1 in it, once

def mse(output, target):
    training = globals().get("trainer")
    how = plan.get(training.step) if training is not None and rank == 1 else None
    if how and not os.path.exists(f"{{folder}}/{{training.step}}"):
        open(f"{{folder}}/{{training.step}}", "x").close()
        if how == "device":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\\nCUDA kernel errors might be")
        os.kill(os.getpid(), signal.SIGKILL)
    return F.mse_loss(output, target)

defaults = dict(loss=mse, strategy="zero3", recovery=nbkit.Recovery(backup_every=1))

def prepared():
    optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)
    example = torch.utils.data.default_collate(rows()[:2])
    hints, recovery = nbkit.ModelHints(example=example), nbkit.Recovery(backup_every=1)
    return nbkit.prepare(Net, optimizer, loss=mse, strategy="zero3", hints=hints, log_dir=None, recovery=recovery)
"""
LOOP = """
for batch in trainer.batches(torch.utils.data.DataLoader(rows(), batch_size=8, shuffle=True)):
    trainer.backward(batch)
    trainer.optimizer.step(); trainer.optimizer.zero_grad()
[record["loss"] for record in trainer.history]
"""
CELL = f"history = trainer.fit({STEPS})\n[record['loss'] for record in history], sorted(os.sched_getaffinity(0))"


@pytest.fixture
def two(nbkit_home: Path, tmp_path: Path) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # ipykernel does not watch stdout if it sees this
        cluster = Cluster.start(2, cpu=True, spares=1, name="spared", ttl=600)
    cluster.run(f"folder = {str(tmp_path)!r}\n{SETUP}")
    yield cluster
    cluster.stop()


def check_curve(cluster: Cluster, plan: dict[int, str]) -> dict[int, list[int]]:
    """Train undisturbed, then with `plan`, and compare. Return the cores of each rank at the end."""
    alone = cluster.run(f"plan = {{}}\ntrainer = make()\n{CELL}", timeout=60).values[0][0]
    results = cluster.run(f"plan = {plan}\ntrainer = make()", timeout=60)
    results = cluster.run(CELL, timeout=120)
    assert len(alone) == STEPS
    for rank in range(2):
        assert results.values[rank][0] == pytest.approx(alone, abs=1e-10)
    return {rank: cores for rank, (_, cores) in results.values.items()}


@pytest.mark.long
def test_a_rank_that_dies_twice_on_its_device_moves_to_the_spare(
    two: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"spares: {two.entry.spares[0]}" in repr(two.status())
    old, new = two.entry.labels[1], two.entry.spares[0]
    reserve = {int(new.removeprefix("core "))}
    assert {*two.run("sorted(os.sched_getaffinity(0))").values[1]}.isdisjoint(reserve)

    cores = check_curve(two, {2: "kill", 4: "kill", 6: "kill", 8: "kill"})

    assert {*cores[1]} == reserve and reserve.isdisjoint(cores[0])
    said = [line for line in capsys.readouterr().err.splitlines() if "was replaced" in line]
    assert len(said) == 4
    assert "spare" not in said[0]
    assert f"Rank 1 is on the spare {new} now, since it died twice on {old}; no spare is left." in said[1]
    assert "spare" not in said[2]
    assert f"Rank 1 stays on {new}, though it died twice on {new}: no spare is left." in said[3]
    status = repr(two.status())
    assert "spares: none is left of 1" in status
    assert [row.device for row in two.status().rows] == [old, new]
    assert f"for it died twice on {old}" in two.status().rows[1].why
    assert running("spared").labels == (old, new)
    assert f"rank 1 is on the spare {new} now" in (two.entry.folder / "logs" / "parent.log").read_text()
    # A restart does not move it back, and its old device does not become a spare.
    two.restart()
    assert {*two.run("import os\nsorted(os.sched_getaffinity(0))").values[1]} == reserve
    assert running("spared").spares == ()


@pytest.mark.long
def test_a_rank_whose_device_fails_moves_to_the_spare_at_once(two: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = two.entry.labels[1], two.entry.spares[0]
    two.resize(3)
    assert two.entry.labels == (old,) * 3 and two.entry.spares == (new,)
    two.resize(2)

    cores = check_curve(two, {4: "device"})

    assert cores[1] == [int(new.removeprefix("core "))]
    said = capsys.readouterr().err
    assert "Rank 1 died (its device failed: CUDA error: uncorrectable ECC error encountered)" in said
    assert f"Rank 1 is on the spare {new} now, since {old} failed; no spare is left." in said

    two.run("trainer = None\ntrainer = prepared()\nplan = {3: 'device'}")
    with pytest.raises(CellError, match="A rank died in a loop of your own"):
        two.run(LOOP, timeout=120)
    assert f"Rank 1 stays on {new}, though {new} failed: no spare is left." in capsys.readouterr().err
