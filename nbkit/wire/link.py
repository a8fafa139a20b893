"""A line between two processes of a cluster: JSON lines over a socket.

Between the parent that forked the ranks and one rank it is a socket pair. It exists before the rank does, so it needs
no address, no port and no key, and it works when no notebook is there and when ipyparallel's channels are stuck behind
a busy interpreter. Between hosts it is a TCP connection, and every message is signed: see `SignedLink`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

SEND_SECONDS = 20  # in which the other end takes something of a message
SILENT_SECONDS = 4  # a host that acknowledges nothing for so long is taken for gone


class Link:
    """One end of the line. Sending is thread-safe; a vanished other end is silent (its process is ending)."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        # The network, or the other host, did not answer: here, or there, where this host was given up (a reset).
        # A process that ended closes its end, which is neither.
        self.broke = False
        self.closed = False  # in order, by the other end or the system behind it
        self._lock = threading.Lock()
        self._rest = b""
        # Nobody waits for ever for a process that reads nothing, such as one that was suspended.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_SECONDS, 0))

    def send(self, **message: Any) -> None:
        with self._lock:
            try:
                self.sock.sendall(self._packed(json.dumps(message).encode()) + b"\n")
            except BlockingIOError:  # a part of the message is on its way: nothing that follows could be read
                with suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that have arrived; blocks for the first. None: the other end is gone."""
        try:
            data = self.sock.recv(65536)
        except OSError as error:
            self.broke = isinstance(error, ConnectionResetError) or not isinstance(error, ConnectionError)
            return None
        if not data:
            self.closed = True
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            return [json.loads(self._unpacked(line)) for line in lines]
        except ValueError:  # not ours: nothing that comes after it is believed either
            return None

    def _packed(self, text: bytes) -> bytes:
        return text

    def _unpacked(self, line: bytes) -> bytes:
        return line

    def listen(self, on_message: Callable[[dict[str, Any]], None], on_end: Callable[[], None]) -> None:
        """Read in a daemon thread until the other end is gone."""

        def read() -> None:
            while (messages := self.receive()) is not None:
                for message in messages:
                    on_message(message)
            on_end()

        threading.Thread(target=read, name="nbkit-link", daemon=True).start()


class SignedLink(Link):
    """A line between hosts. A message carries an HMAC of its direction, its number and its text, so that who does not
    know the key can neither add, change, repeat nor reorder one.

    key: of this connection alone, see `key_of`. opened: whether this end has made the connection. sent, received: how
    many messages have gone each way, for an end that a process hands to its successor.
    """

    def __init__(self, sock: socket.socket, key: str, *, opened: bool, sent: int = 0, received: int = 0) -> None:
        super().__init__(sock)
        self.key, self.opened, self.sent, self.received = key, opened, sent, received
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel asks the other host, so that neither a busy nor a suspended process seems to be gone.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", SILENT_SECONDS - 1)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)

    def _packed(self, text: bytes) -> bytes:
        mark = self._mark(self.opened, self.sent, text)
        self.sent += 1
        return mark + b" " + text

    def _unpacked(self, line: bytes) -> bytes:
        mark, _, text = line.partition(b" ")
        if not hmac.compare_digest(mark, self._mark(not self.opened, self.received, text)):
            raise ValueError("a message that is not signed with this connection's key")
        self.received += 1
        return text

    def _mark(self, from_opener: bool, number: int, text: bytes) -> bytes:
        head = f"{int(from_opener)} {number} ".encode()
        return hmac.new(self.key.encode(), head + text, hashlib.sha256).hexdigest().encode()


def key_of(secret: str, nonce: str) -> str:
    """Return the key of one connection. nonce: what its listening end has drawn, so that no message fits another
    one."""
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest()
