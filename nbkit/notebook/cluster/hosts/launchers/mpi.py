"""Ranks on hosts where `mpirun` starts the agents: those of --hosts, those of a batch system's job, or this machine.

mpirun only starts processes here. Agents and ranks never call MPI_Init, so that the end of one is the end of that one
alone; the shell around each agent reports success, or mpirun would end them all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster.hosts.launchers.agents_command import AgentsCommand
from nbkit.notebook.cluster.hosts.launchers.ssh import hostname_of
from nbkit.notebook.cluster.hosts.network import address_towards
from nbkit.notebook.cluster.hosts.progress import LauncherView
from nbkit.notebook.cluster.hosts.start_request import MpiRequest, agent_command
from nbkit.quoting import shell_words

# Files of PBS and LSF: the host of each slot, a line each.
_NODE_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")
# How Open MPI's calls itself: 4 under another name than mpirun (Debian's mpirun.openmpi), 5.
_NAMES_OF_OPEN_MPI = ("Open MPI", "OpenRTE", "PRRTE")


def _open_mpi(names: Sequence[str], agent: Sequence[str]) -> list[str]:
    """Return the arguments of Open MPI's mpirun: a part for each host, so that the agent of number i is on host i.

    names: of the hosts, none for this machine. Each part names the variables that it hands on.
    """
    words = ["--bind-to", "none"]
    for index, on in enumerate([("-host", name) for name in names] or [()]):
        words += [*([":"] if index else []), "-n", "1", "-x", "NBKIT_AGENT", *on, "-wdir", "/", *agent]
    return words


def _hydra(names: Sequence[str], address: str, agent: Sequence[str]) -> list[str]:
    """As of `_open_mpi`, for MPICH's mpirun and Intel's, which number one agent on each host in their order.

    address: of this machine, as the hosts reach it; mpirun itself would tell them its name.
    """
    on = ("-localhost", address, "-hosts", ",".join(names), "-ppn", "1") if names else ()
    return ["-bind-to", "none", "-genvall", *on, "-wdir", "/", "-n", str(len(names) or 1), *agent]


def nodes_of_job(environment: Mapping[str, str] = os.environ) -> tuple[tuple[str, int], ...]:
    """The hosts of the batch job that this process runs in, with their slots; () outside of one."""
    for variable in _NODE_FILES:
        path = Path(environment.get(variable, ""))
        if path.is_file():
            return tuple(Counter(path.read_text().split()).items())
    return ()


class MpiHosts(AgentsCommand):
    """The agents of one cluster. A starter, see `request.Starter`."""

    def __init__(self, request: MpiRequest, folder: Path) -> None:
        program = shutil.which("mpirun") or shutil.which("mpiexec")
        if not program:
            raise UsageError(
                "There is no mpirun on this machine.",
                numbers="neither mpirun nor mpiexec is in PATH",
                hint="module load openmpi   (before the notebook starts)   or   %cluster start --hosts node1:4",
            )
        super().__init__(folder, "mpi.log")
        self.request, self.program, self.cpu = request, program, request.cpu
        self.counts = tuple(count for _, count in request.hosts)
        self.address = address_towards([hostname_of(name) for name, _ in request.hosts])  # mpirun goes by ssh

    def start(self, payload: str) -> None:
        """Start the agents, one on each host."""
        agent = ("sh", "-c", f"{shell_words(*agent_command(self.request))}; true")
        said = subprocess.run([self.program, "--version"], capture_output=True, text=True, check=False).stdout
        of_open_mpi = any(name in said for name in _NAMES_OF_OPEN_MPI)
        here = self.request.hosts == (("localhost", self.counts[0]),)
        names = [] if here else [name for name, _ in self.request.hosts]
        words = _open_mpi(names, agent) if of_open_mpi else _hydra(names, self.address, agent)
        words[0:0] = [self.program, *self.request.options]
        self.run(words, payload)

    def look(self) -> LauncherView:
        """Whether mpirun runs; with what it has said when it ended at once."""
        if not self.has_ended():
            return LauncherView(
                "running", f"mpirun starts agents on {len(self.counts)} host{'s' * (len(self.counts) > 1)}"
            )
        error = ClusterError(
            "mpirun has ended before the cluster was ready.",
            numbers=f"the last lines of what it said:\n    {self.log().replace(chr(10), chr(10) + '    ')}",
            hint=f"{self.program} hostname   (in a terminal);   what follows   --   goes to mpirun as it is",
        )
        return LauncherView("over", "mpirun has ended", error=error)
