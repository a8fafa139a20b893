"""The unique identity of a process: its pid together with its start time.

The system reuses pids. Before code sends a signal to a process of a cluster (the notebook, the parent of the ranks,
`nbkit clean`), it checks here that the pid is still the same process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

STOP_SIGNAL = signal.SIGUSR1
"""The signal that ends the parent of the ranks at once, for a user's stop. Batch systems send SIGTERM: see Parent."""


@dataclass(frozen=True)
class Process:
    """A process, by pid and start time.

    started: in clock ticks since the boot with the id `boot`; on systems other than Linux in seconds since the epoch.
    Ticks do not change when somebody sets the clock. A time of day does, and the process would seem to be another one.
    """

    pid: int
    started: float
    boot: str = ""

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the process that has this pid now. Raises ProcessLookupError."""
        started, _ = _look(pid)
        return cls(pid, started, boot_id())

    def is_alive(self) -> bool:
        """Return True if the process still runs. A zombie does not."""
        try:
            started, zombie = _look(self.pid)
        except ProcessLookupError:
            return False
        return not zombie and self._is(started)

    def end(self, number: int = signal.SIGTERM, *, group: bool = False) -> None:
        """Send a signal, if the pid is still this process. group: send it to the process group that it leads."""
        if self.is_alive():
            try:
                (os.killpg if group else os.kill)(self.pid, number)
            except ProcessLookupError:
                return

    def _is(self, started: float) -> bool:
        if sys.platform == "linux":
            return started == self.started and boot_id() == self.boot
        return abs(started - self.started) < 1


def followers(leader: int, folder: str | os.PathLike[str]) -> list[Process]:
    """Return the running processes of the session that process `leader` leads or led, without the leader.

    folder: return only processes with this folder, or one below it, in their environment: if the whole session has
    ended, another session may have the same number.
    """
    found = []
    for pid in psutil.pids():
        try:
            if pid != leader and os.getsid(pid) == leader and _was_given(pid, os.fspath(folder)):
                found.append(Process.of(pid))
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return [process for process in found if process.is_alive()]


def _look(pid: int) -> tuple[float, bool]:
    """Return (start time, True if the process is a zombie). Raises ProcessLookupError."""
    if sys.platform == "linux":
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            raise ProcessLookupError(f"there is no process {pid}") from None
        # The command's name may contain spaces and brackets, so count the fields after the last bracket.
        fields = text.rpartition(")")[2].split()
        return float(fields[19]), fields[0] in "ZX"
    try:
        process = psutil.Process(pid)
        return process.create_time(), process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        raise ProcessLookupError(f"there is no process {pid}") from None


def _was_given(pid: int, folder: str) -> bool:
    return any(value == folder or value.startswith(folder + os.sep) for value in psutil.Process(pid).environ().values())


def node_name() -> str:
    """Return the name of this machine. In a Slurm job this is Slurm's name, since one machine may be several nodes."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@cache
def boot_id() -> str:
    """Return the kernel's id of this boot, or ""."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
