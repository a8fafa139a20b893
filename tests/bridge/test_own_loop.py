"""A rank dies in a loop over `job.batches`: a new one enters the loop, and nothing of the training is another one.

One cluster of four for all cases; each kills in mid-training and compares with a loop that was left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_cell import NETWORK

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

def each(loader):
    yield from loader

class Meter:
    def __init__(self):
        self.total, self.seen = 0.0, []

    def add(self, value):
        self.total += value
        self.seen.append(value)

def again(strategy, log_dir=None, **options):
    global job, losses, meter, mean, scheduler, begun, loader
    job, example = None, torch.utils.data.default_collate(rows()[:2])
    optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)
    job = nbkit.prepare(Net, optimizer, loss=mse, strategy=strategy, example=example, log_dir=log_dir, **options)
    losses, meter, mean, begun = [], Meter(), torch.zeros(()), 0
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 3, 0.7)
    loader = DataLoader(rows() + rows()[:32], batch_size=8, shuffle=True)
"""
LOOP = """
for number, batch in enumerate(job.batches(loader)):
    begun += 1
    assert number + 1 == begun == job.step + 1
    result = job.backward(batch)
    norm = job.clip(1.0)
    job.optimizer.step(); job.optimizer.zero_grad()
    scheduler.step()
    dies("behind")
    meter.add(result.loss.item())
    mean += result.loss
    losses.append((meter.total, mean.item(), norm.item(), scheduler.get_last_lr()[0]))
    job.log(begun=begun)
    time.sleep(slow)
after = begun
(losses, [record["loss"] for record in job.history], [record["begun"] for record in job.history], after, meter.seen)
"""


@pytest.fixture(scope="module")
def four(nbkit_home: Path) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # ipykernel does not watch stdout where it sees this
        cluster = Cluster.start(4, cpu=True, name="loops", ttl=600)
    cluster.run(SETUP)
    yield cluster
    cluster.stop()


Values = tuple[list[tuple[float, ...]], list[float], list[int], int, list[float]]


@pytest.fixture(scope="module")
def undisturbed(four: Cluster) -> Values:
    values: Values = four.run(f"again('ddp')\n{LOOP}", timeout=60).values[0]
    assert len(values[0]) == len(values[1]) == values[3] == STEPS
    return values


@pytest.fixture(scope="module")
def unclipped(four: Cluster) -> list[float]:
    """The losses of a loop that was left alone and does nothing but the steps."""
    losses: list[float] = four.run(
        f"again('ddp')\n{OF_EACH}\n[record['loss'] for record in job.history]", timeout=60
    ).values[0]
    assert len(losses) == STEPS
    return losses


def check_equal(found: Values, expected: Values) -> None:
    for one, other in zip(found[0], expected[0], strict=True):
        assert one == pytest.approx(other, abs=1e-10)
    assert found[1] == pytest.approx(expected[1], abs=1e-10) and found[4] == pytest.approx(expected[4], abs=1e-10)
    assert found[2:4] == expected[2:4]


@pytest.mark.parametrize(
    ("strategy", "rank", "where", "step"),
    [
        ("ddp", 2, "forward", 5),
        # In the last body, behind all that a rank waits for.
        pytest.param("ddp", 1, "behind", STEPS, marks=pytest.mark.long),
        pytest.param("dp=2 pp=2", 3, "behind", 5, marks=pytest.mark.long),
        pytest.param("zero3", 1, "forward", 5, marks=pytest.mark.long),
        pytest.param("zero3", 2, "behind", STEPS, marks=pytest.mark.long),
        pytest.param("zero1", 0, "behind", 5, marks=pytest.mark.long),
    ],
)
def test_the_loop_goes_on_as_if_nothing_had_been(
    four: Cluster,
    undisturbed: Values,
    strategy: str,
    rank: int,
    where: str,
    step: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kill_in(four, strategy, where, rank, step, backup_every=1)
    results = four.run(LOOP, timeout=120)
    assert results.status == "ok"
    for each in range(4):
        check_equal(results.values[each], undisturbed)
    assert re.search(rf"Rank {rank} died .* replaced: \d steps? and \d+\.\d s lost", capsys.readouterr().err)


SUMMED = """
for batch in job.batches(loader):
    job.backward(batch); job.optimizer.step(); job.optimizer.zero_grad()
    if rank == 1:
        dies("behind")
    dist.all_reduce(mean.add_(1.0))  # waits for the rank that has died, after the update
    losses.append(mean.item())
(losses, [record["loss"] for record in job.history])
"""
HALF = """
for batch in job.batches(loader):
    job.backward(batch)
    if rank == 2:
        dies("half")
        dist.send(mean, 3)
    elif rank == 3:
        dist.recv(mean, 2)  # waits for the rank that has died, when others have made the update
    job.optimizer.step(); job.optimizer.zero_grad()
    losses.append(1)
(losses, [record["loss"] for record in job.history])
"""
OF_EACH = """
own = float(rank)
for batch in job.batches(loader):
    job.backward(batch); job.optimizer.step(); job.optimizer.zero_grad()
    own += 1
"""
OPAQUE = """
class Pair:
    def __init__(self, batch):
        self.batch = batch

class Pairs:
    def __iter__(self):
        return map(Pair, loader)

for pair in job.batches(Pairs()):
    job.backward(pair.batch); job.optimizer.step(); job.optimizer.zero_grad()
"""
STEP = "job.backward(batch); job.optimizer.step(); job.optimizer.zero_grad()"
EPOCHS = f"for epoch in range(1):\n    for batch in job.batches(loader):\n        {STEP}"
ITERATED = f"for batch in job.batches(each(loader)):\n    {STEP}"


def kill_in(cluster: Cluster, strategy: str, where: str, rank: int, step: int = 5, **options: object) -> None:
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    cluster.run(f"again({strategy!r}{given})")
    cluster.run(f"os.environ['WHERE'] = {where!r}\nif rank == {rank}: os.environ['DIES{rank}'] = '{step}'")


@pytest.mark.parametrize(
    ("cell", "strategy", "where", "rank"),
    [pytest.param(HALF, "ddp", "half", 2, marks=pytest.mark.long), (SUMMED, "zero3", "behind", 1)],
    ids=["half of the ranks", "behind it"],
)
def test_all_go_back_to_where_the_body_was_over_on_all(
    four: Cluster, cell: str, strategy: str, where: str, rank: int
) -> None:
    """From a rank that had not made the update, or, behind it, from the backups."""
    expected = four.run(f"again('ddp')\n{cell}", timeout=60).values[0]
    kill_in(four, strategy, where, rank, backup_every=1)
    found = four.run(cell, timeout=120).values
    for rank in range(4):
        assert found[rank][0] == expected[0] and found[rank][1] == pytest.approx(expected[1], abs=1e-10)


@pytest.mark.parametrize(
    ("cell", "rank", "where", "why"),
    [
        (SUMMED, 1, "behind", "in the loop's body behind the update"),
        pytest.param(OF_EACH, 2, "forward", "differs between ranks", marks=pytest.mark.long),
        pytest.param(EPOCHS, 0, "forward", "no statement of its own", marks=pytest.mark.long),
        pytest.param(ITERATED, 3, "forward", "its loader cannot begin again", marks=pytest.mark.long),
        pytest.param(OPAQUE, 1, "forward", "no checksum can be made of its batches", marks=pytest.mark.long),
    ],
    ids=["behind the update", "names of each rank", "epochs", "an iterator", "batches that nobody knows again"],
)
def test_a_loop_that_cannot_go_on_is_saved_and_the_checkpoint_goes_on(
    four: Cluster, unclipped: list[float], tmp_path: Path, cell: str, rank: int, where: str, why: str
) -> None:
    kill_in(four, "ddp", where, rank, log_dir=str(tmp_path))
    with pytest.raises(
        CellError, match=r"A rank died in a loop over job\.batches that cannot go on as it was"
    ) as caught:
        four.run(cell, timeout=120)
    said = caught.value.traceback
    assert why in said and f"rank {rank} died (it exited with code 3)" in said
    found = re.search(r"ended after step (\d+), saved to", said)
    load = re.search(r"(job\.load\(job\.opened\('.*'\)\))", said)
    assert found is not None and load is not None
    if cell in (OF_EACH, ITERATED, OPAQUE):
        return  # saved as the others are
    # What the error says is typed as it is. The loader is shuffled under the seed of its first step.
    left = f"""
again("zero3")
{load[1]}
batches = []
data_rng.seed(job.seed, 0, SHARED)
for step, batch in enumerate(loader, 1):
    batches.append(batch)
for batch in job.batches(batches[{found[1]}:]):
    job.backward(batch); job.optimizer.step(); job.optimizer.zero_grad()
[record["loss"] for record in job.history]
"""
    imports = "from nbkit.rank.data import data_rng\nfrom nbkit.rank.rng.seeding import SHARED"
    losses = four.run(f"{imports}\n{left}", timeout=60).values[3]
    assert losses == pytest.approx(unclipped, abs=1e-10)


def test_what_is_no_death_ends_a_loop_as_ever(four: Cluster) -> None:
    four.run("again('ddp', on_failure='stop')")
    with pytest.raises(CellError, match="planted"):
        four.run("for batch in job.batches(loader):\n    job.backward(batch)\n    raise ValueError('planted')")
    body = "    job.backward(batch); job.optimizer.step(); job.optimizer.zero_grad()\n"
    twice = (
        f"for batch in job.batches(loader):\n{body}    break\nfor _ in zip(range(3), job.batches(loader)):\n    pass"
    )
    assert four.run(f"{twice}\n(job.step, len(job.history))").values[2] == (1, 1)
    inside = f"def run():\n    for batch in job.batches(loader):\n    {body}run()\njob.step"
    assert four.run(inside).values[1] == 1 + STEPS


def test_a_death_that_is_not_to_be_replaced_ends_the_cell(four: Cluster) -> None:
    """The last test: it ends the cluster."""
    kill_in(four, "ddp", "forward", 2, on_failure="stop")
    with pytest.raises(RankDied, match="Rank 2 died"):
        four.run(OF_EACH, timeout=120)
