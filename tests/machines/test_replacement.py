"""Test that a rank that dies in `fit` is replaced on its own host, and a lost host ends the training."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest
from clusters import assert_gone
from ssh_hosts import SshHosts
from training_cell import NETWORK, until_step

from nbkit import Cluster
from nbkit.errors import RankDied
from nbkit.notebook.cluster.hosts.launchers.ssh import SshRequest

CELL = "history = trainer.fit(30)\n[record['loss'] for record in history]"
WHERE = "import os, socket\ndist.barrier()\n[rank, socket.gethostname(), os.getpid()]"


@pytest.fixture(scope="module")
def undisturbed(on_ssh: Cluster) -> list[float]:
    on_ssh.run(
        f"{NETWORK}\nimport os, signal\ndefaults = dict(recovery=nbkit.Recovery(backup_every=1))\ntrainer = make()"
    )
    losses: list[float] = on_ssh.run(CELL, timeout=120).values[0]
    return losses


def run_killing(cluster: Cluster, hosts: SshHosts, ranks: list[int]) -> tuple[dict[int, list[float]], str]:
    """Kill these ranks on their hosts during a `fit`. Return its losses and output."""
    before = cluster.run(WHERE).values
    other = next(rank for rank in range(4) if rank not in ranks)

    def act() -> None:
        until_step(cluster, 8, rank=other)
        for rank in ranks:
            _, host, pid = before[rank]
            subprocess.run([hosts.bin / "ssh", host, f"kill -{signal.SIGKILL:d} {pid}"], check=True)

    killing = threading.Thread(target=act, daemon=True)
    killing.start()
    results = cluster.run(CELL, timeout=240)
    killing.join()
    after = cluster.run(WHERE).values
    assert [(rank, host) for rank, host, _ in after.values()] == [(rank, host) for rank, host, _ in before.values()]
    assert [rank for rank in range(4) if after[rank][2] != before[rank][2]] == ranks
    return results.values, "".join(results.output.values())


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "ranks"), [("zero3", [3]), ("ddp", [0]), ("zero3", [0, 3])], ids=str)
def test_a_dead_rank_is_replaced_on_its_host_with_the_same_losses(
    on_ssh: Cluster, ssh: SshHosts, undisturbed: list[float], strategy: str, ranks: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    on_ssh.run(f"trainer = make(strategy={strategy!r})", timeout=120)
    losses, _ = run_killing(on_ssh, ssh, ranks)
    for rank in range(4):
        assert losses[rank] == pytest.approx(undisturbed, abs=1e-10)
    assert "replaced: 0 steps" in capsys.readouterr().err or strategy == "zero3"
    assert on_ssh.run("trainer.fit(2)[-1]['step']", timeout=120).values == dict.fromkeys(range(4), 32)
    assert [row.state for row in on_ssh.status().rows] == ["idle"] * 4


@pytest.mark.long
def test_a_lost_host_ends_the_training_and_its_checkpoint_can_be_resumed(
    ssh: SshHosts, undisturbed: list[float], nbkit_home: Path
) -> None:
    """Use a separate cluster, because the ranks of a host that does not answer are lost, and not replaced."""
    saved = tempfile.mkdtemp(prefix="saved-", dir=ssh.folder)  # the hosts have a different /tmp
    cluster = Cluster.start(name="gone", on=SshRequest(tuple((name, 2) for name in ssh.names), cpu=True), ttl=600)
    try:
        cluster.run(f"{NETWORK}\ndefaults = dict(recovery=nbkit.Recovery(backup_every=1))")
        saves = f"nbkit.Checkpoints(path={saved!r}, every=5)"
        cluster.run(f"trainer = make(strategy='zero3', checkpoints={saves})", timeout=120)
        handle = cluster.run(CELL, detach=True)
        until_step(cluster, 8)
        ssh.link(2, "down")
        try:
            with pytest.raises(RankDied, match=r"Rank 2 died: its host node2 does not answer") as caught:
                handle.wait(60)
            assert f"trainer.load({saved!r})" in caught.value.hint
        finally:
            ssh.link(2, "up")
    finally:
        cluster.stop()
        assert_gone(lambda: [each for name in ssh.names for each in ssh.processes(name) if "gone" in each])
    left = Cluster.start(2, cpu=True, name="left", ttl=600)
    try:
        left.run(f"{NETWORK}\ntrainer = make()\ntrainer.load({saved!r})", timeout=120)
        again = left.run("trainer.fit(until=30)\n[record['loss'] for record in trainer.history]", timeout=120)
    finally:
        left.stop()
    for rank in range(2):
        assert again.values[rank] == pytest.approx(undisturbed, abs=1e-10)
