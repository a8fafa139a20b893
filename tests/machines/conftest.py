"""Clusters on several hosts that all files of this folder share: over a Slurm of two nodes that is started here."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_nodes
from clusters import home_of_clusters
from slurm_nodes import SlurmNodes

from nbkit import Cluster
from nbkit.notebook.cluster.hosts.request import SlurmRequest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="package", autouse=True)
def nbkit_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with home_of_clusters(tmp_path_factory.mktemp("clusters")) as home:
        yield home


@pytest.fixture(scope="package")
def slurm(nbkit_home: Path) -> Iterator[SlurmNodes]:
    """Slurm's commands, of this process too, find its two nodes."""
    if why := slurm_nodes.missing():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="nbkit-slurm-"))  # a socket's path has to be short
    nodes = SlurmNodes(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in nodes.environment.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        yield nodes
    nodes.close()
    shutil.rmtree(folder)


@pytest.fixture(scope="package")
def on_slurm(slurm: SlurmNodes) -> Iterator[Cluster]:
    """Two ranks on each of two nodes."""
    cluster = Cluster.start(name="jobs", on=SlurmRequest(4, nodes=2, cpu=True), ttl=600)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="package")
def spread(on_slurm: Cluster) -> Cluster:
    """A cluster on two hosts."""
    return on_slurm
