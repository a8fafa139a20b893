"""Where a job of Slurm's stands, and when and why it will end: as `scontrol show job` says it at this moment.

Not in the environment of the job, whose end time is that of its start: a limit can be changed, and a job preempted.
"""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass
from typing import Literal

from nbkit.errors import ClusterError
from nbkit.notebook.cluster.hosts.progress import Seen

_COMMAND_SECONDS = 30.0
_ENDS = {
    "CANCELLED": "was cancelled",
    "TIMEOUT": "reached its time limit",
    "PREEMPTED": "was preempted by another job",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "ran out of memory",
    "FAILED": "failed",
    "BOOT_FAIL": "lost a node that did not start",
    "DEADLINE": "was ended at its deadline",
    "REVOKED": "was moved to another cluster",
    "COMPLETED": "has ended",
}
_OF_SLURM = ("TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL")
"""Ends that nobody has wanted, and of which a job's program has no part."""
_ABSENT = ("", "None", "N/A", "Unknown", "(null)")


@dataclass(frozen=True)
class JobState:
    """state: Slurm's word. begins, ends, preempted_at: as time.time() says it, None where Slurm says nothing.

    restarts: how often it was put back in the queue. nodes: it runs on, as Slurm writes them.
    """

    job: str
    state: str
    reason: str = "None"
    begins: float | None = None
    ends: float | None = None
    preempted_at: float | None = None
    restarts: int = 0
    nodes: str = ""

    @property
    def seconds(self) -> float:
        """From its start to its end; inf where it has no end."""
        if self.begins is None or self.ends is None:
            return float("inf")
        return self.ends - self.begins

    def seen(self, save_before: float) -> Seen:
        """As a launcher reports it. save_before: seconds from when a training is to be saved to the job's end; of a
        short job no more than a quarter."""
        name = f"job {self.job}"
        if self.state == "PENDING":
            expected = f", expected to start {moment(self.begins)}" if self.begins is not None else ""
            return Seen("pending", f"{name} is pending ({self.reason}){expected}")
        if self.state == "COMPLETING":  # how it will be called is not said before it is over
            return self._ended("ending", self._how_it_ends())
        if self.state not in _ENDS:  # RUNNING, or what it does meanwhile: CONFIGURING, SIGNALING, SUSPENDED
            words = f"{name} runs on {self.nodes}"
            if self.ends is None:
                return Seen("running", words)
            if self.preempted_at:
                why = f"{name} is preempted by another job and ends {moment(self.ends)}"
                return Seen("running", words, 0.0, why, again=True)
            save_at = self.ends - min(save_before, self.seconds / 4)
            return Seen("running", words, save_at, f"{name} reaches its time limit {moment(self.ends)}", again=True)
        if self.preempted_at and self.state == "COMPLETED":  # it has made way before it was ended
            return self._ended("over", "PREEMPTED")
        return self._ended("over", self.state)

    def _ended(self, state: Literal["ending", "over"], how: str) -> Seen:
        return Seen(state, f"job {self.job} {_ENDS[how]}", again=how in _OF_SLURM)

    def _how_it_ends(self) -> str:
        if self.preempted_at:
            return "PREEMPTED"
        return "TIMEOUT" if self.reason == "TimeLimit" else "CANCELLED"


def read_job(job: str) -> JobState:
    """Where `job` stands; one that Slurm has forgotten has ended. Raises ClusterError when Slurm does not answer."""
    try:
        text = answer("scontrol", "--oneliner", "show", "job", job)
    except ClusterError as error:
        if "Invalid job id" not in error.numbers:
            raise
        return JobState(job, "COMPLETED")
    return parsed(job, text)


def parsed(job: str, text: str) -> JobState:
    """What one line of `scontrol --oneliner show job` says."""
    fields: dict[str, str] = {}
    for name, value in re.findall(r"(\w+)=(\S*)", text):
        fields.setdefault(name, value)  # a comment, which comes late, may hold anything
    return JobState(
        job,
        fields.get("JobState", "COMPLETED"),
        fields.get("Reason", "None"),
        _seconds(fields.get("StartTime", "")),
        _seconds(fields.get("EndTime", "")),
        _seconds(fields.get("PreemptTime", "")),
        int(fields.get("Restarts", "0")),
        fields.get("NodeList", ""),
    )


def _seconds(text: str) -> float | None:
    return None if text in _ABSENT else time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def moment(seconds: float) -> str:
    """A time as people say it: the day only where it is another one. seconds: as time.time() says it."""
    when = time.localtime(seconds)
    clock = time.strftime("%H:%M:%S", when)
    today = when[:3] == time.localtime()[:3]
    return f"at {clock}" if today else f"on {time.strftime('%Y-%m-%d', when)} at {clock}"


def answer(*words: str) -> str:
    """What a command of Slurm's prints. Raises ClusterError when it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        done = subprocess.CompletedProcess(words, 1, "", str(error))
    if done.returncode:
        raise ClusterError(
            "Slurm does not answer.", numbers=f"{words[0]}: {' '.join(done.stderr.split())}", hint="sinfo"
        )
    return done.stdout
