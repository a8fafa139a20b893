"""Which launcher brings up what was asked for."""

from __future__ import annotations

from pathlib import Path

from nbkit.notebook.cluster.hosts.request import Request, SlurmRequest, Starter
from nbkit.notebook.cluster.hosts.slurm import SlurmJob
from nbkit.notebook.cluster.hosts.ssh import SshHosts


def starter_of(request: Request, folder: Path) -> Starter:
    """The launcher for `request`. folder: of the cluster. Raises UsageError for what can never fit."""
    return SlurmJob(request, folder) if isinstance(request, SlurmRequest) else SshHosts(request, folder)
