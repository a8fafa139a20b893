"""Test agents started by mpirun: on this machine, on hosts over SSH, and failures."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from clusters import assert_gone
from forked_parents import forked_parents
from slurm_nodes import SlurmNodes
from ssh_hosts import SshHosts
from waiting import until

from nbkit import Cluster
from nbkit.errors import ClusterError, RankDied, UsageError
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.hosts.launchers.mpi import MpiRequest, nodes_of_job
from nbkit.notebook.cluster.hosts.launchers.slurm import SlurmRequest

OF_MPI = "[name for name in os.environ if name.startswith(('OMPI_', 'PMI'))]"


# Debian's name of each mpirun if several are installed, and its package.
OPEN_MPI, MPICH = ("mpirun.openmpi", "openmpi-bin"), ("mpirun.mpich", "mpich")


@pytest.fixture(params=[OPEN_MPI, MPICH], ids=["openmpi", "mpich"])
def mpi(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name, package = request.param
    program = shutil.which(name) or (shutil.which("mpirun") if request.param == OPEN_MPI else None)
    if program is None:
        pytest.skip(f"not installed: {name} (apt-get install {package})")
    folder = tmp_path_factory.mktemp("bin")
    (folder / "mpirun").write_text(f'#!/bin/sh\nexec {program} "$@"\n')  # no link: Open MPI needs its real path
    (folder / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    if os.geteuid() == 0:
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
            monkeypatch.setenv(name, "1")


def agents() -> list[psutil.Process]:
    found = (process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"])
    return [process for process in found if "mpirun" in process.info["cmdline"][0]]


@pytest.mark.long
def test_a_death_ends_only_that_rank_and_ranks_get_no_mpi_variables(mpi: None) -> None:
    cluster = Cluster.start(name="mpi", on=MpiRequest((("localhost", 2),), cpu=True), ttl=60)
    try:
        ran = cluster.run(f"import os\nseen = torch.ones(1); dist.all_reduce(seen)\nseen.item(), {OF_MPI}")
        assert ran.values == {0: (2.0, []), 1: (2.0, [])}
        with pytest.raises(RankDied, match="Rank 1 died: SIGKILL"):
            cluster.run(f"if rank: os.kill(os.getpid(), {signal.SIGKILL:d})\ndist.barrier()")
        assert cluster.run("rank", "0").values == {0: 0}
    finally:
        cluster.stop()
    until(lambda: not agents(), 10)


@pytest.mark.long
def test_each_host_has_its_requested_number_of_ranks(mpi: None, ssh: SshHosts) -> None:
    hosts = tuple(zip(ssh.names, (1, 2), strict=True))
    cluster = Cluster.start(name="mpi", on=MpiRequest(hosts, cpu=True), ttl=60)
    try:
        ran = cluster.run(
            "import socket\nseen = torch.ones(1); dist.all_reduce(seen)\nseen.item(), socket.gethostname()"
        )
        assert ran.values == {0: (3.0, "node1"), 1: (3.0, "node2"), 2: (3.0, "node2")}
    finally:
        cluster.stop()


@pytest.mark.long
def test_a_second_agent_with_the_same_number_is_refused_and_the_first_goes_on(
    mpi: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = tmp_path / "twice"
    twice.write_text('#!/bin/sh\n"$@" & "$@"\nwait\n')
    twice.chmod(0o755)
    request = MpiRequest((("localhost", 2),), cpu=True, container=str(twice))
    cluster = Cluster.start(name="mpi", on=request, ttl=60)
    try:
        here = os.uname().nodename
        assert f"an agent on {here} came as host 0 of 1, which {here} is already: it was refused" in str(cluster.notes)
        assert cluster.run("seen = torch.ones(1); dist.all_reduce(seen); seen.item()").values == {0: 2.0, 1: 2.0}
        assert f"an agent on {here} came as host 0" in (cluster.entry.folder / "logs/launcher.log").read_text()
    finally:
        cluster.stop()
    assert_gone(lambda: [process.cmdline() for process in agents()])


def test_a_refusal_of_mpirun_is_quoted(mpi: None) -> None:
    request = MpiRequest((("localhost", 1),), cpu=True, options=("--no-such-option",))
    with pytest.raises(ClusterError, match="mpirun has ended before the cluster was ready") as refused:
        Cluster.start(name="refused", on=request)
    assert "no-such-option" in refused.value.numbers
    assert registry.find("refused") is None


def test_a_missing_mpirun_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="There is no mpirun on this machine"):
        Cluster.start(name="refused", on=MpiRequest((("localhost", 1),)))


def test_hosts_of_a_batch_job_are_read_from_its_node_file(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    assert nodes_of_job({"PBS_NODEFILE": str(tmp_path / "nodes")}) == (("n1", 2), ("n2", 2))
    assert nodes_of_job({}) == ()


# Variables that MPICH's and Intel's mpirun, srun --mpi=pmi2 and Open MPI's mpirun set.
OF_A_PROCESS = {"PMI_RANK": "1", "PMI_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "MPI_LOCALRANKID": "1"}


def test_agents_do_not_inherit_the_mpi_rank_of_the_notebook(
    nbkit_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**OF_A_PROCESS, "OMPI_MCA_btl": "self"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "mpirun").write_text('#!/bin/sh\n[ "$1" = --version ] && exit\nenv > "$(dirname "$0")/env"\n')
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ClusterError, match="mpirun has ended before the cluster was ready"):
        Cluster.start(name="env", on=MpiRequest((("localhost", 1),), cpu=True))
    seen = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert {"NBKIT_AGENT", "OMPI_MCA_btl", "PATH"} <= seen
    assert not seen & set(OF_A_PROCESS)


@pytest.mark.long
def test_local_ranks_do_not_inherit_the_mpi_rank_of_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**OF_A_PROCESS, "OMPI_MCA_btl": "self"}.items():
        monkeypatch.setenv(name, value)
    with forked_parents():
        cluster = Cluster.start(n=1, name="beside", cpu=True)
    try:
        assert cluster.run(f"import os\n{OF_MPI}, 'MPI_LOCALRANKID' in os.environ").values == {
            0: (["OMPI_MCA_btl"], False)
        }
    finally:
        cluster.stop()


@pytest.mark.long
def test_a_notebook_under_mpirun_can_start_a_cluster_over_slurm(
    slurm: SlurmNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OF_A_PROCESS.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster.start(name="inside", on=SlurmRequest(2, nodes=2, cpu=True), ttl=60)
    try:
        ran = cluster.run(f"import os\nseen = torch.ones(1); dist.all_reduce(seen)\nrank, seen.item(), {OF_MPI}")
        assert ran.values == {0: (0, 2.0, []), 1: (1, 2.0, [])}
    finally:
        cluster.stop()
