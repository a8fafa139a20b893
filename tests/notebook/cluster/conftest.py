"""Provide real clusters for all files of this folder. None survives the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import home_of_clusters
from forked_parents import forked_parents

from nbkit import Cluster


@pytest.fixture(scope="package", autouse=True)
def nbkit_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with forked_parents(), home_of_clusters(tmp_path_factory.mktemp("clusters")) as home:
        yield home


@pytest.fixture(scope="package")
def two(nbkit_home: Path) -> Iterator[Cluster]:
    cluster = Cluster.start(2, cpu=True, name="two", ttl=600)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="package")
def four(nbkit_home: Path) -> Iterator[Cluster]:
    cluster = Cluster.start(4, cpu=True, name="four", ttl=600)
    yield cluster
    cluster.stop()
