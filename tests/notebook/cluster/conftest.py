"""A real cluster of this test process, shared by the tests of one file; none survives the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbkit import Cluster


@pytest.fixture(scope="module", autouse=True)
def nbkit_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Clusters of tests live in a folder of their own, and leave no process behind."""
    home = tmp_path_factory.mktemp("clusters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBKIT_HOME", str(home))
        yield home


@pytest.fixture(scope="module")
def two(nbkit_home: Path) -> Iterator[Cluster]:
    cluster = Cluster.start(2, cpu=True, name="two", ttl=600)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def four(nbkit_home: Path) -> Iterator[Cluster]:
    cluster = Cluster.start(4, cpu=True, name="four", ttl=600)
    yield cluster
    cluster.stop()
