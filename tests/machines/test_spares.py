"""Test spare devices on several hosts: a rank whose device seems bad moves to a spare of its own host."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import assert_gone
from ssh_hosts import SshHosts
from training_cell import NETWORK

from magics.cluster import options_of
from nbkit import Cluster
from nbkit.errors import ClusterError
from nbkit.notebook.cluster.hosts.start_options import requested
from nbkit.notebook.cluster.registry import running

STEPS = 20
DISTANCE = "from torch.nn import functional as F\ndef squared(a, b):\n    return F.mse_loss(a, b)\n"
SETUP = f"""{NETWORK}
import os, signal
import distance  # which the hosts have from the notebook alone
slow = 0.005
plan = {{}}  # (step, rank) -> what happens to that rank in it, once

def mse(output, target):
    training = globals().get("trainer")
    how = plan.get((training.step, rank)) if training is not None else None
    if how and not os.path.exists(f"{{folder}}/{{training.step}}"):
        open(f"{{folder}}/{{training.step}}", "x").close()
        if how == "device":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\\nCUDA kernel errors might be")
        while how == "cable":  # it does not let itself be released
            try:
                time.sleep(120)
            except BaseException:
                pass
        if how == "parent":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return distance.squared(output, target)

defaults = dict(loss=mse, strategy="zero3", recovery=nbkit.Recovery(backup_every=1))
"""
CELL = f"history = trainer.fit({STEPS})\n[record['loss'] for record in history], sorted(os.sched_getaffinity(0))"


@pytest.fixture(scope="module")
def two(ssh: SshHosts) -> Iterator[Cluster]:
    """Yield a cluster with a rank and a spare core on each of two hosts."""
    on = requested(options_of(f"start --hosts {','.join(ssh.names)} --cpu --spares 1"))
    folder = ssh.folder / "spared"
    folder.mkdir()
    cluster = Cluster.start(name="spared", on=on, ttl=600)
    with tempfile.TemporaryDirectory() as project:  # in /tmp, which is a different folder on the hosts
        (Path(project) / "distance.py").write_text(DISTANCE)
        with contextlib.chdir(project):
            synced = cluster.sync()
    assert [*synced.hosts.values()] == [(1, len(DISTANCE))] * 2
    cluster.run(f"folder = {str(folder)!r}\n{SETUP}")
    yield cluster
    cluster.stop()
    assert_gone(lambda: [each for name in ssh.names for each in ssh.processes(name)])


@pytest.mark.long
def test_a_rank_moves_to_a_spare_of_its_own_host(two: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = two.entry.labels, two.entry.spares
    assert [label.partition(": ")[0] for label in (*old, *new)] == ["node1", "node2"] * 2
    assert two.entry.n == 2
    assert f"spares: {', '.join(new)}" in repr(two.status())
    alone = two.run(f"trainer = make()\n{CELL}", timeout=60).values[0][0]

    two.run("plan = {(4, 1): 'kill', (9, 1): 'kill', (12, 0): 'device', (16, 1): 'device'}\ntrainer = make()")
    results = two.run(CELL, timeout=120)

    for rank in range(2):
        assert results.values[rank][0] == pytest.approx(alone, abs=1e-10)
        assert results.values[rank][1] == [int(new[rank].rpartition(" ")[2])]
    core = [label.partition(": ")[2] for label in (*old, *new)]
    said = [line for line in capsys.readouterr().err.splitlines() if "was replaced" in line]
    assert len(said) == 4 and "spare" not in said[0]
    assert (
        f"Rank 1 is on the spare {core[3]} now, since it died twice on {core[1]}; no spare is left on node2." in said[1]
    )
    assert f"Rank 0 is on the spare {core[2]} now, since {core[0]} failed; no spare is left on node1." in said[2]
    assert f"Rank 1 stays on {core[3]}, though {core[3]} failed: no spare is left on node2." in said[3]
    assert "spares: none is left of 1 on each host" in repr(two.status())
    assert [row.device for row in two.status().rows] == [*new]
    assert f"for it died twice on {core[1]}" in two.status().rows[1].why
    assert (running("spared").labels, running("spared").spares) == (new, ())


def test_a_host_without_devices_for_its_spares_is_named(ssh: SshHosts) -> None:
    on = requested(options_of(f"start --hosts {ssh.names[0]} --cpu --spares 9999"))
    with pytest.raises(ClusterError, match="node1: Too few devices for the ranks and their spares") as caught:
        Cluster.start(name="none", on=on, ttl=600)
    assert "1 rank and 9999 spares" in caught.value.numbers and "--hosts node1:1" in caught.value.hint
