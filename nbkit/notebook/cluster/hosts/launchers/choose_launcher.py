"""Which launcher brings up what was asked for."""

from __future__ import annotations

from pathlib import Path

from nbkit.notebook.cluster.hosts.launchers.mpi import MpiHosts
from nbkit.notebook.cluster.hosts.launchers.slurm import AllocatedNodes, SlurmJob
from nbkit.notebook.cluster.hosts.launchers.ssh import SshHosts
from nbkit.notebook.cluster.hosts.start_request import MpiRequest, Request, SlurmRequest, SshRequest, Starter


def starter_of(request: Request, folder: Path) -> Starter:
    """The launcher for `request`. folder: of the cluster. Raises UsageError for what can never fit."""
    if isinstance(request, SlurmRequest):
        return SlurmJob(request, folder)
    if isinstance(request, MpiRequest):
        return MpiHosts(request, folder)
    return SshHosts(request, folder) if isinstance(request, SshRequest) else AllocatedNodes(request, folder)
