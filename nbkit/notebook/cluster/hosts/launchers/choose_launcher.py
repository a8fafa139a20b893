"""Choose the launcher for a request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbkit.notebook.cluster.hosts.launchers.mpi import MpiHosts
from nbkit.notebook.cluster.hosts.launchers.plugin import PluginHosts
from nbkit.notebook.cluster.hosts.launchers.slurm import AllocatedNodes, SlurmJob
from nbkit.notebook.cluster.hosts.launchers.ssh import SshHosts
from nbkit.notebook.cluster.hosts.start_request import (
    AllocationRequest,
    MpiRequest,
    PluginRequest,
    Request,
    SlurmRequest,
    SshRequest,
    Starter,
)

_STARTERS: dict[type, Callable[[Any, Path], Starter]] = {
    SlurmRequest: SlurmJob,
    AllocationRequest: AllocatedNodes,
    SshRequest: SshHosts,
    MpiRequest: MpiHosts,
    PluginRequest: PluginHosts,
}


def starter_of(request: Request, folder: Path) -> Starter:
    """Return the launcher for `request`. folder: the cluster's folder. Raises UsageError for what can never fit."""
    return _STARTERS[type(request)](request, folder)
