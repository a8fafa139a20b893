"""Clusters that tests leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbkit.notebook.cluster import registry


def end_clusters(home: Path) -> None:
    """End every cluster that lives in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBKIT_HOME", str(home))
        for entry in registry.entries():
            registry.end(entry)
