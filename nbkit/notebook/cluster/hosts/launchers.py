"""Which launcher brings up what was asked for."""

from __future__ import annotations

from pathlib import Path

from nbkit.notebook.cluster.hosts.request import Request, Starter
from nbkit.notebook.cluster.hosts.slurm import SlurmJob


def starter_of(request: Request, folder: Path) -> Starter:
    """The launcher for `request`. folder: of the cluster. Raises UsageError for what can never fit."""
    return SlurmJob(request, folder)
