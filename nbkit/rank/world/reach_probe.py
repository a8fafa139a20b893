"""Whether hosts can connect to each other, found before their ranks form a world, which would wait for it for a minute.

Each host listens at its address for a moment, and tries to connect to the others. Nothing is sent.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Sequence

from nbkit.rank.world.rank_place import open_listener

ANSWER_SECONDS = 5.0  # the system asks again after 1 s and after 3 s

_listening: socket.socket | None = None


def open_probe(address: str) -> int:
    """Listen at `address`; the port. The system itself takes the connections."""
    global _listening
    _listening = open_listener(address)
    return int(_listening.getsockname()[1])


def close_probe() -> None:
    global _listening
    if _listening is not None:
        _listening.close()
    _listening = None


def hosts_to_try(own: int, n: int) -> list[int]:
    """Which of `n` hosts number `own` tries: all of up to five, of more about 2 log2 n, so that each is tried too."""
    steps = [1 << power for power in range(max(1, n.bit_length()))]
    return sorted({(own + sign * step) % n for step in steps for sign in (1, -1)} - {own})


def unanswered(places: Sequence[tuple[str, int]], seconds: float = ANSWER_SECONDS) -> dict[int, str]:
    """Try to connect to each (address, port), all at once: those that did not work, with what the system says."""
    failed: dict[int, str] = {}
    with selectors.DefaultSelector() as selector:
        for number, (address, port) in enumerate(places):
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            sock.setblocking(False)
            if (code := sock.connect_ex((address, port))) in (0, errno.EINPROGRESS):
                selector.register(sock, selectors.EVENT_WRITE, number)
            else:
                failed[number] = os.strerror(code)
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
    return failed
