"""A listening socket that only some hosts can connect to: a filter in the kernel drops what comes from others.

It is a classic BPF program on the socket (SO_ATTACH_FILTER), which needs no privileges. Connections that the socket
accepts inherit it. To others the port is as that of a host that does not answer. Linux only.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Collection, Iterator

_SO_ATTACH_FILTER = 26
_LOAD_WORD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
_IP_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets count from the IP header, wherever the kernel has come in the packet
_SOURCE = {4: 12, 6: 8}  # of the source address in the IP header
_WHOLE, _NOTHING = 0xFFFFFFFF, 0
_Instruction = tuple[int, int, int, int]  # code, steps forward if equal, if not, and the operand


def admit_only(listener: socket.socket, hosts: Collection[str]) -> bool:
    """From now on `listener` takes packets of these addresses alone; False where the system cannot do that.

    Addresses of another family than the listener's play no part. A kernel's limits are about a thousand addresses.
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
    """Word by word, so that an address of IPv6 is four comparisons; the first address that is equal admits."""
    words = 1 if version == 4 else 4
    for address in addresses:
        for word in range(words):
            if words > 1 or address == next(iter(addresses)):  # of IPv4 the one word stays loaded
                yield _LOAD_WORD, 0, 0, _IP_HEADER + _SOURCE[version] + 4 * word
            wanted = address >> 32 * (words - 1 - word) & 0xFFFFFFFF
            yield _IF_EQUAL, 0, 2 * (words - 1 - word) + 1, wanted
        yield _RETURN, 0, 0, _WHOLE
    yield _RETURN, 0, 0, _NOTHING
