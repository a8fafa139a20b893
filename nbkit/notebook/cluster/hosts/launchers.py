"""Which launcher brings up what was asked for."""

from __future__ import annotations

from pathlib import Path

from nbkit.notebook.cluster.hosts.allocation import AllocatedNodes
from nbkit.notebook.cluster.hosts.request import Request, SlurmRequest, SshRequest, Starter
from nbkit.notebook.cluster.hosts.slurm import SlurmJob
from nbkit.notebook.cluster.hosts.ssh import SshHosts


def starter_of(request: Request, folder: Path) -> Starter:
    """The launcher for `request`. folder: of the cluster. Raises UsageError for what can never fit."""
    if isinstance(request, SlurmRequest):
        return SlurmJob(request, folder)
    return SshHosts(request, folder) if isinstance(request, SshRequest) else AllocatedNodes(request, folder)
