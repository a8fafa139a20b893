"""Run the benchmarks in a network and a process space of their own (Linux namespaces), where that is allowed.

One of the peers listens on every interface and ends processes by patterns. In here it reaches nothing else; and
whatever a run leaves behind ends with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
_INSIDE = "NBKIT_BENCH_INSIDE"
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def is_inside() -> bool:
    """Whether this process was started by `enter`."""
    return os.environ.get(_INSIDE) == "1"


def enter(arguments: list[str]) -> int | None:
    """Run `python -m bench` with `arguments` inside, and return how it ended; None when that is not possible."""
    if shutil.which("unshare") is None or subprocess.run([*_UNSHARE, "true"], capture_output=True).returncode:
        return None
    # A shell as the first process collects the orphans; Python would leave them as zombies.
    command = [*_UNSHARE, "sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, env={**os.environ, _INSIDE: "1"}).returncode


def bring_up_loopback() -> None:
    """A new network space has its loopback interface down. Here it comes up, and loses nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh", b"lo", 0).ljust(40, b"\0")
        (flags,) = struct.unpack_from("h", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | _IFF_UP).ljust(40, b"\0"))
    # The kernel sends a tail again (up to 64 KB) to a peer that does not answer within two round trips, and one that
    # waits for a core does not. Nothing is lost here, and who counts bytes wants those that were sent on purpose.
    with suppress(OSError):
        Path("/proc/sys/net/ipv4/tcp_early_retrans").write_text("0")
