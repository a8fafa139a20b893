"""Test the death of a rank in a loop over `job.batches`: the job is saved, and the error says how to load it.

All cases share a cluster of four.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_cell import NETWORK, cluster_of

import nbkit
from nbkit import Cluster
from nbkit.errors import CellError, RankDied

STEPS = 12
SETUP = f"""{NETWORK}
import os
from torch.utils.data import DataLoader

job = None

def dies(where):
    once = int(os.environ.get(f"DIES{{rank}}", -1))  # a new process has the environment of the parent
    if job is not None and job.step == once and os.environ.get("WHERE") == where:
        os._exit(3)

def mse(output, target):
    dies("forward")
    return F.mse_loss(output, target)

def again(strategy, log_dir=None, **options):
    global job, loader
    job, example = None, torch.utils.data.default_collate(rows()[:2])
    optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)
    hints = nbkit.ModelHints(example=example)
    job = nbkit.prepare(Net, optimizer, loss=mse, strategy=strategy, hints=hints, log_dir=log_dir, **options)
    loader = DataLoader(rows() + rows()[:32], batch_size=8, shuffle=True)
"""
STEP = "job.backward(batch); job.optimizer.step(); job.optimizer.zero_grad()"
LOOP = f"for batch in job.batches(loader):\n    {STEP}\n    dies('behind')"
OWN = """for batch in job.batches(loader):
    x, y = job.rows(batch)
    job.backward(mse(job.model(x), y)); job.optimizer.step(); job.optimizer.zero_grad()
    dies('behind')"""
EPOCHS = f"for epoch in range(1):\n    for batch in job.batches(loader):\n        {STEP}"


@pytest.fixture(scope="module")
def four(nbkit_home: Path) -> Iterator[Cluster]:
    yield from cluster_of(4, "loops", SETUP)


@pytest.fixture(scope="module")
def undisturbed(four: Cluster) -> list[float]:
    """Return the losses of an undisturbed loop."""
    losses: list[float] = four.run(f"again('ddp')\n{LOOP}\n[record['loss'] for record in job.history]").values[0]
    assert len(losses) == STEPS
    return losses


def kill_in(cluster: Cluster, strategy: str, where: str, rank: int, step: int = 5, **options: object) -> None:
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    cluster.run(f"again({strategy!r}{given})")
    cluster.run(f"os.environ['WHERE'] = {where!r}\nif rank == {rank}: os.environ['DIES{rank}'] = '{step}'")


@pytest.mark.long
@pytest.mark.parametrize(
    ("cell", "strategy", "rank", "where", "step"),
    [
        (LOOP, "zero3", 1, "forward", 5),
        (OWN, "zero3", 2, "forward", 5),  # after the forward pass, so the others wait in job.backward
        (LOOP, "ddp", 2, "behind", STEPS),  # in the last step, after everything that a rank waits for
        pytest.param(EPOCHS, "ddp", 0, "forward", 5, marks=pytest.mark.long),
        pytest.param(OWN, "ddp", 1, "behind", 5, marks=pytest.mark.long),
        pytest.param(OWN, "dp=2 tp=2", 0, "forward", 5, marks=pytest.mark.long),
        pytest.param(LOOP, "dp=2 pp=2", 3, "behind", 5, marks=pytest.mark.long),
    ],
)
def test_the_job_is_saved_and_continues_from_its_checkpoint(
    four: Cluster,
    undisturbed: list[float],
    tmp_path: Path,
    cell: str,
    strategy: str,
    rank: int,
    where: str,
    step: int,
) -> None:
    kill_in(four, strategy, where, rank, step, log_dir=str(tmp_path), recovery=nbkit.Recovery(backup_every=1))
    with pytest.raises(CellError, match=r"A rank died in a loop of your own over job\.batches") as caught:
        four.run(cell, timeout=120)
    said = caught.value.traceback
    assert f"rank {rank} died (it exited with code 3)" in said
    found = re.search(r"ended after step (\d+), saved to", said)
    load = re.search(r"(job\.load\(job\.opened\('.*'\)\))", said)
    assert found is not None and load is not None
    assert int(found[1]) in (step - 1, step)
    # Run what the error says. The loader is shuffled under the seed of its first step.
    left = f"""
from nbkit.rank.data import data_rng
from nbkit.rank.rng.seeding import SHARED
again("zero3")
{load[1]}
batches = []
data_rng.seed(job.seed, 0, SHARED)
for batch in loader:
    batches.append(batch)
for batch in job.batches(batches[{found[1]}:]):
    {STEP}
[record["loss"] for record in job.history]
"""
    assert four.run(left, timeout=60).values[3] == pytest.approx(undisturbed, abs=1e-10)


def test_errors_and_break_end_a_loop_as_usual(four: Cluster) -> None:
    four.run("again('ddp', recovery=nbkit.Recovery(on_failure='stop'))")
    with pytest.raises(CellError, match="planted"):
        four.run("for batch in job.batches(loader):\n    job.backward(batch)\n    raise ValueError('planted')")
    body = "    job.backward(batch); job.optimizer.step(); job.optimizer.zero_grad()\n"
    twice = (
        f"for batch in job.batches(loader):\n{body}    break\nfor _ in zip(range(3), job.batches(loader)):\n    pass"
    )
    assert four.run(f"{twice}\n(job.step, len(job.history))").values[2] == (1, 1)
    inside = f"def run():\n    for batch in job.batches(loader):\n    {body}run()\njob.step"
    assert four.run(inside).values[1] == 1 + STEPS


def test_a_death_ends_the_cell_if_recovery_is_stop(four: Cluster) -> None:
    """Run this test last: it ends the cluster."""
    kill_in(four, "ddp", "forward", 2, recovery=nbkit.Recovery(on_failure="stop"))
    with pytest.raises(RankDied, match="Rank 2 died"):
        four.run(LOOP, timeout=120)
