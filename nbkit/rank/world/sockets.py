"""The TCP connections of this process, told apart by inode: which ones a group opened, and shutting just those.

Linux only: elsewhere a socket's inode does not tell it apart, and no socket is found.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Collection


def inodes() -> frozenset[int]:
    """Inodes of all sockets this process holds, of any kind. Inodes are not reused while the machine is up."""
    return frozenset(_by_inode())


def shut(wanted: Collection[int]) -> int:
    """Shut both ways every connected TCP socket whose inode is in `wanted`; returns how many.

    Whoever blocks in one of them, on this side or the other, wakes at once with an error, also when a forked
    child holds a duplicate. Listening sockets are left alone: gloo aborts the process when its listener goes.
    """
    count = 0
    for inode, fd in _by_inode().items():
        if inode not in wanted:
            continue
        with contextlib.suppress(OSError):  # closed by its owner meanwhile, or never connected
            duplicate = socket.socket(fileno=os.dup(fd))
            with duplicate:
                if _is_connected_tcp(duplicate):
                    duplicate.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def _is_connected_tcp(one: socket.socket) -> bool:
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
        return False
    return not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _by_inode() -> dict[int, int]:
    found: dict[int, int] = {}
    if sys.platform != "linux":
        return found
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this very listing is gone by now
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found
