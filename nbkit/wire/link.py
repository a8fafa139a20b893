"""A line between two processes of a cluster: messages as JSON lines over a socket (see messages.py).

Between the parent of the ranks and a rank it is a socket pair. It exists before the rank does, so it needs no address,
no port and no key. It works without a notebook, and while ipyparallel's channels are stuck behind a busy interpreter.
Between hosts it is a TCP connection, and every message is signed: see `SignedLink`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar, cast

from nbkit.wire.messages import Message, ProtocolError, decoded, encoded

SEND_SECONDS = 20  # time for the other end to take a part of a message
SILENT_SECONDS = 4  # a host that acknowledges nothing for this time counts as gone


Sent = TypeVar("Sent", bound=Message)
Received = TypeVar("Received", bound=Message)


class Link(Generic[Sent, Received]):
    """An end of the line. The types are the messages sent and received: a parent has a Link[ForRank, ForParent].

    Sending is thread-safe. It does nothing if the other end is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        # True if the network or the other host did not answer, or if the other host has reset the connection.
        # False if the other process has simply ended: then its end is closed.
        self.broke = False
        self.closed = False  # True if the other end, or its system, has closed the connection normally
        self.refused: ProtocolError | None = None  # why the last message could not be read
        self.fault = ""  # the same in words, or why the bytes are no message; "" if the other end has closed
        self.longest: int | None = None  # limit on the bytes of a message; None: no limit
        self._lock = threading.Lock()
        self._rest = b""
        # Do not wait forever for a process that reads nothing, such as a suspended one.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_SECONDS, 0))

    def send(self, message: Sent) -> None:
        with self._lock:
            try:
                self.sock.sendall(self._packed(json.dumps(encoded(message)).encode()) + b"\n")
            except BlockingIOError:  # only a part of the message was sent, so nothing after it could be read
                with suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    def receive(self) -> list[Received] | None:
        """Return the messages that have arrived. Block until there is one. Return None if the other end is gone.

        Also return None after a message that cannot be read, because nothing after it can be trusted.
        """
        try:
            data = self.sock.recv(65536)
        except OSError as error:
            self.broke = isinstance(error, ConnectionResetError) or not isinstance(error, ConnectionError)
            return None
        if not data:
            self.closed = True
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self.longest is not None and max(map(len, (*lines, self._rest))) > self.longest:
            self.fault = f"a message of more than {self.longest:,} bytes"
            return None
        try:
            return [cast(Received, decoded(json.loads(self._unpacked(line)))) for line in lines]
        except ProtocolError as error:
            self.refused, self.fault = error, str(error)
            return None
        except ValueError as error:  # not a message of nbkit
            self.fault = str(error)
            return None

    def _packed(self, text: bytes) -> bytes:
        return text

    def _unpacked(self, line: bytes) -> bytes:
        return line

    def listen(self, on_message: Callable[[Received], None], on_end: Callable[[], None]) -> None:
        """Read in a daemon thread until the other end is gone."""

        def read() -> None:
            while (messages := self.receive()) is not None:
                for message in messages:
                    on_message(message)
            if self.refused:
                print(self.refused, file=sys.__stderr__, flush=True)
            on_end()

        threading.Thread(target=read, name="nbkit-link", daemon=True).start()


class SignedLink(Link[Sent, Received]):
    """A line between hosts.

    Each message carries an HMAC of its direction, its number and its text. Without the key nobody can add, change,
    repeat or reorder messages.

    key: the key of this connection, see `key_of`. opened: True if this end has opened the connection. sent, received:
    numbers of messages so far, if this process takes over the end of another process.
    """

    def __init__(self, sock: socket.socket, key: str, *, opened: bool, sent: int = 0, received: int = 0) -> None:
        super().__init__(sock)
        self.key, self.opened, self.sent, self.received = key, opened, sent, received
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The operating systems check the connection, so a busy or suspended process does not seem to be gone.
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
    """Return the key of one connection.

    nonce: a random text from the end that listens. Because of it, no message is valid on another connection.
    """
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest()
