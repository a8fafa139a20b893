"""Finds and shuts the TCP connections of this process; restricts a listening socket to some hosts. Linux only.

Sockets are identified by inode. So nbkit knows which connections a group opened, and shuts only these. On other systems
than Linux the inode does not identify a socket, and no socket is found.

`admit_only` lets only some hosts connect to a listening socket: a filter in the kernel drops packets of other hosts. It
is a classic BPF program on the socket (SO_ATTACH_FILTER), which needs no privileges. Connections that the socket
accepts inherit the filter. To other hosts the port looks like that of a host that does not answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Collection, Iterator

of_plain_groups: frozenset[int] = frozenset()
"""Sockets of the default group, if it is torch's own. A delegating group knows its own sockets."""

_STILL_SECONDS, _SETTLE_SECONDS = 0.1, 2.0
_TCP_INFO = struct.Struct("120xQQ")
"""The fields tcpi_bytes_acked and tcpi_bytes_received of Linux's struct tcp_info."""


def inodes() -> frozenset[int]:
    """Return the inodes of all sockets of this process, of any kind. Inodes are not reused while the machine is up."""
    return frozenset(_by_inode())


def shut(wanted: Collection[int]) -> int:
    """Shut, in both directions, every connected TCP socket whose inode is in `wanted`. Returns their number.

    A thread that blocks in one of them, at either end, wakes at once with an error. This works even if a forked child
    holds a duplicate. Listening sockets are not shut, because gloo aborts the process if it loses its listener.
    """
    count = 0
    for inode, fd in _by_inode().items():
        if inode not in wanted:
            continue
        with contextlib.suppress(OSError):  # closed by its owner meanwhile, or never connected
            duplicate = socket.socket(fileno=os.dup(fd))
            with duplicate:
                if _is_still(duplicate, inode) and _is_connected_tcp(duplicate):
                    duplicate.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def settle(wanted: Collection[int]) -> None:
    """Return when the connections of `wanted` have been idle for a moment, or after two seconds.

    Call it before the connections are shut. If a connection ends inside a message, gloo waits forever for the rest, at
    both ends. Our wait for gloo can be ended (see gloo/interruptible_wait.py), but one of gloo's threads and the
    tensors stay. Messages between living ranks arrive soon without help.
    """
    if not wanted:
        return
    until, moved, since = time.monotonic() + _SETTLE_SECONDS, moved_bytes(wanted), time.monotonic()
    while time.monotonic() < min(until, since + _STILL_SECONDS):
        time.sleep(_STILL_SECONDS / 10)
        if (now := moved_bytes(wanted)) != moved:
            moved, since = now, time.monotonic()


def moved_bytes(wanted: Collection[int]) -> int:
    """Return the bytes that these sockets have sent (acknowledged) and received so far."""
    total = 0
    for inode, fd in _by_inode().items():
        if inode in wanted:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
                if _is_still(duplicate, inode) and _is_connected_tcp(duplicate):
                    info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                    total += sum(_TCP_INFO.unpack(info)) if len(info) == _TCP_INFO.size else 0
    return total


def _is_still(one: socket.socket, inode: int) -> bool:
    """Return True if a socket still has that inode.

    gloo's threads may close sockets meanwhile, and a new connection may have got the same descriptor number.
    """
    return os.fstat(one.fileno()).st_ino == inode


def _is_connected_tcp(one: socket.socket) -> bool:
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
        return False
    return not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _by_inode() -> dict[int, int]:
    found: dict[int, int] = {}
    if sys.platform != "linux":
        return found
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor by which the folder was listed is closed by now
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


_SO_ATTACH_FILTER = 26
_LOAD_WORD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
_IP_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets count from the IP header
_SOURCE = {4: 12, 6: 8}  # IP version -> offset of the source address in the IP header
_WHOLE, _NOTHING = 0xFFFFFFFF, 0
_Instruction = tuple[int, int, int, int]  # code, steps forward if equal, if not, and the operand


def admit_only(listener: socket.socket, hosts: Collection[str]) -> bool:
    """Make `listener` accept only packets of these addresses from now on. Returns False if the system cannot do that.

    Addresses of another family than the listener's are ignored. The kernel's limit is about a thousand addresses.
    """
    if sys.platform != "linux":
        return False
    version = 6 if listener.family == socket.AF_INET6 else 4
    addresses = sorted({int(found) for host in hosts if (found := ipaddress.ip_address(host)).version == version})
    program = b"".join(struct.pack("HBBI", *one) for one in _program(addresses, version))
    code = ctypes.create_string_buffer(program, len(program))
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program) // 8, ctypes.addressof(code))
        )
    except OSError:
        return False
    return True


def _program(addresses: Collection[int], version: int) -> Iterator[_Instruction]:
    """Yield the filter program. It compares addresses word by word (IPv6 has four words) and admits an equal one."""
    words = 1 if version == 4 else 4
    for address in addresses:
        for word in range(words):
            if words > 1 or address == next(iter(addresses)):  # for IPv4, the single word stays loaded
                yield _LOAD_WORD, 0, 0, _IP_HEADER + _SOURCE[version] + 4 * word
            wanted = address >> 32 * (words - 1 - word) & 0xFFFFFFFF
            yield _IF_EQUAL, 0, 2 * (words - 1 - word) + 1, wanted
        yield _RETURN, 0, 0, _WHOLE
    yield _RETURN, 0, 0, _NOTHING
