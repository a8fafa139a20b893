"""Test that a change of the number of ranks leaves the training unchanged, with a running Trainer and without.

All tests share a cluster. Each compares with an undisturbed training.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training_cell import NETWORK, cluster_of, until_step

from nbkit import Cluster
from nbkit.errors import NbkitError, StrategyError, TrainingError, UsageError
from nbkit.notebook.run.follower import Run

STEPS = 30
SETUP = f"""{NETWORK}
steps = {STEPS}
slow = 0.0
defaults = dict(
    model=lambda: Net(width=64, buffer=3),
    recovery=nbkit.Recovery(backup_every=0),
    lr_schedule=lambda step: 1 / (1 + 0.1 * step),
)
"""
CELL = "history = trainer.fit(steps)\n[record['loss'] for record in history]"

WEIGHTS = 64 * 8 + 64  # split by zero3; the second layer has a single row, on one rank
BUFFERS = 3 * 8
BYTES = 3 * 8  # bytes of an element and its two moments


@pytest.fixture(scope="module")
def cluster(nbkit_home: Path) -> Iterator[Cluster]:
    yield from cluster_of(2, "resized", SETUP)


def check_whole(cluster: Cluster, n: int) -> None:
    """Check that every rank runs cells and is in the world, and that the notebook has the ids of its processes."""
    results = cluster.run(
        "import os\ntotal = torch.ones(1)\ndist.all_reduce(total)\n(int(total), os.getpid(), rank, world_size)"
    )
    assert sorted(results.values) == list(range(n))
    for number, (total, pid, rank, world_size) in results.values.items():
        assert (total, rank, world_size) == (n, number, n)
        assert pid == cluster.entry.ranks[number].pid
    rows = cluster.status().rows
    assert [row.state for row in rows] == ["idle"] * n


def resized_while_it_trains(cluster: Cluster, sizes: list[int], **options: Any) -> tuple[list[Any], Any]:
    """Resize at the steps 4, 12, and so on. Return the result of each resize, and the results of the cell."""
    written = ", ".join(f"{name}={value!r}" for name, value in options.items())
    cluster.run(f"trainer = make({written}); slow = 0.05; held = trainer.model, trainer.optimizer")
    cluster.run("trainer.model.note = 'set since it was built'")
    handle = cluster.run(CELL, detach=True)
    told = []
    for number, n in enumerate(sizes):
        until_step(cluster, 4 + 8 * number)
        told.append(cluster.resize(n))
    return told, handle.wait(timeout=120)


def test_a_resize_to_four_ranks_and_back_keeps_the_losses_of_a_training(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = cluster.run(f"trainer = make(strategy='zero3')\n{CELL}").values[0]
    told, results = resized_while_it_trains(cluster, [4, 2], strategy="zero3", log_dir=str(tmp_path))

    said = "".join(capfd.readouterr())  # ranks that leave do not tell of the store, which is gone before they are
    assert "4 → 2 ranks" in said and "TCPStore" not in said
    assert sorted(results.values) == [0, 1]
    for losses in results.values.values():
        assert losses == pytest.approx(alone, abs=1e-10)
    assert [(one.result["old_ranks"], one.result["ranks"], one.strategy) for one in told] == [
        (2, 4, "dp=4 zero=3"),
        (4, 2, "dp=2 zero=3"),
    ]
    # With four ranks, three lack their quarter. With two, rank 1 lacks its half, and rank 0 the second quarter.
    # Buffers are sent by the first rank, since they may differ.
    assert told[0].result["moved_bytes"] == WEIGHTS * BYTES * 3 // 4 + 3 * BUFFERS
    assert told[1].result["moved_bytes"] == WEIGHTS * BYTES * 3 // 4 + BUFFERS
    check_whole(cluster, 2)
    assert cluster.run("trainer.model.note").values == dict.fromkeys(range(2), "set since it was built")
    # The user's model and optimizer are still those that train, and a later switch and fit work.
    cluster.run("assert held[0] is trainer.model and held[1] is trainer.optimizer\ntrainer.switch('ddp')")
    assert len(cluster.run("trainer.fit(2)\nhistory = trainer.history").values) == 2
    events = events_of(next(tmp_path.iterdir()))
    assert [(event["old_ranks"], event["ranks"]) for event in events if event["kind"] == "resized"] == [(2, 4), (4, 2)]


MIXTURE = """
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.head = nn.Linear(8, 4), nn.Linear(8, 1)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weight, choice = self.router(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if len(mine := (choice == number).nonzero().flatten()):
                made = made.index_add(0, mine, expert(x[mine]) * weight[mine, None])
        return self.head(made)

defaults["model"] = Mixture
"""


@pytest.mark.long
def test_places_of_experts_are_kept_by_a_resize(cluster: Cluster) -> None:
    cluster.run(MIXTURE)
    alone = cluster.run(f"trainer = make()\n{CELL}").values[0]
    told, results = resized_while_it_trains(cluster, [4, 2], strategy="ep=2 experts=0:0-3")
    cluster.run("defaults['model'] = lambda: Net(width=64, buffer=3)")

    assert [one.strategy for one in told] == ["dp=4 ep=2 experts=0:0-3", "dp=2 ep=2 experts=0:0-3"]
    for losses in results.values.values():
        assert losses == pytest.approx(alone, abs=1e-10)


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    run = Run(run_dir)
    run.refresh()
    assert run.world_size == 2
    return list(run.curve.events)


@pytest.mark.long
def test_a_resize_that_does_not_fit_is_refused_with_a_size_that_fits(cluster: Cluster) -> None:
    cluster.run("trainer = make(); slow = 0.05")
    handle = cluster.run(CELL, detach=True)
    until_step(cluster, 3)
    with pytest.raises(TrainingError, match="batch_size 8 / dp 3") as refused:
        cluster.resize(3)
    assert "%cluster resize 4" in refused.value.hint
    with pytest.raises(StrategyError, match="3 ranks"):
        cluster.resize(3, strategy="tp=2")
    with pytest.raises(UsageError, match="so many ranks already"):
        cluster.resize(2)
    assert len(handle.wait(timeout=60).values[1]) == STEPS
    cluster.run("import os\nos.environ['NBKIT_MEMORY_LIMIT'] = '1'")
    with pytest.raises(TrainingError, match="4 ranks do not have enough memory for this training") as refused:
        cluster.resize(4)
    assert re.search(r"[\d.]+ MB of weights, gradients and optimizer on a rank under dp=4", refused.value.numbers)
    cluster.run("del os.environ['NBKIT_MEMORY_LIMIT']")
    check_whole(cluster, 2)


def kill_when_one_is_forked(cluster: Cluster, rank: int) -> threading.Thread:
    """Kill the process of `rank` (2: the new rank) when the parent has forked a new rank, before a world is formed."""

    def children() -> set[int]:
        pid = cluster.entry.parent.pid
        return {int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}

    known = children()

    def act() -> None:
        while not (new := children() - known):
            time.sleep(0.002)
        os.kill(cluster.entry.ranks[rank].pid if rank < 2 else min(new), signal.SIGKILL)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, 2], ids=["one that is there", "one that is new"])
def test_the_death_of_a_rank_while_the_cluster_grows_keeps_the_training(cluster: Cluster, rank: int) -> None:
    alone = cluster.run(f"slow = 0.0; trainer = make()\n{CELL}").values[0]
    cluster.run("trainer = make(); slow = 0.05")
    handle = cluster.run(CELL, detach=True)
    until_step(cluster, 4)
    killing = kill_when_one_is_forked(cluster, rank)
    with pytest.raises(NbkitError) as failed:
        cluster.resize(4)
    killing.join()
    assert f"rank {rank} died (SIGKILL)" in failed.value.numbers and "%cluster resize 4" in failed.value.hint

    results = handle.wait(timeout=120)
    assert sorted(results.values) == [0, 1]
    for losses in results.values.values():
        assert losses == pytest.approx(alone, abs=1e-10)
    check_whole(cluster, 2)
    # The next resize succeeds.
    assert cluster.resize(4).result["ranks"] == 4
    cluster.resize(2)
    check_whole(cluster, 2)


def test_an_idle_cluster_is_resized_with_and_without_a_trainer(cluster: Cluster) -> None:
    cluster.run("del trainer, held, history\nimport gc; gc.collect()")
    cluster.resize(3)
    check_whole(cluster, 3)
    assert cluster.run("steps, rank").values[2] == (STEPS, 2)
    cluster.run("trainer = make(batch_size=12, data=rows()[:60]); trainer.fit(4); slow = 0.0")
    told = cluster.resize(2)
    assert (told.result["old_ranks"], told.result["ranks"], told.step) == (3, 2, 4)
    check_whole(cluster, 2)
    cluster.run("other = make(batch_size=12, data=rows()[:60]); other.fit(8); trainer.fit(4)")
    differ = "max(abs(a['loss'] - b['loss']) for a, b in zip(trainer.history, other.history, strict=True))"
    assert max(cluster.run(differ).values.values()) < 1e-10


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tp=2", "pp=2 microbatches=2"])
def test_a_resize_from_four_ranks_to_two_and_eight_keeps_the_losses(cluster: Cluster, strategy: str) -> None:
    cluster.resize(4)
    alone = cluster.run(f"trainer = make(strategy={strategy!r})\n{CELL}").values[0]
    _, results = resized_while_it_trains(cluster, [2, 8], strategy=strategy)
    for rank in range(8):
        assert results.values[rank] == pytest.approx(alone, abs=1e-10)
    check_whole(cluster, 8)
