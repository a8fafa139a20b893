"""Launchers from other packages: one class, found by its entry point in the group `nbkit.launchers`.

    [project.entry-points."nbkit.launchers"]
    mine = "my_package.launcher:MyLauncher"

`%cluster start --launcher mine -n 8 --nodes 2 -- WORDS` then starts the ranks with it. `Launcher` describes the methods
of the class. nbkit's own launchers, for Slurm, SSH and MPI, have their own options and errors in addition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from nbkit.errors import ClusterError, NbkitError, UsageError
from nbkit.notebook.cluster.hosts.network import address_towards
from nbkit.notebook.cluster.hosts.progress import LauncherView
from nbkit.notebook.cluster.hosts.start_request import PluginRequest, agent_command, last_lines

GROUP = "nbkit.launchers"


class Launcher:
    """Starts one command, the agent, on each host of a cluster. The agent then starts the ranks of its host.

    A launcher class must have `start`, `poll` and `stop`; the rest has defaults. All methods are called in one process,
    from one thread, and must return soon.

    n: ranks. nodes: hosts, None if the user did not say. options: the words behind `--`. folder: the cluster's folder,
    for scripts and logs; only its user can read it.
    """

    def __init__(self, n: int, *, nodes: int | None, options: Sequence[str], folder: Path) -> None:
        self.n, self.nodes, self.options, self.folder = n, nodes or 1, tuple(options), folder

    @property
    def ranks_of_hosts(self) -> tuple[int, ...]:
        """Return the number of ranks on each host, in order.

        By default they are divided evenly; the first hosts have one more.
        """
        each, more = divmod(self.n, self.nodes)
        return tuple(each + (host < more) for host in range(self.nodes))

    def address(self) -> str:
        """Return the address of this machine that the hosts can connect to.

        The default reaches only this machine itself.
        """
        return address_towards(["localhost"])

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `command` once on each host, with `environment` in addition to the host's own.

        If there are several hosts, the variable NBKIT_HOST_INDEX must be i on host number i (from 0). The environment
        holds a secret: it must not be on a command line, where other users see it. Raises ClusterError.
        """
        raise NotImplementedError

    def poll(self) -> str | None:
        """Return how it has ended, in a few words; None while it waits or runs."""
        raise NotImplementedError

    def stop(self) -> None:
        """End what was started. Does nothing if it has ended or was never started."""
        raise NotImplementedError

    def log(self) -> str:
        """Return the end of what the agents have printed; default: logs/launcher.log in the cluster's folder."""
        return last_lines(self.folder / "logs" / "launcher.log")


def launcher_names() -> list[str]:
    """Return the names that are installed."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


class PluginHosts:
    """The agents of one cluster. A starter, see `start_request.Starter`."""

    def __init__(self, request: PluginRequest, folder: Path) -> None:
        found = [entry for entry in entry_points(group=GROUP) if entry.name == request.name]
        if not found:
            raise UsageError(
                f"There is no launcher {request.name!r}.",
                numbers=f"installed: {', '.join(launcher_names()) or 'none'}",
                hint="pip install PACKAGE   (the one that brings it)",
            )
        self.request, self.cpu, self._has_answered = request, request.cpu, False
        self._launcher: Launcher = self._call(
            lambda: found[0].load()(request.n, nodes=request.nodes, options=request.options, folder=folder)
        )
        self.counts = tuple(self._call(lambda: self._launcher.ranks_of_hosts))
        if sum(self.counts) != request.n or min(self.counts) < 1:
            raise UsageError(
                f"The launcher {request.name!r} does not divide the ranks over hosts.",
                numbers=f"-n {request.n}, ranks of the hosts: {', '.join(map(str, self.counts))}",
                hint=f"--nodes {min(request.n, len(self.counts))} or fewer",
            )
        self.address = str(self._call(self._launcher.address))

    def start(self, payload: str) -> None:
        """Let the launcher start the agents."""
        environment = {"NBKIT_AGENT": payload}
        self._call(lambda: self._launcher.start(agent_command(self.request), environment))

    def look(self) -> LauncherView:
        """Ask the launcher whether it runs.

        Once it has answered, an error of `poll` does not end the cluster: a batch system may be away for a moment.
        """
        try:
            how = self._call(self._launcher.poll)
        except ClusterError as problem:
            if not self._has_answered:
                raise
            return LauncherView("running", f"{self.request.name} does not answer: {problem.numbers}")
        self._has_answered = True
        if how is None:
            hosts = len(self.counts)
            return LauncherView("running", f"{self.request.name} starts agents on {hosts} host{'s' * (hosts > 1)}")
        error = ClusterError(
            f"The launcher {self.request.name!r} has ended before the cluster was ready.",
            numbers=f"{how}\n    {self.log().replace(chr(10), chr(10) + '    ')}".rstrip(),
            hint="nbkit doctor   (in a terminal)",
        )
        return LauncherView("over", f"{self.request.name}: {how}", error=error)

    def log(self) -> str:
        """Return the last lines of the agents."""
        return str(self._call(self._launcher.log))

    def end(self) -> None:
        """End what was started. An error of the launcher goes to the log: the rest of the cluster has to end too."""
        try:
            self._call(self._launcher.stop)
        except ClusterError as error:
            print(f"{error.what} {error.numbers}", flush=True)

    def _call(self, call: Any) -> Any:
        """Call the launcher. Raises ClusterError for an error in its code, with the place."""
        try:
            return call()
        except NbkitError:
            raise
        except Exception as error:
            inner = error.__traceback__
            while inner is not None and inner.tb_next is not None:
                inner = inner.tb_next
            where = "" if inner is None else f"{Path(inner.tb_frame.f_code.co_filename).name}:{inner.tb_lineno}"
            raise ClusterError(
                f"The launcher {self.request.name!r} raised an error.",
                numbers=f"{type(error).__name__}: {error} ({where})",
            ) from error
