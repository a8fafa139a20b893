"""Run the benchmarks in their own network and process namespace (Linux), where that is allowed.

One of the peers listens on every interface, and ends processes whose command line matches a pattern. In a namespace it
can reach nothing else, and everything that a run leaves behind ends with the namespace.
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
    """Return True if this process was started by `enter`."""
    return os.environ.get(_INSIDE) == "1"


def enter(arguments: list[str]) -> int | None:
    """Run `python -m bench` with `arguments` in new namespaces and return its exit status.

    Returns None if namespaces are not available.
    """
    if shutil.which("unshare") is None or subprocess.run([*_UNSHARE, "true"], capture_output=True).returncode:
        return None
    # The first process is a shell, because it collects orphans. Python would leave them as zombies.
    command = [*_UNSHARE, "sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, env={**os.environ, _INSIDE: "1"}).returncode


def bring_up_loopback() -> None:
    """Bring up the loopback interface, which is down in a new network namespace, and prevent retransmissions."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh", b"lo", 0).ljust(40, b"\0")
        (flags,) = struct.unpack_from("h", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | _IFF_UP).ljust(40, b"\0"))
    # The kernel sends the last bytes again (up to 64 KB) if a peer does not answer within two round trips, as a peer
    # that waits for a core. Loopback loses nothing, and the benchmarks that count bytes want each byte once.
    with suppress(OSError):
        Path("/proc/sys/net/ipv4/tcp_early_retrans").write_text("0")
