"""One real cluster for the tests of the bridge, started as a notebook's kernel starts it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbkit import Cluster


@pytest.fixture(scope="session", autouse=True)
def nbkit_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Clusters of tests live in a folder of their own, and leave no process behind."""
    home = tmp_path_factory.mktemp("clusters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBKIT_HOME", str(home))
        yield home


@pytest.fixture(scope="session")
def two(nbkit_home: Path) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # ipykernel does not watch stdout where it sees this
        cluster = Cluster.start(2, cpu=True, name="bridged", ttl=600)
    yield cluster
    cluster.stop()
