"""The coordinator of a cluster on several hosts, as the parent of one host's ranks sees it.

It passes on between the parents what each of them tells of its ranks: a cell that failed, a rank that died. So the
ranks of all hosts are released without the notebook. It runs on the notebook's host (nbkit/notebook/cluster/hosts).
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from nbkit.bridge.parent.spec import Line
from nbkit.wire.link import SignedLink

SEEN_SECONDS = 10.0  # between two messages that somebody uses the cluster
LOG_LINES = 15


class Coordinator:
    """The line to it. gone: it has ended, or its host cannot be reached."""

    def __init__(self, line: Line) -> None:
        os.set_inheritable(line.fd, False)
        sock = socket.socket(fileno=line.fd)
        self.link = SignedLink(sock, line.key, opened=True, sent=line.sent, received=line.received)
        self.gone = False
        self._told = 0.0

    def receive(self) -> list[dict[str, Any]]:
        """What it has sent; blocks for the first message."""
        messages = self.link.receive()
        self.gone = messages is None
        return messages or []

    def tell_seen(self, seen: float) -> None:
        """Say that the cluster was in use at `seen` (monotonic), unless that was said a moment ago."""
        now = time.monotonic()
        if now - self._told > SEEN_SECONDS > now - seen:
            self._told = now
            self.link.send(event="seen")

    def tell_failed_start(self, rank: int, how: str, log: Path) -> None:
        """Say that a rank ended before the cluster was ready, with the last lines of its log."""
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        self.link.send(event="start_failed", rank=rank, how=how, log=lines)
