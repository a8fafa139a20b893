"""Starts and ends child processes of the parent of the ranks, says how they ended, and writes the parent's log.

python -m nbkit.bridge.parent.child_processes FOLDER PORT RANK REPLACES FD...      a rank that was not forked
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from nbkit.wire.user_code import OWN_MODULES


def has_ended(pid: int) -> bool:
    """Return True if a child has ended. Do not reap it.

    Until a child is reaped, no other process gets its pid or the id of its group.
    """
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


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed because memory ran out; 0 if that is unknown.

    Count the processes of this cgroup, version 2 or 1. A container sees its own cgroup as the root. Without such a
    cgroup, count the processes of the whole machine.
    """
    own = _own_cgroup(root)
    places = (
        f"sys/fs/cgroup{own}/memory.events",
        "sys/fs/cgroup/memory.events",
        f"sys/fs/cgroup/memory{own}/memory.oom_control",
        "sys/fs/cgroup/memory/memory.oom_control",
        "proc/vmstat",
    )
    for place in places:
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in (root / place).read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


class Ends:
    """Says in words how ranks ended. There is one object per parent. It ignores kills from before it was made."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._oom_kills = oom_kills(root)

    def how(self, status: int, device: str) -> str:
        """Return in words how a rank ended. status: from os.waitpid. device: the error of a failed device, or ""."""
        if device:
            return f"its device failed: {device}"
        if not os.WIFSIGNALED(status):
            return f"it exited with code {os.WEXITSTATUS(status)}"
        name, kills = signal.Signals(os.WTERMSIG(status)).name, oom_kills(self._root)
        if name == "SIGKILL" and kills > self._oom_kills:
            self._oom_kills = kills
            return "SIGKILL: the kernel ended it because memory ran out"
        return name


def _own_cgroup(root: Path) -> str:
    """Return the path of this process's cgroup under the memory controller, "" for the root."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or "memory" in controllers.split(","):
                return path.rstrip("/")
    return ""


def log(text: str) -> None:
    with suppress(OSError):  # the SSH connection that reads it may be closed
        print(f"{time.strftime('%H:%M:%S')} parent: {text}", flush=True)


_started: list[subprocess.Popen[bytes]] = []  # keeps them alive: subprocess would reap them before the parent does


def start_afresh(
    folder: Path, port: int, rank: int, line: socket.socket, listener: socket.socket | None, *, replaces: bool
) -> int:
    """Start rank `rank` as a new process with its own session. Returns its pid.

    Used on systems where a process that has imported torch must not fork.
    """
    fds = [line.fileno()] + ([listener.fileno()] if listener else [])
    program = [sys.executable, *OWN_MODULES, "nbkit.bridge.parent.child_processes"]
    arguments = map(str, (folder, port, rank, int(replaces), *fds))
    process = subprocess.Popen([*program, *arguments], pass_fds=fds, start_new_session=True)
    _started.append(process)
    return process.pid


def main() -> None:
    from nbkit.bridge import engine
    from nbkit.bridge.parent import spec
    from nbkit.wire.link import Link

    folder, port, rank, replaces, line, *listener = sys.argv[1:]
    engine.main(
        spec.read(Path(folder) / "spec.json", port=int(port)),
        int(rank),
        socket.socket(fileno=int(listener[0])) if listener else None,
        Link(socket.socket(fileno=int(line))),
        replaces=bool(int(replaces)),
    )


if __name__ == "__main__":
    main()
