"""Start a real cluster for the tests of the bridge, as a notebook's kernel starts one."""

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
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # ipykernel does not watch stdout if it sees this
        cluster = Cluster.start(2, cpu=True, name="bridged", ttl=600)
    yield cluster
    cluster.stop()
