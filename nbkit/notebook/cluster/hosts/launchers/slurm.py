"""Ranks in a job of Slurm's: how many nodes they take, the job's script, where the job stands.

One task runs on each node, the agent; srun starts it. A rank or an agent that ends does not end the job.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nbkit.errors import ClusterError, UsageError
from nbkit.mpi_variables import without_mpi
from nbkit.notebook.cluster.hosts.launchers.slurm_job_state import JobState, answer, read_job
from nbkit.notebook.cluster.hosts.network import address_towards
from nbkit.notebook.cluster.hosts.progress import Seen
from nbkit.notebook.cluster.hosts.start_request import SlurmRequest, agent_command, last_lines
from nbkit.quoting import shell_words, slurm_file


@dataclass(frozen=True)
class Node:
    """A node of a partition. address: as Slurm's own daemons reach it."""

    name: str
    partition: str
    is_default: bool
    cpus: int
    gpus: int
    address: str


@dataclass(frozen=True)
class Size:
    """nodes, with so many ranks on each, or in reserve for them. cpus, gpus: of each node, for ranks and spares."""

    nodes: int
    ranks: int
    cpus: int
    gpus: int


def read_nodes() -> list[Node]:
    """What `sinfo` says. Raises UsageError without Slurm, ClusterError when it does not answer."""
    if not shutil.which("sbatch"):
        raise UsageError(
            "There is no sbatch on this machine.",
            numbers="none of Slurm's commands is in PATH",
            hint="%cluster start --slurm   on a login node;   %cluster start -n 2   here",
        )
    lines = answer("sinfo", "-h", "-N", "-o", "%N|%P|%c|%G|%o").splitlines()
    return [_node(line.strip()) for line in lines if line.strip()]


def _node(line: str) -> Node:
    name, partition, cpus, gres, address = line.split("|")
    return Node(name, partition.rstrip("*"), partition.endswith("*"), int(cpus.rstrip("+")), _gpus(gres), address)


def _gpus(gres: str) -> int:
    """The number of GPUs in "gpu:a100:4(S:0-1),shard:8"."""
    total = 0
    for one in gres.split(","):
        kind, *rest = one.split("(")[0].split(":")
        if kind == "gpu" and rest:
            total += int(rest[-1]) if rest[-1].isdigit() else 1
    return total


def size_of(request: SlurmRequest, nodes: Sequence[Node]) -> tuple[Size, list[Node]]:
    """How many nodes of which size the request takes, and the nodes that there are.

    Raises UsageError, with what would fit, for a partition that does not exist and for more than it has.
    """
    default = {node.partition for node in nodes if node.is_default}
    named = request.partition or next(iter(default), "")
    there = [node for node in nodes if node.partition == named]
    if not there:
        known = sorted({node.partition for node in nodes}, key=lambda name: (name not in default, name))
        raise UsageError(
            f"Slurm has no partition called {named!r}." if named else "Slurm has no default partition.",
            numbers=f"partitions: {', '.join(known) or 'none'}",
            hint=f"--partition {known[0]}" if known else "sinfo   (in a terminal)",
        )
    unit = "CPU" if request.cpu or not any(node.gpus for node in there) else "GPU"
    sizes = sorted((_room(node, unit) - request.spares for node in there), reverse=True)
    sizes = sizes[request.spare_hosts :]  # what is left for ranks, on the smallest node too
    if not sizes:
        raise UsageError(
            "Too few nodes for the ranks and their spare hosts.",
            numbers=f"--spare-hosts {request.spare_hosts}; {named} has {_nodes(len(there))}",
            hint=f"--spare-hosts {len(there) - 1}" if len(there) > 1 else "without --spare-hosts",
        )
    count = request.nodes if request.nodes is not None else _fewest(request.n, sizes)
    if count is None or count > len(sizes) or request.n > count * sizes[count - 1] or request.n % count:
        raise _too_large(request, named, unit, sizes, count)
    if request.spare_hosts and count < 2:
        raise UsageError(
            "A spare host takes the place of any node with ranks but the first, and they are all on the first.",
            numbers=f"-n {request.n} on {_nodes(count)}, --spare-hosts {request.spare_hosts}",
            hint=f"-n {request.n + request.n % 2} --nodes 2 --spare-hosts {request.spare_hosts}",
        )
    ranks = request.n // count
    devices = ranks + request.spares
    able = [node for node in there if _room(node, unit) >= devices]
    share = min(node.cpus // node.gpus for node in able) if unit == "GPU" else 1
    return Size(count + request.spare_hosts, ranks, devices * max(1, share), devices if unit == "GPU" else 0), able


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"


def _room(node: Node, unit: str) -> int:
    return node.cpus if unit == "CPU" else node.gpus


def _fewest(n: int, sizes: Sequence[int]) -> int | None:
    """The smallest number of nodes that hold `n` ranks, the same on each."""
    return next((k for k in range(1, len(sizes) + 1) if n % k == 0 and n // k <= sizes[k - 1]), None)


def _too_large(request: SlurmRequest, named: str, unit: str, sizes: Sequence[int], count: int | None) -> UsageError:
    """sizes: of the nodes, less the spares."""
    spares = request.spares
    if sizes[0] < 1:
        return UsageError(
            "Too few devices for the ranks and their spares.",
            numbers=f"--spares {spares} on each node; the nodes of {named} have at most {sizes[0] + spares} {unit}s",
            hint=f"--spares {sizes[0] + spares - 1}" if sizes[0] + spares > 1 else "without --spares",
        )
    if count is not None and count <= len(sizes) and request.n % count:
        what = f"{request.n} ranks cannot be spread evenly over {count} nodes."
    elif count is None or count > len(sizes):
        what = f"The partition {named} is too small for {request.n} ranks."
    else:
        what = f"The nodes of the partition {named} have fewer than {request.n // count} {unit}s."
    most = max(k * sizes[k - 1] for k in range(1, len(sizes) + 1))
    fits = [k for k in range(1, len(sizes) + 1) if request.n % k == 0 and request.n // k <= sizes[k - 1]]
    on = "" if request.nodes is None else f" on {request.nodes} node{'s' * (request.nodes > 1)}"
    reserve = request.spare_hosts
    kept = f" --spares {spares}" * (spares > 0) + f" --spare-hosts {reserve}" * (reserve > 0)
    ways = [f"-n {request.n} --nodes {fits[0]}{kept}"] if fits else []
    ways += [f"-n {most} --nodes {next(k for k in range(1, len(sizes) + 1) if k * sizes[k - 1] == most)}{kept}"]
    return UsageError(
        what,
        numbers=f"-n {request.n}{on}; {named} has {_nodes(len(sizes) + reserve)} of {sizes[-1] + spares}"
        + (f" to {sizes[0] + spares}" if sizes[0] > sizes[-1] else "")
        + f" {unit}s"
        + (f", {spares} of each spare" if spares else "")
        + (f", {_nodes(reserve)} in reserve" if reserve else ""),
        hint="   or   ".join(dict.fromkeys(ways)),
    )


class SlurmJob:
    """The job of one cluster. A starter, see `request.Starter`."""

    def __init__(self, request: SlurmRequest, folder: Path) -> None:
        self.request, self.folder, self.cpu, self.job = request, folder, request.cpu, ""
        self.size, nodes = size_of(request, read_nodes())
        self.counts = (self.size.ranks,) * self.size.nodes
        self.spare_hosts = request.spare_hosts
        self.address = address_towards([node.address for node in nodes][: self.size.nodes])
        self._last = Seen("pending", "the job is being submitted")
        self._restarts: int | None = None  # of the job as it ran first

    def start(self, payload: str) -> None:
        """Submit the job. Raises ClusterError with sbatch's own words when it refuses."""
        done = subprocess.run(
            ["sbatch", "--parsable", *self._words(), *self.request.options],
            input=self._script(),
            env={**without_mpi(os.environ), "NBKIT_AGENT": payload},  # arguments would be there for everybody to read
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ClusterError(
                "Slurm has refused the job.",
                numbers=" ".join(done.stderr.split()),
                hint="what follows   --   goes to sbatch as it is; sinfo   (in a terminal) says what there is",
            )
        self.job = done.stdout.strip().partition(";")[0]

    def _words(self) -> list[str]:
        asked = {
            "job-name": f"nbkit-{self.folder.name}",
            "nodes": self.size.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": self.size.cpus,
            "gpus-per-node": self.size.gpus,
            "partition": self.request.partition,
            "time": self.request.time,
            "output": slurm_file(self.folder / "logs" / "job.log"),
            "export": "ALL",
        }
        kept = ["--no-kill"] if self.request.spare_hosts else []  # the job goes on when a node is gone
        return [*(f"--{option}={value}" for option, value in asked.items() if value), *kept]

    def _script(self) -> str:
        # srun of some releases does not take over --cpus-per-task of the job.
        return (
            "#!/bin/sh\n"
            'exec srun --kill-on-bad-exit=0 --wait=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" '
            f"{'--no-kill ' * (self.request.spare_hosts > 0)}{shell_words(*agent_command(self.request))}\n"
        )

    def look(self) -> Seen:
        """Where the job stands."""
        if self._last.state != "over" and (state := self._read()) is not None:
            self._last = state.seen(self.request.save_before)
            if self._restarts is None and self._last.state == "running":
                self._restarts = state.restarts
            elif self._restarts is not None and state.restarts > self._restarts:
                # What would run again are ranks without the cells that this cluster has run.
                self.end()
                self._last = Seen("over", f"job {self.job} was put back in the queue", again=True)
        return self._last

    def _read(self) -> JobState | None:
        """None while Slurm itself is away; the coordinator's log has what it says then."""
        for pause in (0.2, 0.0):  # busy for a moment, it refuses a connection at once
            try:
                return read_job(self.job)
            except ClusterError as error:
                print(f"{time.strftime('%H:%M:%S')} coordinator: {error.what} {error.numbers}", flush=True)
                time.sleep(pause)
        return None

    def log(self) -> str:
        """The last lines of the job's output, where the nodes' file system is this one."""
        path = self.folder / "logs" / "job.log"
        return last_lines(path)

    def end(self) -> None:
        """Cancel the job."""
        if self.job and self._last.state != "over":
            with suppress(ClusterError):
                answer("scancel", self.job)
