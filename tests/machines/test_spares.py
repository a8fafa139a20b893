"""What several hosts have in reserve: devices, for ranks of the same host, and hosts, for one that is gone."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clusters import assert_gone
from slurm_nodes import SlurmNodes
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


def begun(ssh: SshHosts, name: str, count: int, options: str) -> Cluster:
    """Two hosts with ranks, and a third one in reserve."""
    hosts = ",".join(f"{host}:{count}" for host in (*ssh.names, ssh.spare))
    on = requested(options_of(f"start --hosts {hosts} --cpu --spare-hosts 1 {options}"))
    folder = ssh.folder / name
    folder.mkdir()
    cluster = Cluster.start(name=name, on=on, ttl=600)
    with tempfile.TemporaryDirectory() as project:  # below /tmp, which is another one on the hosts
        assert set_up(cluster, folder, Path(project)) == [(1, len(DISTANCE))] * 2
    return cluster


def processes(ssh: SshHosts) -> set[str]:
    """Of all three hosts."""
    return {each for name in (*ssh.names, ssh.spare) for each in ssh.processes(name)}


def set_up(cluster: Cluster, folder: Path, project: Path) -> list[tuple[int, int] | None]:
    """What each host was brought of the project."""
    (project / "distance.py").write_text(DISTANCE)
    with contextlib.chdir(project):
        synced = cluster.sync()
    cluster.run(f"folder = {str(folder)!r}\n{SETUP}")
    return list(synced.hosts.values())


@pytest.fixture(scope="module")
def two(ssh: SshHosts) -> Iterator[Cluster]:
    """A rank on each of two hosts, with a core in reserve there, and a third host."""
    cluster = begun(ssh, "spared", 1, "--spares 1")
    yield cluster
    cluster.stop()
    assert_gone(lambda: sorted(processes(ssh)))


@pytest.mark.long
def test_a_rank_of_either_host_goes_to_a_spare_of_its_own_host(
    two: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_host_without_a_device_for_its_spares_is_named(ssh: SshHosts) -> None:
    on = requested(options_of(f"start --hosts {ssh.names[0]} --cpu --spares 9999"))
    with pytest.raises(ClusterError, match="node1: Too few devices for the ranks and their spares") as caught:
        Cluster.start(name="none", on=on, ttl=600)
    assert "1 rank and 9999 spares" in caught.value.numbers and "--hosts node1:1" in caught.value.hint


@pytest.mark.long
def test_a_spare_host_that_another_one_cannot_reach_is_named_before_a_rank_starts(ssh: SshHosts) -> None:
    before = processes(ssh)
    ssh.block("on", (2, 3))
    try:
        on = requested(options_of("start --hosts node1:1,node2:1,node3:1 --cpu --spare-hosts 1"))
        with pytest.raises(ClusterError) as caught:
            Cluster.start(name="apart", on=on, ttl=600)
    finally:
        ssh.block("off", (2, 3))
    error = caught.value
    assert error.what == "The host node2 cannot connect to node3."
    assert f"from node2 ({ssh.net}.2) to node3 ({ssh.net}.3, port " in error.numbers
    assert f"; from node3 ({ssh.net}.3) to node2 ({ssh.net}.2, port " in error.numbers and "node1" not in error.numbers
    assert_gone(lambda: sorted(processes(ssh) - before))


def check_lost_host(cluster: Cluster, ssh: SshHosts, how: str, strategy: str, said: Callable[[], str]) -> None:
    """At step 6 the second host loses its cable, or the parent of its ranks. At step 14 one of its ranks dies again."""
    count, last, folder = cluster.entry.n // 2, cluster.entry.n - 1, ssh.folder / cluster.entry.name
    assert cluster.entry.spare_hosts == ("node3",) and "spare hosts: node3" in repr(cluster.status())
    cluster.run(f"plan = {{}}\ntrainer = make(strategy={strategy!r})", timeout=60)
    alone = cluster.run(CELL, timeout=60).values[0][0]
    cluster.run(f"plan = {{(6, {last}): {how!r}, (14, {last}): 'kill'}}\ntrainer = make(strategy={strategy!r})")
    said()
    try:
        handle, deadline = cluster.run(CELL, detach=True, timeout=120), time.monotonic() + 60
        while how == "cable" and not (folder / "6").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        if how == "cable":
            ssh.link(2, "down")
        results = handle.wait()
    finally:
        ssh.link(2, "up")
    assert_gone(lambda: ssh.processes(ssh.names[1]))  # what is left there does not go on beside those in its place
    hosts = cluster.run("import socket\nsocket.gethostname()").values
    assert [*hosts.values()] == ["node1"] * count + ["node3"] * count
    for rank in range(2 * count):
        assert results.values[rank][0] == pytest.approx(alone, abs=1e-10) and len(alone) == STEPS
    told = said()
    ranks = f"Rank {last} is" if count == 1 else f"Ranks {count}-{last} are"
    assert f"{ranks} on the spare host node3 now, in the place of node2; no spare host is left." in told
    again = [line for line in told.splitlines() if f"Rank {last} died (SIGKILL) in step" in line]
    assert len(again) == 1 and "was replaced" in again[0] and "spare" not in again[0], told  # once on this device
    assert "spare hosts: none is left of 1" in repr(cluster.status())
    assert cluster.status().rows[last].device.startswith("node3: ")
    assert running(cluster.entry.name).spare_hosts == ()


@pytest.mark.long
def test_the_ranks_of_a_host_that_is_gone_go_on_on_a_spare_host(
    two: Cluster, ssh: SshHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    check_lost_host(two, ssh, "cable", "zero3", lambda: capsys.readouterr().err)


@pytest.mark.long
@pytest.mark.parametrize(("how", "strategy"), [("parent", "zero3"), ("cable", "ddp"), ("cable", "pp=2 dp=2")])
def test_all_ranks_of_a_host_go_on_on_a_spare_host(
    ssh: SshHosts, how: str, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = begun(ssh, f"reserve-{strategy.partition('=')[0]}", 2, "")
    try:
        check_lost_host(cluster, ssh, how, strategy, lambda: capsys.readouterr().err)
    finally:
        cluster.stop()


@pytest.mark.long
def test_the_ranks_of_a_node_go_on_on_a_spare_node_of_the_same_job(
    slurm: SlurmNodes, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parent of the second node's rank ends, and with it the node's task; srun and the job go on."""
    on = requested(options_of("start --slurm -n 2 --nodes 2 --partition wide --cpu --spare-hosts 1"))
    cluster = Cluster.start(name="nodes", on=on, ttl=600)
    try:
        (spare,) = cluster.entry.spare_hosts
        folder = slurm.folder / "reserve"
        folder.mkdir()
        assert set_up(cluster, folder, folder) == [None, None]  # which see it
        cluster.run("trainer = make()")
        alone = cluster.run(CELL, timeout=60).values[0][0]
        cluster.run("plan = {(6, 1): 'parent'}\ntrainer = make()")
        results = cluster.run(CELL, timeout=120)
        for rank in range(2):
            assert results.values[rank][0] == pytest.approx(alone, abs=1e-10) and len(alone) == STEPS
        assert cluster.run("os.environ['SLURMD_NODENAME']").values[1] == spare
        assert f"Rank 1 is on the spare host {spare} now" in capsys.readouterr().err
    finally:
        cluster.stop()
    assert_gone(slurm.jobs)
