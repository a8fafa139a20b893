"""An agent's part in whether hosts can connect to each other: it listens for a moment, and tries to connect to others.

Before any rank is forked: ranks that form a world would wait for it for a minute. Nothing is sent.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Iterable

from nbkit.notebook.cluster.hosts.network import listen_at

ANSWER_SECONDS = 5.0  # the system asks again after 1 s and after 3 s


class Probe:
    """It listens at `address` until it is closed. The system itself takes the connections."""

    def __init__(self, address: str) -> None:
        self._listening = listen_at(address)
        self.port = int(self._listening.getsockname()[1])

    def close(self) -> None:
        """Listen no more."""
        self._listening.close()


def unanswered(places: Iterable[tuple[int, str, int]], seconds: float = ANSWER_SECONDS) -> list[tuple[int, str]]:
    """Try to connect to each (host, address, port), all at once: the hosts where that fails, and what the system says.

    host: a number that says which it is.
    """
    failed: dict[int, str] = {}
    with selectors.DefaultSelector() as selector:
        for host, address, port in places:
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            sock.setblocking(False)
            if (code := sock.connect_ex((address, port))) in (0, errno.EINPROGRESS):
                selector.register(sock, selectors.EVENT_WRITE, host)
            else:
                failed[host] = os.strerror(code)
                sock.close()
        deadline = time.monotonic() + seconds
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                sock = key.fileobj  # type: ignore[assignment]
                if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failed[key.data] = os.strerror(code)
                selector.unregister(sock)
                sock.close()
        for key in list(selector.get_map().values()):
            failed[key.data] = f"no answer within {seconds:.0f} s"
            selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
    return sorted(failed.items())
