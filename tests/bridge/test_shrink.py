"""Test `on_failure="shrink"`: ranks die in `fit`, and the training continues with the remaining ranks.

All tests share a cluster of four. Each compares with an undisturbed training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from training_cell import NETWORK, cluster_of, kill_at

from nbkit import Cluster
from nbkit.errors import CellError
from nbkit.notebook.cluster.cells.results import Results

STEPS = 14
SETUP = f"""{NETWORK}
steps = {STEPS}
defaults = dict(data=rows()[:60], batch_size=12, recovery=nbkit.Recovery(on_failure="shrink", backup_every=1))
"""
CELL = "history = trainer.fit(steps)\n[record['loss'] for record in history]"


@pytest.fixture(scope="module")
def four(nbkit_home: Path) -> Iterator[Cluster]:
    yield from cluster_of(4, "shrunk", SETUP)


@pytest.fixture(scope="module")
def alone(four: Cluster) -> list[float]:
    losses: list[float] = four.run(f"trainer = make()\n{CELL}").values[0]
    assert len(losses) == STEPS
    return losses


def run_killing(cluster: Cluster, ranks: list[int], step: int = 5) -> Results:
    """Run CELL, and kill the ranks when another rank reports that the training has reached `step`."""
    thread = kill_at(cluster, ranks, step)
    results: Results = cluster.run(CELL, timeout=120)
    thread.join()
    return results


def check_whole(cluster: Cluster, n: int) -> None:
    """Check that every rank runs cells and is in the world, and that the notebook has the ids of its processes."""
    results = cluster.run(
        "import os\ntotal = torch.ones(1)\ndist.all_reduce(total)\n(int(total), os.getpid(), world_size)"
    )
    assert sorted(results.values) == list(range(n))
    for rank, (total, pid, world_size) in results.values.items():
        assert (total, world_size) == (n, n)
        assert pid == cluster.entry.ranks[rank].pid
    rows = cluster.status().rows
    assert [row.state for row in rows] == ["idle"] * n
    assert len(cluster.entry.labels) == n and all(cluster.entry.labels)


def test_a_training_continues_with_the_remaining_ranks(
    four: Cluster, alone: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    four.run("trainer = make(strategy='zero3')")
    results = run_killing(four, [1])  # a new process takes its number, and rank 3 is removed
    assert sorted(results.values) == [0, 1, 2]
    for losses in results.values.values():
        assert losses == pytest.approx(alone, abs=1e-10)
    said = capsys.readouterr().err
    assert "4 → 3 ranks after step" in said and "dp=3 zero=3" in said
    check_whole(four, 3)


def test_a_training_continues_after_the_death_of_the_last_rank(four: Cluster, alone: list[float]) -> None:
    four.run("trainer = make()")
    results = run_killing(four, [2])
    assert sorted(results.values) == [0, 1]
    for losses in results.values.values():
        assert losses == pytest.approx(alone, abs=1e-10)
    assert four.run("trainer.history[-1]['strategy'], trainer.history[0]['strategy']").values[1] == ("dp=2", "dp=3")
    check_whole(four, 2)


@pytest.mark.long
def test_a_mesh_that_cannot_shrink_continues_with_a_new_rank_and_says_why(four: Cluster, alone: list[float]) -> None:
    if four.entry.n < 4:  # another test has shrunk it
        four.resize(4)
    four.run("trainer = make(strategy='tp=2', progress=True)")
    results = run_killing(four, [3])
    for rank in range(4):
        assert results.values[rank] == pytest.approx(alone, abs=1e-10)
    assert "continues with 4 ranks. The training cannot continue with 3 ranks." in results.output[0]
    check_whole(four, 4)


@pytest.mark.long
def test_a_training_continues_with_two_ranks_after_two_die_at_once(four: Cluster, alone: list[float]) -> None:
    four.run("trainer = make()")
    results = run_killing(four, [0, 3])
    assert sorted(results.values) == [0, 1]
    for losses in results.values.values():
        assert losses == pytest.approx(alone, abs=1e-10)
    check_whole(four, 2)


def test_an_unknown_policy_is_refused_with_the_known_ones(four: Cluster) -> None:
    with pytest.raises(CellError) as refused:
        four.run("make(recovery=nbkit.Recovery(on_failure='grow'))")
    assert "'replace', 'shrink', 'stop'" in refused.value.traceback
