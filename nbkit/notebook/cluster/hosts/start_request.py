"""Requests for ranks on other hosts: plain values, which the cluster's options keep."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, cast

from nbkit.errors import UsageError
from nbkit.notebook.cluster.hosts.progress import LauncherView
from nbkit.quoting import check_host, user_path
from nbkit.wire.own_modules import OWN_MODULES

_LOG_LINES = 15


@dataclass(frozen=True)
class SlurmRequest:
    """`n` ranks in a Slurm job.

    nodes: None takes as few as hold them. "" and () leave the choice to Slurm. cpu: CPU ranks, even if nodes have GPUs.
    options: options of sbatch, passed unchanged. python: "" for the notebook's own. save_before: how many seconds
    before the end of the job a training in it is saved, and ends; at most a quarter of the job's time. requeue: if
    Slurm takes the hosts away under a training, request others. container: words in front of the agent's command that
    put it, and so the ranks, into a container: "apptainer exec --nv torch.sif", or options of srun
    ("--container-image=..." of pyxis). spares: devices in reserve on each host.
    """

    n: int
    nodes: int | None = None
    partition: str = ""
    time: str = ""
    cpu: bool = False
    options: tuple[str, ...] = ()
    python: str = ""
    save_before: float = 120.0
    container: str = ""
    requeue: bool = False
    spares: int = 0

    def __post_init__(self) -> None:
        if self.n < 1 or (self.nodes is not None and self.nodes < 1):
            raise UsageError(
                "A cluster has at least one rank, on at least one node.",
                numbers=f"-n {self.n}, --nodes {self.nodes}",
                hint="-n 4 --nodes 2",
            )
        object.__setattr__(self, "options", tuple(self.options))


@dataclass(frozen=True)
class SshRequest:
    """Ranks on `hosts`, each a name that ssh knows with a number of ranks. Other fields are as in SlurmRequest."""

    hosts: tuple[tuple[str, int], ...]
    cpu: bool = False
    python: str = ""
    container: str = ""
    spares: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple((check_host(name), count) for name, count in self.hosts))


@dataclass(frozen=True)
class MpiRequest:
    """Ranks on `hosts`, where mpirun starts the agents. options: of mpirun. Other fields are as in SshRequest."""

    hosts: tuple[tuple[str, int], ...]
    cpu: bool = False
    options: tuple[str, ...] = ()
    python: str = ""
    container: str = ""
    spares: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple((check_host(name), count) for name, count in self.hosts))
        object.__setattr__(self, "options", tuple(self.options))


@dataclass(frozen=True)
class AllocationRequest:
    """Ranks on the nodes of the running Slurm job. counts: on each node. Other fields are as in SlurmRequest."""

    job: str
    counts: tuple[int, ...]
    cpu: bool = False
    python: str = ""
    container: str = ""
    spares: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", tuple(self.counts))


@dataclass(frozen=True)
class PluginRequest:
    """`n` ranks, started by the launcher `name` of another package.

    options: words for that launcher. Other fields are as in SlurmRequest.
    """

    name: str
    n: int
    nodes: int | None = None
    cpu: bool = False
    options: tuple[str, ...] = ()
    python: str = ""
    container: str = ""
    spares: int = 0

    def __post_init__(self) -> None:
        if self.n < 1 or (self.nodes is not None and not 1 <= self.nodes <= self.n):
            raise UsageError(
                "A cluster has at least one rank on each node.",
                numbers=f"-n {self.n}, --nodes {self.nodes}",
                hint="-n 4 --nodes 2",
            )
        object.__setattr__(self, "options", tuple(self.options))


Request = SlurmRequest | SshRequest | MpiRequest | AllocationRequest | PluginRequest
_KINDS: dict[str, Callable[..., Request]] = {
    "slurm": SlurmRequest,
    "ssh": SshRequest,
    "mpi": MpiRequest,
    "step": AllocationRequest,
    "plugin": PluginRequest,
}
AGENT = "nbkit.notebook.cluster.hosts.agent"


class Starter(Protocol):
    """Starts agents on the hosts. cpu: use no GPU. address: of this machine, which the hosts can reach.

    counts: ranks of each host, in the order of hosts.
    """

    counts: tuple[int, ...]
    cpu: bool
    address: str

    def start(self, payload: str) -> None:
        """Start an agent on each host, and pass it `payload`. Raises ClusterError."""

    def look(self) -> LauncherView:
        """Return how far it is. Called at intervals."""

    def log(self) -> str:
        """Return the end of what the agents have printed, if it can be read here."""

    def end(self) -> None:
        """End what was started. Does nothing if it has ended."""


def agent_command(request: Request) -> list[str]:
    """Return the command that starts the agent on a host: the container's words, then Python."""
    # No shell has replaced a ~, and the one of the host, if there is one, gets each word in quotes.
    container = map(str, map(user_path, shlex.split(request.container)))
    return [*container, str(user_path(request.python)) if request.python else sys.executable, *OWN_MODULES, AGENT]


def saved(request: Request) -> dict[str, Any]:
    """Return the request in a form that JSON accepts."""
    kind = next(name for name, kind in _KINDS.items() if kind is type(request))
    plain: dict[str, Any] = json.loads(json.dumps(asdict(request)))  # lists for tuples, as they come back
    return {"launcher": kind, **plain}


def loaded(options: Any) -> Request:
    """Return the request that `saved` wrote. Fields of another release that this one does not know are ignored."""
    kind: Any = _KINDS[options["launcher"]]
    known = {field.name for field in fields(kind)}
    return cast(Request, kind(**{name: value for name, value in options.items() if name in known}))


def last_lines(path: Path) -> str:
    """Return the end of a log file; nothing if the file does not exist, or is not on this host."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(lines[-_LOG_LINES:])


def with_spares(request: Request, spares: int) -> Request:
    """Return the request with this many devices in reserve on each host. Raises UsageError for a negative number."""
    if spares < 0:
        raise UsageError("So many spares cannot be.", numbers=f"--spares {spares}", hint="--spares 1")
    return replace(request, spares=spares)
