"""Start clusters over a Slurm and over SSH hosts, which run on this machine, for all files of this folder.

Tests that are not marked long are a sample for each launcher: a start, cells, an error, a training, a dead rank, the
end. `make machines` runs all. Without Slurm or sshd, the tests are skipped with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_nodes
import ssh_hosts
from clusters import assert_gone, home_of_clusters
from slurm_nodes import SlurmNodes
from ssh_hosts import SshHosts

from nbkit import Cluster
from nbkit.notebook.cluster.hosts.launchers.slurm import SlurmRequest
from nbkit.notebook.cluster.hosts.launchers.ssh import SshRequest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="package", autouse=True)
def nbkit_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with home_of_clusters(tmp_path_factory.mktemp("clusters")) as home:
        yield home


@pytest.fixture(scope="package")
def slurm(nbkit_home: Path) -> Iterator[SlurmNodes]:
    """Run Slurm with two nodes. Its commands work in this process too."""
    if why := slurm_nodes.missing():
        pytest.skip(why)
    with slurm_nodes.running(ROOT) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def on_slurm(slurm: SlurmNodes) -> Iterator[Cluster]:
    """Yield a cluster with two ranks on each of two nodes."""
    cluster = Cluster.start(name="jobs", on=SlurmRequest(4, nodes=2, cpu=True), ttl=600)
    yield cluster
    cluster.stop()
    assert_gone(slurm.jobs)


@pytest.fixture(scope="package")
def ssh(nbkit_home: Path) -> Iterator[SshHosts]:
    """Run two hosts for ssh, which this process can use too. They share neither /tmp nor /dev/shm with this machine."""
    if why := ssh_hosts.missing():
        pytest.skip(why)
    hosts = SshHosts(ROOT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(hosts.bin), prepend=os.pathsep)
        yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def on_ssh(ssh: SshHosts) -> Iterator[Cluster]:
    """Yield a cluster with two ranks on each of two hosts."""
    cluster = Cluster.start(name="hosts", on=SshRequest(tuple((name, 2) for name in ssh.names), cpu=True), ttl=600)
    yield cluster
    cluster.stop()
    assert_gone(lambda: [each for name in ssh.names for each in ssh.processes(name)])


@pytest.fixture(scope="module", params=[pytest.param("on_slurm", marks=pytest.mark.long), "on_ssh"])
def spread(request: pytest.FixtureRequest) -> Any:
    """Return a cluster on two hosts, once over each launcher."""
    return request.getfixturevalue(request.param)
