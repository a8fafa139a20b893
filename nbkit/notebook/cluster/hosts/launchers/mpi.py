"""Ranks on hosts where `mpirun` starts the agents: those of --hosts, those of a batch system's job, or this machine.

mpirun only starts processes here. Agents and ranks never call MPI_Init, so that the end of one is the end of that one
alone; the shell around each agent reports success, or mpirun would end them all.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster.hosts.launchers.agents_command import AgentsCommand
from nbkit.notebook.cluster.hosts.launchers.ssh import hostname_of
from nbkit.notebook.cluster.hosts.network import address_towards
from nbkit.notebook.cluster.hosts.progress import Seen
from nbkit.notebook.cluster.hosts.start_request import MpiRequest, agent_command

# Files of PBS and LSF: the host of each slot, a line each.
_NODE_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")
# Options of all agents, and of each: Open MPI hands on the variables that each part of the line names.
_OPEN_MPI = ("--bind-to", "none"), ("-x", "NBKIT_AGENT")
_HYDRA = ("-bind-to", "none", "-genvall"), ()  # MPICH's mpirun and Intel's


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
        agent = ("sh", "-c", f"{shlex.join(agent_command(self.request))}; true")
        said = subprocess.run([self.program, "--version"], capture_output=True, text=True, check=False).stdout
        of_all, of_each = _OPEN_MPI if "Open MPI" in said or "PRRTE" in said else _HYDRA
        words: list[str] = [self.program, *of_all, *self.request.options]
        # A part for each host, so that the agent of number i is on host i.
        for index, (name, _) in enumerate(self.request.hosts):
            here = () if self.request.hosts == (("localhost", self.counts[0]),) else ("-host", name)
            words += [*([":"] if index else []), "-n", "1", *of_each, *here, "-wdir", "/", *agent]
        self.run(words, payload)

    def look(self) -> Seen:
        """Whether mpirun runs; with what it has said when it ended at once."""
        if not self.has_ended():
            return Seen("running", f"mpirun starts agents on {len(self.counts)} host{'s' * (len(self.counts) > 1)}")
        error = ClusterError(
            "mpirun has ended before the cluster was ready.",
            numbers=f"the last lines of what it said:\n    {self.log().replace(chr(10), chr(10) + '    ')}",
            hint=f"{self.program} hostname   (in a terminal);   what follows   --   goes to mpirun as it is",
        )
        return Seen("over", "mpirun has ended", error=error)
