"""Ranks on hosts reached over SSH: which hosts, how their agents are started, and what went wrong with one.

All hosts are started at the same time. ssh itself connects, so ~/.ssh/config applies. The agent's input goes over its
standard input. ssh keeps running and brings back what the agent prints.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster.hosts.network import address_towards
from nbkit.notebook.cluster.hosts.progress import LauncherView
from nbkit.notebook.cluster.hosts.start_request import SshRequest, agent_command, last_lines
from nbkit.quoting import check_host, shell_words, ssh_command, user_path

# A host silent for 15 s has died. During the start nothing else would notice.
_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
_OWN_ERROR = 255  # the exit code of ssh itself
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", *_ALIVE)


def read_hosts(text: str) -> tuple[tuple[str, int], ...]:
    """Return hosts and their ranks from "node1:4,node2:4", or from a file with one such line for each host.

    A host without a number has one rank. Raises UsageError if it is neither.
    """
    path = user_path(text)
    parts = text.split(",")
    if "," not in text and path.is_file():
        lines = (line.partition("#")[0] for line in path.read_text().splitlines())
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


class SshHosts:
    """The agents of one cluster, started over ssh. A starter, see `start_request.Starter`."""

    def __init__(self, request: SshRequest, folder: Path) -> None:
        if not shutil.which("ssh"):
            raise UsageError(
                "There is no ssh on this machine.", numbers="it is not in PATH", hint="apt install openssh-client"
            )
        self.request, self.folder, self.cpu = request, folder, request.cpu
        self.python = request.python or sys.executable
        self.counts = tuple(count for _, count in request.hosts)
        self.address = address_towards([hostname_of(name) for name, _ in request.hosts])
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, payload: str) -> None:
        """Start the agents, all at once."""
        command = f"exec {shell_words(*agent_command(self.request))}"
        for index, (name, _) in enumerate(self.request.hosts):
            with open(self._log(index), "ab") as log:
                started = subprocess.Popen(
                    ["ssh", *_OPTIONS, name, command], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
                )
            self._started.append(started)
        for index, started in enumerate(self._started):
            assert started.stdin is not None
            try:
                started.stdin.write(json.dumps({**json.loads(payload), "index": index}).encode() + b"\n")
                started.stdin.close()
            except BrokenPipeError:
                continue  # it has ended, and `look` says why

    def look(self) -> LauncherView:
        """Return the state of the agents, with the error of the first one that has ended."""
        ended = [index for index, started in enumerate(self._started) if started.poll() is not None]
        error = self._error(ended[0]) if ended else None
        if self._started and len(ended) == len(self._started):
            return LauncherView("over", "the agents of all hosts have ended", error=error)
        return LauncherView("running", f"{len(self.counts)} hosts are being started", error=error)

    def _error(self, index: int) -> ClusterError:
        name, said = self.request.hosts[index][0], self._said(index)
        last = said.strip().splitlines()[-1] if said.strip() else "it said nothing"
        if not said.strip() and self._started[index].returncode == _OWN_ERROR:  # what a quiet ssh does not say
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
        return "\n".join(filter(None, (self._said(index).strip() for index in range(len(self._started)))))

    def _said(self, index: int) -> str:
        path = self._log(index)
        return last_lines(path)

    def _log(self, index: int) -> Path:
        return self.folder / "logs" / f"host{index}.log"

    def end(self) -> None:
        """End the connections. Agents that have joined have already ended; others find nobody to join."""
        for started in self._started:
            started.terminate()
        for started in self._started:
            try:
                started.wait(5)
            except subprocess.TimeoutExpired:
                started.kill()


def hostname_of(name: str) -> str:
    """Return the host's name or address according to ssh's own configuration."""
    if not shutil.which("ssh"):
        return name.rpartition("@")[2]
    try:
        said = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, check=False, timeout=10).stdout
    except subprocess.TimeoutExpired:  # its configuration runs a command that does not end
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
