"""Ranks on hosts that are reached over SSH.

The agents are started on all hosts at the same time, by the ssh command, so ~/.ssh/config applies. An agent's payload
goes over its standard input. ssh keeps running and returns the agent's output.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster.hosts.launcher import Launcher, StartRequest, last_lines
from nbkit.notebook.cluster.hosts.network import address_towards
from nbkit.quoting import check_host, shell_words, ssh_command, user_path

# A host that is silent for 15 s counts as dead. During the start, nothing else would notice it.
_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
_OWN_ERROR = 255  # the exit code of ssh itself
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", *_ALIVE)


def read_hosts(text: str, folder: Path | None = None) -> tuple[tuple[str, int], ...]:
    """Return (host, number of ranks) of each host, from "node1:4,node2:4" or a file with a line for each host.

    folder: where the file is looked for before the current folder. A host without a number has one rank. Raises
    UsageError for other text.
    """
    path = user_path(text)
    places = [path] if folder is None else [folder / path, path]
    file = next((place for place in places if place.is_file()), None)
    parts = text.split(",")
    if "," not in text and file is not None:
        lines = (line.partition("#")[0] for line in file.read_text().splitlines())
        parts = [line.replace(" slots=", ":") for line in lines if line.strip()]
    found = []
    for part in parts:
        name, _, count = part.strip().partition(":")
        try:
            check_host(name)
            fits = (count or "1").isdecimal() and int(count or 1) > 0
        except UsageError:
            fits = False
        if not fits:
            raise UsageError(
                f"{part.strip()!r} is not a host with a number of ranks.",
                numbers=f"--hosts {text}",
                hint="--hosts node1:4,node2:4   or   --hosts FILE, with one host on each line",
            )
        found.append((name, int(count or 1)))
    return tuple(found)


@dataclass(frozen=True)
class HostsRequest(StartRequest):
    """Ranks on `hosts`: (name for ssh, number of ranks) of each host."""

    hosts: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "hosts", tuple((check_host(name), count) for name, count in self.hosts))

    @property
    def ranks_of_hosts(self) -> tuple[int, ...]:
        return tuple(count for _, count in self.hosts)


@dataclass(frozen=True)
class SshRequest(HostsRequest):
    """Ranks on `hosts`, where ssh starts the agents."""

    kind: ClassVar[str] = "ssh"


class SshLauncher(Launcher):
    """Starts the agents with ssh, all at once."""

    name, flag, own_options, request_type = "ssh", "--hosts", ("hosts",), SshRequest
    request: SshRequest

    def __init__(self, request: SshRequest, folder: Path) -> None:
        if not shutil.which("ssh"):
            raise UsageError(
                "There is no ssh on this machine.", numbers="it is not in PATH", hint="apt install openssh-client"
            )
        super().__init__(request, folder)
        self.python = request.python or sys.executable

    @classmethod
    def request_of(cls, options: Any) -> SshRequest:
        """Return the request for the hosts of --hosts. Raises UsageError if -n is another number of ranks."""
        request = SshRequest(read_hosts(options.hosts))
        if options.n not in (None, request.num_ranks):
            raise UsageError(
                "--hosts says how many ranks there are.",
                numbers=f"-n {options.n}, --hosts {request.num_ranks}",
                hint="without -n",
            )
        return request

    def address(self) -> str:
        return address_towards([hostname_of(name) for name, _ in self.request.hosts])

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        for index, (name, _) in enumerate(self.request.hosts):
            there = f"exec env NBKIT_HOST_INDEX={index} {shell_words(*command)}"
            payload = f"{environment['NBKIT_AGENT']}\n"
            self.run(["ssh", *_OPTIONS, name, there], {}, text=payload, log=_log_of(index))

    def explain(self, index: int) -> ClusterError:
        """Return the error for a host, with a fix if it is known."""
        name, said = self.request.hosts[index][0], self._said(index)
        last = said.strip().splitlines()[-1] if said.strip() else "it said nothing"
        if not said.strip() and self.commands[index].returncode == _OWN_ERROR:  # ssh was told to be quiet
            said = last = f"Timeout, server not responding: ssh has ended with code {_OWN_ERROR}"
        for mark, what, hint in _FAILURES:
            if re.search(mark, said):
                install = ssh_command(name, self.python, "-m", "pip", "install", "nbkit")
                fill = {"host": name, "python": self.python, "install": install}
                return ClusterError(what.format(**fill), numbers=last, hint=hint.format(**fill))
        return ClusterError(
            f"The agent on {name} ended before the cluster was ready.",
            numbers=f"the last lines of what it said:\n    {said.strip().replace(chr(10), chr(10) + '    ')}",
            hint=f"{ssh_command(name, self.python, '-m', 'nbkit', 'doctor')}   (in a terminal)",
        )

    def log(self) -> str:
        """Return the last lines of all agents."""
        return "\n".join(filter(None, (self._said(index).strip() for index in range(self.nodes))))

    def _said(self, index: int) -> str:
        return last_lines(self.folder / "logs" / _log_of(index))


def _log_of(index: int) -> str:
    return f"host{index}.log"


def hostname_of(name: str) -> str:
    """Return the host's name or address according to ssh's own configuration."""
    if not shutil.which("ssh"):
        return name.rpartition("@")[2]
    try:
        said = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, check=False, timeout=10).stdout
    except subprocess.TimeoutExpired:  # the configuration may run a command that does not end
        said = ""
    found = re.search(r"^hostname (\S+)$", said, re.MULTILINE)
    return found[1] if found else name.rpartition("@")[2]


_FAILURES = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "The key of the host {host} has changed.",
        "ssh-keygen -R {host}   (in a terminal), if you know why; then   ssh {host}   once",
    ),
    ("Host key verification failed", "ssh does not know the host {host} yet.", "ssh {host}   (in a terminal), once"),
    ("Could not resolve hostname", "There is no host {host}.", "--hosts with a name of ~/.ssh/config or of DNS"),
    ("Permission denied", "The host {host} does not let you in without a password.", "ssh-copy-id {host}"),
    (
        "Connection refused|Connection timed out|Timeout, server|No route to host|Network is unreachable",
        "The host {host} does not answer.",
        "ssh {host}   (in a terminal)",
    ),
    (
        "(?i)python[^\n]*(not found|no such file)|(not found|no such file)[^\n]*python",
        "There is no {python} on the host {host}.",
        "--python PATH   names the one on the hosts",
    ),
    (
        r"No module named '?(nbkit|psutil|ipyparallel|IPython|zmq)",
        "nbkit is not installed on the host {host}.",
        "{install}   or   --python PATH",
    ),
)
