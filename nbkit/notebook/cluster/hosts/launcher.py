"""Launchers start one command, the agent, on each host of a cluster. The agent then starts the ranks of its host.

A launcher is one class that derives from `Launcher`:

- nbkit's own launchers are in the folder `launchers`. A new file there is found without any other change.
- A launcher of another package is found by its entry point in the group `nbkit.launchers`:

      [project.entry-points."nbkit.launchers"]
      mine = "my_package.launcher:MyLauncher"

`%cluster start --launcher NAME -n 8 --nodes 2 -- WORDS` starts the ranks with the launcher NAME. nbkit's own launchers
also have the options `--slurm`, `--mpi` and `--hosts`.

A `StartRequest` is the user's request. The cluster's entry keeps it, so that a restart requests the same.
`LauncherDriver` calls the launcher: in the notebook to check the request, and in the coordinator to start the agents.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import pkgutil
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from nbkit.errors import ClusterError, NbkitError, UsageError
from nbkit.notebook.cluster.hosts.network import address_towards
from nbkit.plugins import described, load
from nbkit.quoting import user_path
from nbkit.wire.user_code import OWN_MODULES

GROUP = "nbkit.launchers"
AGENT = "nbkit.notebook.cluster.hosts.agent"
_LOG_LINES = 15
_END_SECONDS = 10.0

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class StartRequest:
    """A request for ranks on other hosts. Each launcher has a class of requests with fields of its own.

    cpu: use CPU ranks, even if hosts have GPUs. options: words for the launcher, typed behind `--`. python: Python on
    the hosts; "" for the notebook's own. container: words before the agent's command that run it, and so the ranks, in
    a container: "apptainer exec --nv torch.sif", or options of srun ("--container-image=..." of pyxis). spares: number
    of spare devices on each host.
    """

    kind: ClassVar[str] = ""

    cpu: bool = False
    options: tuple[str, ...] = ()
    python: str = ""
    container: str = ""
    spares: int = 0

    def __post_init__(self) -> None:
        if self.spares < 0:
            raise UsageError(
                "This number of spares is not possible.", numbers=f"--spares {self.spares}", hint="--spares 1"
            )
        object.__setattr__(self, "options", tuple(self.options))

    @property
    def launcher(self) -> str:
        """Return the name of the launcher."""
        return self.kind

    @property
    def ranks_of_hosts(self) -> tuple[int, ...]:
        """Return the number of ranks on each host, in order."""
        raise NotImplementedError

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks_of_hosts)

    @property
    def num_hosts(self) -> int:
        return len(self.ranks_of_hosts)


class NodesRequest(StartRequest):
    """A request for `n` ranks on `nodes` hosts. nodes: None if the user did not say."""

    n: int
    nodes: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n < 1 or (self.nodes is not None and not 1 <= self.nodes <= self.n):
            raise UsageError(
                "A cluster has at least one rank on each node.",
                numbers=f"-n {self.n}, --nodes {self.nodes}",
                hint="-n 4 --nodes 2",
            )

    @property
    def ranks_of_hosts(self) -> tuple[int, ...]:
        """Return the ranks divided evenly; the first hosts may have one more. Without `nodes`, there is one host."""
        hosts = self.nodes or 1
        each, more = divmod(self.n, hosts)
        return tuple(each + (host < more) for host in range(hosts))


@dataclass(frozen=True)
class LauncherRequest(NodesRequest):
    """A request for `n` ranks on `nodes` hosts of the launcher `name`."""

    name: str
    n: int
    nodes: int | None = None

    @property
    def launcher(self) -> str:
        return self.name


@dataclass(frozen=True)
class LauncherStatus:
    """The state of the processes or the job that a launcher has started.

    state: "pending": the job waits in a queue, without a time limit. "running": the job runs, so the agents must answer
    within 90 s. "ending": something ends the job. "over": the job has ended.

    words: a description for the user. If someone other than nbkit ends the job, the text says who. error: an error that
    ends the start of a cluster, but not a running cluster.

    save_at: the time (as in time.time()) at which a training must be saved, because the job will end soon; inf if no
    end is known. why: the reason for this end. again: True if a batch system ends the job without a user's request.
    nbkit may then request other hosts.
    """

    state: Literal["pending", "running", "ending", "over"]
    words: str
    save_at: float = float("inf")
    why: str = ""
    error: ClusterError | None = None
    again: bool = False


class Launcher:
    """Starts one command, the agent, on each host of a cluster. The agent then starts the ranks of its host.

    A subclass must define `start`. The other methods have defaults. If `start` does not use `run`, the class also needs
    `poll` and `stop`. One thread of the coordinator calls `start`, `poll` and `stop`. They must return soon.

    n: number of ranks. nodes: number of hosts. options: the words after `--`. request: all options of the user. folder:
    the cluster's folder, for scripts and logs. Only the user can read this folder.
    """

    name: ClassVar[str] = ""
    """The name of a launcher that is part of nbkit. The entry point names launchers of other packages."""
    flag: ClassVar[str] = ""
    """The option of `%cluster start` that chooses this launcher, in addition to `--launcher NAME`."""
    own_options: ClassVar[tuple[str, ...]] = ("nodes", "detach", "rest")
    """The options of `%cluster start` that only some launchers have. "rest": the words behind `--`."""
    request_type: ClassVar[type[StartRequest]] = LauncherRequest

    def __init__(self, request: Any, folder: Path) -> None:
        self.request, self.folder = request, folder
        self.n, self.nodes, self.options = request.num_ranks, request.num_hosts, request.options
        self.commands: list[subprocess.Popen[bytes]] = []

    @classmethod
    def request_of(cls, options: Any) -> StartRequest:
        """Return the request in the options of `%cluster start`. Raises UsageError if they do not fit together."""
        name = cls.name or options.launcher
        flag = cls.flag or f"--launcher {name}"
        if options.n is None:
            raise UsageError(f"How many ranks shall {name} start?", numbers="no -n", hint=f"%cluster start {flag} -n 4")
        return LauncherRequest(name, options.n, options.nodes)

    @property
    def ranks_of_hosts(self) -> tuple[int, ...]:
        """Return the number of ranks on each host, in order. The default divides them evenly."""
        return tuple(self.request.ranks_of_hosts)

    def address(self) -> str:
        """Return the address of this machine to which the hosts can connect.

        The default works only for this machine itself.
        """
        return address_towards(["localhost"])

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `command` once on each host, with `environment` in addition to the host's own.

        If there are several hosts, the variable NBKIT_HOST_INDEX must be i on host number i (from 0). The environment
        holds a secret: it must not be on a command line, where other users see it. The agent also takes the value of
        NBKIT_AGENT as the first line of its standard input. Raises ClusterError.
        """
        raise NotImplementedError

    def run(
        self, words: Sequence[str], environment: Mapping[str, str], *, text: str = "", log: str = "launcher.log"
    ) -> None:
        """Start a command on this machine that runs as long as the agents. `poll` and `stop` handle it.

        environment: added to the environment of this process. text: its standard input. log: its output is appended to
        this file in the cluster's folder `logs`. Raises ClusterError if there is no such command.
        """
        if shutil.which(words[0]) is None:
            raise ClusterError(
                f"There is no command {words[0]!r} on this machine.",
                numbers=f"the launcher {self.request.launcher!r} would start it",
                hint=f"which {words[0]}   (in a terminal)",
            )
        with open(self.folder / "logs" / log, "ab") as output, tempfile.TemporaryFile() as given:
            given.write(text.encode())
            given.seek(0)
            started = subprocess.Popen(
                words, env={**os.environ, **environment}, stdin=given, stdout=output, stderr=subprocess.STDOUT
            )
        self.commands.append(started)

    def poll(self) -> LauncherStatus | str | None:
        """Return None while the job runs, words about how it has ended, or a LauncherStatus.

        After the first answer, an exception does not end a cluster, because a batch system may be unavailable for a
        moment. For a first answer, raise ClusterError in this case.
        """
        ended = [index for index, command in enumerate(self.commands) if command.poll() is not None]
        if not ended:
            return None
        error = self.explain(ended[0])
        if len(ended) < len(self.commands):
            return LauncherStatus("running", f"{len(ended)} of {len(self.commands)} agents have ended", error=error)
        return LauncherStatus("over", "the agents of all hosts have ended", error=error)

    def explain(self, index: int) -> ClusterError:
        """Return the error for command number `index` of `run`, which has ended before the cluster was ready."""
        command = self.commands[index]
        words, agent = [str(word) for word in command.args], agent_command(self.request)  # type: ignore[union-attr]
        how = f"{Path(words[0]).name} has ended with code {command.returncode}"
        hint = ""
        if command.returncode == 0 and words[-len(agent) :] == agent:
            hint = "a command of run must stay as long as its agent; otherwise write poll and stop"
        elif words[-len(agent) :] == agent and words != agent:
            hint = f"{shlex.join([*words[: -len(agent)], 'hostname'])}   (in a terminal)"
        return _ended_early(self.request.launcher, how, self.log(), hint)

    def stop(self) -> None:
        """End the started processes or jobs. Do nothing if they have ended or were never started."""
        for command in self.commands:
            command.terminate()
        for command in self.commands:
            try:
                command.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                command.kill()

    def log(self) -> str:
        """Return the last output of the agents; default: from logs/launcher.log in the cluster's folder."""
        return last_lines(self.folder / "logs" / "launcher.log")


@cache
def built_in() -> dict[str, type[Launcher]]:
    """Return nbkit's own launchers by name: the classes with a name in the files of the folder `launchers`."""
    from nbkit.notebook.cluster.hosts import launchers

    found: dict[str, type[Launcher]] = {}
    for each in pkgutil.iter_modules(launchers.__path__):
        module = importlib.import_module(f"{launchers.__name__}.{each.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Launcher) and value.name:
                found[value.name] = value
    return found


def launcher_class(name: str) -> type[Launcher]:
    """Return the launcher class with this name, from nbkit or an installed package. Raises UsageError without one."""
    if name in built_in():
        return built_in()[name]
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in installed:
        every = sorted({*built_in(), *installed})
        near = difflib.get_close_matches(name, every, 1)
        raise UsageError(
            f"There is no launcher {name!r}.",
            numbers=f"there are: {', '.join(every)}",
            hint=f"--launcher {near[0]}" if near else "pip install PACKAGE   (the one that brings it)",
        )
    entry = installed[name]
    found = load(entry, "launcher", ClusterError)
    if not (isinstance(found, type) and issubclass(found, Launcher)):
        raise UsageError(
            f"The launcher {name!r} is no class that derives from nbkit.Launcher.",
            numbers=f"{entry.value} is {found!r}",
            hint="class MyLauncher(nbkit.Launcher):",
        )
    if found.start is Launcher.start:
        raise UsageError(
            f"The launcher {name!r} has no method start.",
            numbers=entry.value,
            hint="def start(self, command, environment):",
        )
    return found


def launcher_request(name: str, n: int | None, nodes: int | None, **common: Any) -> LauncherRequest:
    """Return a request for `n` ranks of launcher `name`. Raises UsageError without `n`, or if it has an own request."""
    kind = launcher_class(name)
    if kind.request_type is not LauncherRequest:
        own = f"{kind.request_type.__module__}.{kind.request_type.__name__}"
        raise UsageError(f"{name} has a request of its own.", numbers=f"launcher={name!r}", hint=f"on={own}(...)")
    if n is None:
        raise UsageError(f"How many ranks shall {name} start?", numbers="no n", hint=f"n=4, launcher={name!r}")
    return LauncherRequest(name, n, nodes, **common)


class LauncherDriver:
    """Calls a request's launcher. counts: number of ranks on each host. address: of this machine, for the hosts."""

    def __init__(self, request: StartRequest, folder: Path) -> None:
        self.request, self._name, self._has_answered = request, request.launcher, False
        self._status = LauncherStatus("pending", "the agents are being started")
        kind = launcher_class(request.launcher)
        self._launcher = self._call(lambda: kind(request, folder))
        self.counts = tuple(self._call(lambda: self._launcher.ranks_of_hosts))
        if sum(self.counts) != request.num_ranks or min(self.counts) < 1:
            raise UsageError(
                f"The launcher {self._name!r} does not divide the ranks over hosts.",
                numbers=f"-n {request.num_ranks}, ranks of the hosts: {', '.join(map(str, self.counts))}",
                hint=f"--nodes {min(request.num_ranks, len(self.counts))} or fewer",
            )
        self.address = str(self._call(self._launcher.address))

    def start(self, payload: str) -> None:
        """Let the launcher start the agents. payload: their input. Raises ClusterError."""
        self._call(lambda: self._launcher.start(agent_command(self.request), {"NBKIT_AGENT": payload}))
        kind = type(self._launcher)
        if not self._launcher.commands and kind.poll is Launcher.poll:
            raise ClusterError(
                f"The launcher {self._name!r} cannot tell whether its agents run.",
                numbers="start has begun no command with self.run, and there is no poll",
                hint="self.run(command, environment) in start;   or methods poll and stop",
            )

    def status(self) -> LauncherStatus:
        """Return the launcher's status. If it does not answer, return its last status."""
        if self._status.state == "over":
            return self._status
        try:
            answer = self._launcher.poll()
        except Exception as error:
            if not self._has_answered and not isinstance(error, NbkitError):
                raise _explained(self._name, error) from error
            _print_problem(f"{self._name} does not answer: {error}")
            return self._status
        self._has_answered = True
        self._status = answer if isinstance(answer, LauncherStatus) else self._described(answer)
        return self._status

    def _described(self, how: str | None) -> LauncherStatus:
        if how is None:
            hosts = len(self.counts)
            return LauncherStatus("running", f"{self._name} starts agents on {hosts} host{'s' * (hosts > 1)}")
        return LauncherStatus("over", f"{self._name}: {how}", error=_ended_early(self._name, how, self.log()))

    def log(self) -> str:
        """Return the last output of the agents, if it can be read on this machine."""
        return str(self._call(self._launcher.log))

    def stop(self) -> None:
        """Let the launcher end its jobs. Its errors are only logged, because the rest of the cluster has to end too."""
        try:
            self._call(self._launcher.stop)
        except ClusterError as error:
            _print_problem(str(error))

    def _call(self, call: Callable[[], _T]) -> _T:
        return _called(self._name, call)


def agent_command(request: StartRequest) -> list[str]:
    """Return the command that starts the agent on a host: the container's words, then Python."""
    # Replace ~ here, because no shell does: a shell on the host would get each word in quotes.
    container = map(str, map(user_path, shlex.split(request.container)))
    return [*container, str(user_path(request.python)) if request.python else sys.executable, *OWN_MODULES, AGENT]


def saved(request: StartRequest) -> dict[str, Any]:
    """Return the request in a form that JSON accepts."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(request)))  # tuples become lists, as after reading
    return {"launcher": request.launcher, **plain}


def loaded(options: Any) -> StartRequest:
    """Return the request that `saved` wrote. Unknown fields, of another release, are ignored."""
    kind = launcher_class(options["launcher"]).request_type
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in options.items() if name in known})


def last_lines(path: Path) -> str:
    """Return the end of a log file, or "" if there is no such file on this host."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(lines[-_LOG_LINES:])


def _ended_early(name: str, how: str, log: str, hint: str = "") -> ClusterError:
    return ClusterError(
        f"The launcher {name!r} has ended before the cluster was ready.",
        numbers=f"{how}\n    {log.replace(chr(10), chr(10) + '    ')}".rstrip(),
        hint=hint or "nbkit doctor   (in a terminal)",
    )


def _called(name: str, call: Callable[[], _T]) -> _T:
    """Call code of the launcher `name`. An error in it is raised as ClusterError, with its place in the code."""
    try:
        return call()
    except NbkitError:
        raise
    except Exception as error:
        raise _explained(name, error) from error


def _explained(name: str, error: Exception) -> ClusterError:
    return ClusterError(f"The launcher {name!r} raised an error.", numbers=described(error))


def _print_problem(words: str) -> None:
    """Write to the coordinator's log."""
    print(f"{time.strftime('%H:%M:%S')} launcher: {' '.join(words.split())}", flush=True)
