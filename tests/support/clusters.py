"""Folders for the clusters of tests, and the end of what tests leave behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from nbkit.notebook.cluster import registry


@contextmanager
def home_of_clusters(home: Path) -> Iterator[Path]:
    """Put clusters that are started inside into this folder. End those that are left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBKIT_HOME", str(home))
        try:
            yield home
        finally:
            for entry in registry.entries():
                registry.end(entry)


def end_clusters(home: Path) -> None:
    """End every cluster that lives in this folder."""
    with home_of_clusters(home):
        pass


def assert_gone(what: Callable[[], Sequence[object]]) -> None:
    """Wait until `what` returns nothing: a job under Slurm, or a host whose link was down, takes a while to end."""
    deadline = time.monotonic() + 40
    while what() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert list(what()) == []
