"""Test a cluster whose job waits in the queue while the notebook goes on: %cluster start --slurm --detach."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from slurm_nodes import SlurmNodes
from waiting import until

from magics.cluster import ClusterMagics
from nbkit import Cluster
from nbkit.errors import ClusterNotFound
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.hosts.launchers.slurm import SlurmRequest

ASKED = SlurmRequest(2, nodes=2, cpu=True)
PATIENCE = 120.0
PENDING = r"job \d+ is pending \((Resources|Priority)\), expected to start (at|on)"


@pytest.fixture
def busy(slurm: SlurmNodes) -> Iterator[str]:
    """Yield the number of a job that holds all nodes."""
    words = ("sbatch", "--parsable", "-N2", "-c2", "--time=20", "--output=/dev/null", "--wrap=sleep 900")
    job = slurm.command(*words).strip()
    until(lambda: slurm.jobs() == [f"{job} RUNNING"])
    yield job
    slurm.command("scancel", job)
    until(lambda: not slurm.jobs())


def state_of(name: str) -> str:
    """Return the line of `%cluster list` about the cluster `name`."""
    (line,) = (line for line in repr(Cluster.list()).splitlines() if line.startswith(f"{name} "))
    return line


@pytest.mark.long
def test_a_detached_job_is_shown_in_the_queue_and_can_be_cancelled(slurm: SlurmNodes, busy: str) -> None:
    listed = Cluster.submit(ASKED, name="waits")
    assert [entry.name for entry in listed] == ["waits"]
    until(lambda: re.search(PENDING, state_of("waits")))
    assert re.search(PENDING, repr(ClusterMagics(None)._status(None)))  # %cluster status, in a notebook without another
    registry.end(registry.running("waits"))  # %cluster stop waits
    assert slurm.jobs() == [f"{busy} RUNNING"]
    assert registry.find("waits") is None

    Cluster.submit(ASKED, name="refused")
    until(lambda: slurm.command("squeue", "-h", "-n", "nbkit-refused", "-o", "%T") == "PENDING\n")
    slurm.command("scancel", "-n", "nbkit-refused")
    entry = registry.find("refused")
    assert entry is not None
    until(lambda: not entry.left())
    with pytest.raises(ClusterNotFound, match=r"has ended: Job \d+ was cancelled before the cluster was ready"):
        Cluster.attach("refused")
    registry.forget("refused")


@pytest.mark.long
def test_the_end_of_the_kernel_does_not_end_its_waiting_job(slurm: SlurmNodes, busy: str) -> None:
    source = (
        "from nbkit import Cluster\nfrom nbkit.notebook.cluster.hosts.launchers.slurm import SlurmRequest\n"
        "Cluster.submit(SlurmRequest(2, nodes=2, cpu=True), name='later', ttl=45)"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=PATIENCE)
    born = time.monotonic()
    entry = registry.find("later")
    assert entry is not None and not entry.kernel.is_alive() and not entry.is_attached()
    until(lambda: re.search(PENDING, state_of("later")))
    # This is longer than its time to live, which does not count the time in the queue.
    until(lambda: time.monotonic() > born + 50)
    slurm.command("scancel", busy)
    cluster = Cluster.attach("later")
    assert cluster.run("x = torch.ones(1) * (rank + 1); dist.all_reduce(x); int(x)").values == {0: 3, 1: 3}
    assert "attached" in state_of("later")
    assert cluster.status().rows[1].state == "idle"
    cluster.stop()
    until(lambda: not slurm.jobs())


@pytest.mark.long
def test_an_interrupted_attach_leaves_the_job_in_the_queue(slurm: SlurmNodes, busy: str) -> None:
    Cluster.submit(ASKED, name="left")
    source = "from nbkit import Cluster\nCluster.attach('left')"
    notebook = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert notebook.stdout is not None
    assert b"pending" in notebook.stdout.read(30)
    notebook.send_signal(2)
    assert notebook.wait(PATIENCE) != 0
    assert re.search(PENDING, state_of("left"))
    registry.end(registry.running("left"))
    assert slurm.jobs() == [f"{busy} RUNNING"]
