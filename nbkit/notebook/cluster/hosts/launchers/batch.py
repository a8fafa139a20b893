"""Ranks in jobs of LSF, PBS or Grid Engine: `%cluster start --launcher lsf -n 8 --nodes 2 -- -q gpu -W 4:00`.

Each host is a job of its own with one command, the agent. So the words behind `--`, which go to bsub or qsub, request
the resources of one host, and it does not matter how a batch system starts processes on several hosts. The jobs may
start at different times. The cluster starts when the last one runs.

Other users can see a job's script and environment. So the agent reads its input from a file in the cluster's folder,
which the hosts must be able to read.

ipyparallel's launchers for these systems submit jobs too, but they do not poll them, and do not show why a job is
refused.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster.hosts.launcher import Launcher, LauncherRequest, LauncherStatus, last_lines
from nbkit.notebook.cluster.hosts.network import address_towards
from nbkit.quoting import path_part, shell_words

_COMMAND_SECONDS = 30.0
_POLL_SECONDS = 2.0  # between two questions to the batch system
_UNSEEN_SECONDS = 30.0  # a new job may be missing from the list for so long
_HOSTS_TRIED = 4  # of the hosts in the batch system's list, to find an address for them

_State = Literal["pending", "running", "over"]


class BatchLauncher(Launcher):
    """Submits one job for each host. A subclass describes a batch system.

    title: its name. submit: the words of the command that submits a script, up to the job's name. logged: the options
    for the file of the job's output. number: a pattern for the job's number in the command's output. delete: the
    command that ends jobs.

    status: the command that lists jobs. with_numbers: True if it takes the jobs' numbers. job: a pattern for a line of
    its output, with number and state. unknown: a pattern for its error about a job that it has forgotten. waiting,
    ended: states of jobs; in all other states a job runs.

    hosts: the command that lists the system's hosts. host: a pattern for a line of its output, with the host's name.
    """

    title: ClassVar[str]
    submit: ClassVar[tuple[str, ...]]
    logged: ClassVar[tuple[str, ...]] = ("-o",)
    number: ClassVar[str] = r"^(\d+)"
    delete: ClassVar[str] = "qdel"
    status: ClassVar[tuple[str, ...]] = ("qstat",)
    with_numbers: ClassVar[bool] = True
    job: ClassVar[str]
    unknown: ClassVar[str]
    waiting: ClassVar[Collection[str]]
    ended: ClassVar[Collection[str]]
    hosts: ClassVar[tuple[str, ...]]
    host: ClassVar[str]
    request: LauncherRequest

    def __init__(self, request: LauncherRequest, folder: Path) -> None:
        super().__init__(request, folder)
        self.jobs: list[str] = []
        self._submitted = self._asked = 0.0
        self._seen: set[str] = set()
        self._last = LauncherStatus("pending", "the jobs are being submitted")
        if not shutil.which(self.submit[0]):
            raise UsageError(
                f"There is no {self.submit[0]} on this machine.",
                numbers=f"the commands of {self.title} are not in PATH",
                hint=f"%cluster start --launcher {self.name}   on a login node;   %cluster start -n 2   here",
            )

    def address(self) -> str:
        """Return the address of this machine for connections with the first hosts of the batch system."""
        names = re.findall(self.host, self._answer(*self.hosts), re.MULTILINE)
        return address_towards(names[:_HOSTS_TRIED] or ["localhost"])

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Submit the jobs. Raises ClusterError, with the batch system's message, if one is refused."""
        payload = self.folder / "agent.json"
        with open(os.open(payload, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(environment["NBKIT_AGENT"])
        name = path_part(f"nbkit-{self.folder.name}")[:15]  # some releases of PBS allow no longer name
        for index in range(self.nodes):
            words = (*self.submit, name, *self.logged, str(self._log_of(index)), *self.options)
            script = f"#!/bin/sh\nexec env NBKIT_HOST_INDEX={index} {shell_words(*command)} < {shell_words(payload)}\n"
            done = subprocess.run(
                words,
                input=script,
                env={**os.environ, "LSB_STDOUT_DIRECT": "Y"},  # otherwise LSF writes a job's output only at its end
                capture_output=True,
                text=True,
                check=False,
            )
            found = re.search(self.number, done.stdout, re.MULTILINE)
            if done.returncode or found is None:
                raise ClusterError(
                    f"{self.title} has refused the job.",
                    numbers=" ".join((done.stderr or done.stdout).split()),
                    hint=f"what follows   --   goes to {self.submit[0]} as it is",
                )
            self.jobs.append(found[1])
        self._submitted = time.monotonic()

    def poll(self) -> LauncherStatus:
        """Return the state of the jobs. Raises ClusterError if the batch system does not answer."""
        if time.monotonic() - self._asked > _POLL_SECONDS:
            self._last, self._asked = self._described(self._states()), time.monotonic()
        return self._last

    def _states(self) -> dict[str, _State]:
        numbers = self.jobs if self.with_numbers else ()
        listed = dict(re.findall(self.job, self._answer(*self.status, *numbers), re.MULTILINE))
        self._seen |= listed.keys()
        is_new = time.monotonic() - self._submitted < _UNSEEN_SECONDS
        states: dict[str, _State] = {}
        for job in self.jobs:
            if (state := listed.get(job)) is None:
                states[job] = "pending" if is_new and job not in self._seen else "over"
            else:
                states[job] = "pending" if state in self.waiting else "over" if state in self.ended else "running"
        return states

    def _described(self, states: Mapping[str, _State]) -> LauncherStatus:
        plural = "s" * (len(states) > 1)
        jobs = f"{self.title} job{plural} {', '.join(states)}"
        over = [job for job in states if states[job] == "over"]
        waiting = [job for job in states if states[job] == "pending"]
        error = self._error(over[0]) if over else None
        if len(over) == len(states):
            return LauncherStatus("over", f"{jobs} {'have' if plural else 'has'} ended", error=error)
        if waiting:
            count = f"{len(waiting)} of {len(states)} waiting" if plural else "waiting"
            return LauncherStatus("pending", f"{jobs}: {count}", error=error)
        return LauncherStatus("running", f"{jobs}: running", error=error)

    def _error(self, job: str) -> ClusterError:
        said = last_lines(self._log_of(self.jobs.index(job))) or "(its output is empty, or cannot be read here)"
        return ClusterError(
            f"{self.title} job {job} has ended before the cluster was ready.",
            numbers=f"the last lines of its output:\n    {said.replace(chr(10), chr(10) + '    ')}",
            hint=f"{shell_words(*self.status, *([job] * self.with_numbers))}   (in a terminal)",
        )

    def stop(self) -> None:
        """Delete the jobs. A job that has already ended is not an error."""
        if self.jobs:
            words = (self.delete, *self.jobs)
            subprocess.run(words, capture_output=True, check=False, timeout=_COMMAND_SECONDS)

    def log(self) -> str:
        """Return the last output of all agents, if the hosts share this file system."""
        return "\n".join(filter(None, (last_lines(self._log_of(index)) for index in range(self.nodes))))

    def _log_of(self, index: int) -> Path:
        return self.folder / "logs" / f"host{index}.log"

    def _answer(self, *words: str) -> str:
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_COMMAND_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            done = subprocess.CompletedProcess(words, 1, "", str(error))
        if done.returncode and not re.search(self.unknown, done.stderr):
            said = " ".join(done.stderr.split())
            raise ClusterError(f"{self.title} does not answer.", numbers=f"{words[0]}: {said}", hint=words[0])
        return done.stdout


class LsfLauncher(BatchLauncher):
    """Jobs of IBM Spectrum LSF."""

    name, title = "lsf", "LSF"
    submit, number, delete = ("bsub", "-J"), r"<(\d+)>", "bkill"
    status = ("bjobs", "-a", "-noheader", "-o", "jobid stat")
    job, unknown = r"^(\d+)\s+(\w+)", "is not found"
    waiting, ended = ("PEND", "PSUSP", "WAIT", "PROV"), ("DONE", "EXIT", "ZOMBI")
    hosts, host = ("bhosts",), r"^(?!HOST_NAME)([\w.-]+)"


class PbsLauncher(BatchLauncher):
    """Jobs of OpenPBS, PBS Professional or Torque. Their qstat fails for jobs that have ended."""

    name, title = "pbs", "PBS"
    submit, logged = ("qsub", "-V", "-S", "/bin/sh", "-N"), ("-j", "oe", "-o")
    job, unknown = r"^(\d+)\S*\s.*\s([A-Z])\s+\S+\s*$", "Unknown Job|has finished"
    waiting, ended = "QHWT", "ECFX"
    hosts, host = ("pbsnodes", "-a"), r"^([\w.-]+)\s*$"


class SgeLauncher(BatchLauncher):
    """Jobs of Grid Engine. Its qstat lists the user's jobs that have not ended. A job in state Eqw will never start."""

    name, title = "sge", "Grid Engine"
    submit, logged = ("qsub", "-terse", "-V", "-S", "/bin/sh", "-N"), ("-j", "y", "-o")
    with_numbers = False
    job, unknown = r"^\s*(\d+)\s+\S+\s+\S+\s+\S+\s+(\S+)\s", r"(?!)"
    waiting, ended = ("qw", "hqw", "hRwq", "Rq"), ("Eqw", "Ehqw", "dr", "dt")
    hosts, host = ("qhost",), r"^(?!HOSTNAME|global|-)([\w.-]+)"
