"""The controller's ports, kept from others between choosing and using them.

ipyparallel asks the system for a free port, closes it, and has a scheduler open it half a second later. Meanwhile any
connection that begins on the machine may get it; the scheduler then dies, and a cluster without it does not answer. The
controller's own process calls `hold_ports` from the configuration file that `launch` writes.
"""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def hold_ports() -> None:
    """Have the ports that the controller of this process chooses belong to it as long as it lives.

    On Linux the system gives nobody a port on which a socket is bound, while another socket may listen on it if both
    have SO_REUSEADDR, as those of zmq have.
    """
    from ipyparallel import util

    util.select_random_ports = _chosen


def _chosen(number: int) -> list[int]:
    ports = []
    for _ in range(number):
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        _held.append(holder)
        ports.append(holder.getsockname()[1])
    return ports
