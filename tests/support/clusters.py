"""Folders for the clusters of tests, and the end of what tests leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nbkit.notebook.cluster import registry


@contextmanager
def home_of_clusters(home: Path) -> Iterator[Path]:
    """Clusters started inside live in this folder, and none of them survives it."""
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
