"""Ranks on hosts where `mpirun` starts the agents: the hosts of --hosts, of a batch system's job, or this machine.

mpirun only starts processes here. Agents and ranks never call MPI_Init, so the end of one does not end the others. A
shell around each agent always reports success, because mpirun ends all agents if one fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster.hosts.launcher import Launcher
from nbkit.notebook.cluster.hosts.launchers.ssh import HostsRequest, hostname_of, read_hosts
from nbkit.notebook.cluster.hosts.network import address_towards
from nbkit.quoting import shell_words

# Files of PBS and LSF, with a line for each slot that names its host.
_NODE_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")
# Names in the version text of Open MPI 4 (also in Debian's mpirun.openmpi) and 5.
_NAMES_OF_OPEN_MPI = ("Open MPI", "OpenRTE", "PRRTE")


@dataclass(frozen=True)
class MpiRequest(HostsRequest):
    """Ranks on `hosts`, where mpirun starts the agents. options: of mpirun."""

    kind: ClassVar[str] = "mpi"


class MpiLauncher(Launcher):
    """Starts the agents with mpirun, one on each host."""

    name, flag, own_options, request_type = "mpi", "--mpi", ("hosts", "rest"), MpiRequest
    request: MpiRequest

    def __init__(self, request: MpiRequest, folder: Path) -> None:
        program = shutil.which("mpirun") or shutil.which("mpiexec")
        if not program:
            raise UsageError(
                "There is no mpirun on this machine.",
                numbers="neither mpirun nor mpiexec is in PATH",
                hint="module load openmpi   (before the notebook starts)   or   %cluster start --hosts node1:4",
            )
        super().__init__(request, folder)
        self.program = program

    @classmethod
    def request_of(cls, options: Any) -> MpiRequest:
        """Return the request for the hosts of --hosts, of the surrounding batch job, or for this machine."""
        hosts = read_hosts(options.hosts) if options.hosts else nodes_of_job()
        total = sum(count for _, count in hosts)
        if not hosts and options.n is None:
            raise UsageError("How many ranks shall mpirun start?", numbers="no -n", hint="%cluster start --mpi -n 4")
        if hosts and options.n not in (None, total):
            if options.hosts or options.n % len(hosts):
                raise UsageError(
                    "The hosts say how many ranks there are.",
                    numbers=f"-n {options.n}; {', '.join(f'{name}:{count}' for name, count in hosts)}",
                    hint="without -n",
                )
            hosts = tuple((name, options.n // len(hosts)) for name, _ in hosts)
        return MpiRequest(hosts or (("localhost", options.n),))

    def address(self) -> str:
        return address_towards([hostname_of(name) for name, _ in self.request.hosts])  # mpirun uses ssh

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        agent = ("sh", "-c", f"{shell_words(*command)}; true")
        said = subprocess.run([self.program, "--version"], capture_output=True, text=True, check=False).stdout
        of_open_mpi = any(name in said for name in _NAMES_OF_OPEN_MPI)
        here = self.request.hosts == (("localhost", self.n),)
        names = [] if here else [name for name, _ in self.request.hosts]
        words = _open_mpi(names, agent) if of_open_mpi else _hydra(names, self.address(), agent)
        self.run([self.program, *self.options, *words], environment)

    def explain(self, index: int) -> ClusterError:
        """Return the error with mpirun's last output."""
        return ClusterError(
            "mpirun has ended before the cluster was ready.",
            numbers=f"the last lines of what it said:\n    {self.log().replace(chr(10), chr(10) + '    ')}",
            hint=f"{self.program} hostname   (in a terminal);   what follows   --   is passed to mpirun unchanged",
        )


def nodes_of_job(environment: Mapping[str, str] = os.environ) -> tuple[tuple[str, int], ...]:
    """Return the hosts of the batch job that this process runs in, with their slots; () outside of a job."""
    for variable in _NODE_FILES:
        path = Path(environment.get(variable, ""))
        if path.is_file():
            return tuple(Counter(path.read_text().split()).items())
    return ()


def _open_mpi(names: Sequence[str], agent: Sequence[str]) -> list[str]:
    """Return the arguments of Open MPI's mpirun. Each host has its own part, so that agent i runs on host i.

    names: the hosts, empty for this machine. Each part names the variables that it passes on.
    """
    words = ["--bind-to", "none"]
    for index, on in enumerate([("-host", name) for name in names] or [()]):
        words += [*([":"] if index else []), "-n", "1", "-x", "NBKIT_AGENT", *on, "-wdir", "/", *agent]
    return words


def _hydra(names: Sequence[str], address: str, agent: Sequence[str]) -> list[str]:
    """Return the arguments, like `_open_mpi`, for the mpirun of MPICH and Intel.

    It starts one agent on each host, numbered in the order of the hosts.

    address: the address of this machine for the hosts. Without it, mpirun gives them the machine's name.
    """
    on = ("-localhost", address, "-hosts", ",".join(names), "-ppn", "1") if names else ()
    return ["-bind-to", "none", "-genvall", *on, "-wdir", "/", "-n", str(len(names) or 1), *agent]
