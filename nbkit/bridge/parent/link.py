"""The line between the parent that forked the ranks and one rank: JSON lines over a socket pair.

It exists before the rank does, so it needs no address, no port and no key, and it works when no notebook is
there and when ipyparallel's channels are stuck behind a busy interpreter.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any


class Link:
    """One end of the line. Sending is thread-safe; a vanished other end is silent (its process is ending)."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()
        self._rest = b""

    def send(self, **message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self.sock.sendall(data)
        except OSError:
            return

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that have arrived; blocks for the first. None: the other end is gone."""
        try:
            data = self.sock.recv(65536)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def listen(self, on_message: Callable[[dict[str, Any]], None], on_end: Callable[[], None]) -> None:
        """Read in a daemon thread until the other end is gone."""

        def read() -> None:
            while (messages := self.receive()) is not None:
                for message in messages:
                    on_message(message)
            on_end()

        threading.Thread(target=read, name="nbkit-link", daemon=True).start()
