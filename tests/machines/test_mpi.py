"""Agents that mpirun starts: on this machine, on hosts that it reaches over SSH, and what goes wrong."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from ssh_hosts import SshHosts

from nbkit import Cluster
from nbkit.errors import ClusterError, RankDied, UsageError
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.hosts.launchers.mpi import nodes_of_job
from nbkit.notebook.cluster.hosts.start_request import MpiRequest

OF_MPI = "[name for name in os.environ if name.startswith(('OMPI_', 'PMI'))]"


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("mpirun"):
        pytest.skip("not installed: mpirun (apt-get install openmpi-bin)")
    if os.geteuid() == 0:
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
            monkeypatch.setenv(name, "1")


def agents() -> list[psutil.Process]:
    found = (process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"])
    return [process for process in found if "mpirun" in process.info["cmdline"][0]]


def test_one_death_ends_that_rank_alone_and_nothing_of_mpi_is_left_to_the_ranks(mpi: None) -> None:
    cluster = Cluster.start(name="mpi", on=MpiRequest((("localhost", 2),), cpu=True), ttl=60)
    try:
        ran = cluster.run(f"import os\nseen = torch.ones(1); dist.all_reduce(seen)\nseen.item(), {OF_MPI}")
        assert ran.values == {0: (2.0, []), 1: (2.0, [])}
        with pytest.raises(RankDied, match="Rank 1 died: SIGKILL"):
            cluster.run(f"if rank: os.kill(os.getpid(), {signal.SIGKILL:d})\ndist.barrier()")
        assert cluster.run("rank", "0").values == {0: 0}
    finally:
        cluster.stop()
    deadline = time.monotonic() + 10
    while agents() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert agents() == []


@pytest.mark.long
def test_each_host_has_the_ranks_that_were_asked_for_there(mpi: None, ssh: SshHosts) -> None:
    hosts = tuple(zip(ssh.names, (1, 2), strict=True))
    cluster = Cluster.start(name="mpi", on=MpiRequest(hosts, cpu=True), ttl=60)
    try:
        ran = cluster.run(
            "import socket\nseen = torch.ones(1); dist.all_reduce(seen)\nseen.item(), socket.gethostname()"
        )
        assert ran.values == {0: (3.0, "node1"), 1: (3.0, "node2"), 2: (3.0, "node2")}
    finally:
        cluster.stop()


def test_mpirun_is_quoted_when_it_refuses(mpi: None) -> None:
    request = MpiRequest((("localhost", 1),), cpu=True, options=("--no-such-option",))
    with pytest.raises(ClusterError, match="mpirun has ended before the cluster was ready") as refused:
        Cluster.start(name="refused", on=request)
    assert "no-such-option" in refused.value.numbers
    assert registry.find("refused") is None


def test_without_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="There is no mpirun on this machine"):
        Cluster.start(name="refused", on=MpiRequest((("localhost", 1),)))


def test_a_batch_system_tells_its_hosts_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    assert nodes_of_job({"PBS_NODEFILE": str(tmp_path / "nodes")}) == (("n1", 2), ("n2", 2))
    assert nodes_of_job({}) == ()
