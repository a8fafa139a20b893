"""What a user asks for when ranks shall run on other hosts; plain values, which the cluster's options keep."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from nbkit.errors import UsageError
from nbkit.notebook.cluster.hosts.progress import Seen


@dataclass(frozen=True)
class SlurmRequest:
    """`n` ranks in a job of Slurm's. nodes: None takes as few as hold them. "" and () leave it to Slurm.

    cpu: CPU ranks, also where nodes have GPUs. options: of sbatch, as they are. python: "" for the notebook's own.
    """

    n: int
    nodes: int | None = None
    partition: str = ""
    time: str = ""
    cpu: bool = False
    options: tuple[str, ...] = ()
    python: str = ""

    def __post_init__(self) -> None:
        if self.n < 1 or (self.nodes is not None and self.nodes < 1):
            raise UsageError(
                "A cluster has at least one rank, on at least one node.",
                numbers=f"-n {self.n}, --nodes {self.nodes}",
                hint="-n 4 --nodes 2",
            )
        object.__setattr__(self, "options", tuple(self.options))


Request = SlurmRequest
_KINDS: dict[str, type[Request]] = {"slurm": SlurmRequest}


def requested(options: Any) -> Request | None:
    """What the options of `%cluster start` ask for; None for a cluster on this machine. Raises UsageError."""
    asked = {
        "--nodes": options.nodes,
        "--partition": options.partition,
        "--time": options.time,
        "--python": options.python,
        "what follows --": options.rest,
    }
    if not options.slurm:
        if idle := next((name for name, value in asked.items() if value), None):
            raise UsageError(
                f"{idle} is for --slurm.", numbers=f"{idle} without it", hint="%cluster start --slurm -n 4"
            )
        return None
    if options.gpus:
        raise UsageError(
            "Slurm chooses the GPUs itself.",
            numbers=f"--gpus {options.gpus}",
            hint="-n 4   (one GPU each)   or   --cpu",
        )
    if options.n is None:
        raise UsageError("How many ranks shall Slurm start?", numbers="no -n", hint="%cluster start --slurm -n 4")
    return SlurmRequest(
        options.n, options.nodes, options.partition, options.time, options.cpu, options.rest, options.python
    )


class Starter(Protocol):
    """Brings agents up on the hosts. counts: ranks of each host, in the order of hosts. cpu: no GPU, whatever there is.

    address: of this machine, which the hosts can reach.
    """

    counts: tuple[int, ...]
    cpu: bool
    address: str

    def start(self, payload: str) -> None:
        """Start an agent on each host, with what it has to know; raises ClusterError."""

    def look(self) -> Seen:
        """How far it is. Called every now and then."""

    def log(self) -> str:
        """The end of what the agents have printed, where it can be read here."""

    def end(self) -> None:
        """End what was started; harmless when it has ended."""


def saved(request: Request) -> dict[str, Any]:
    """As JSON takes it."""
    kind = next(name for name, kind in _KINDS.items() if kind is type(request))
    return {"launcher": kind, **asdict(request), "options": list(request.options)}


def loaded(options: Any) -> Request:
    """The request that `saved` wrote."""
    fields = {name: value for name, value in options.items() if name != "launcher"}
    return _KINDS[options["launcher"]](**fields)
