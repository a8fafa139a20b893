"""Questions to the system about the child processes of the ranks' parent."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil


def has_ended(pid: int) -> bool:
    """Whether a child has ended, without reaping it: until it is reaped, nobody else gets its pid or its group's."""
    if hasattr(os, "waitid"):  # macOS has it from Python 3.13 on
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def kill_group(pid: int) -> None:
    """End a rank and everything in its process group."""
    for end in (os.killpg, os.kill):
        try:
            end(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def oom_kills() -> int:
    """The number of processes of this cgroup that the kernel has ended for want of memory; 0 where it does not say."""
    try:
        text = Path("/sys/fs/cgroup/memory.events").read_text()
    except OSError:
        return 0
    return int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))
