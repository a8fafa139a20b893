"""The parent's side of a cluster on several hosts: its line to the coordinator, and ranks on other hosts.

The coordinator runs on the notebook's host (nbkit/notebook/cluster/hosts). It passes messages about ranks between the
parents: a cell that failed, a rank that died. So the ranks of all hosts are released without the notebook.

When ranks are replaced, the parent of the first host decides for the ranks of all hosts. Each parent forks and reaps
the ranks of its own host. It tells the first host's parent what they say about a training, and how they end. Commands
for these ranks come back. Both go through the coordinator, which keeps their order.

    of_rank   started   placed   lost   to the first host's parent
    start_rank   to_rank   dismiss      from it, to the parent of that rank
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from nbkit.bridge.parent.child_processes import kill_group
from nbkit.bridge.parent.spec import CoordinatorAddress
from nbkit.wire.link import SignedLink
from nbkit.wire.messages import Death, FitLeft, ForParent, ForRank, decoded, deliver, encoded, from_plain

SEEN_SECONDS = 10.0  # between two messages that the cluster is in use
LOG_LINES = 15


class CoordinatorLine:
    """The line to the coordinator. gone: the coordinator has ended, or its host cannot be reached."""

    def __init__(self, line: CoordinatorAddress) -> None:
        os.set_inheritable(line.fd, False)
        sock = socket.socket(fileno=line.fd)
        self.link = SignedLink(sock, line.key, opened=True, sent=line.sent, received=line.received)
        self.gone = False
        self._told = 0.0

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come; blocks for the first."""
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


_TO_FIRST = ("of_rank", "started", "placed", "lost")
_FROM_FIRST = ("start_rank", "to_rank", "dismiss")


class HostParent(Protocol):
    """The part of `Parent` that is used here. nbkit.bridge.parent.parent imports this file."""

    coordinator: CoordinatorLine | None
    ending: bool
    spec: Any
    replacer: Any
    spares: Any

    @property
    def children(self) -> dict[int, Any]: ...

    def start_rank(self, rank: int, *, replaces: bool = False) -> None: ...

    def declare_dead(self, death: Death) -> None: ...


class RankElsewhere:
    """A rank of another host, as the first host's parent sees it. It can be used like a Child (see parent.py).

    pid: 0 until its own parent has said that it is started.
    """

    def __init__(self, rank: int, coordinator: CoordinatorLine) -> None:
        self.rank, self.pid, self._line = rank, 0, coordinator.link
        self.seat: Any = None
        self.dismissed = False
        self.link = self  # so that `link.send` reaches the rank

    def send(self, message: ForRank) -> None:
        """Send a message to the rank."""
        self._line.send(event="to_rank", rank=self.rank, word=encoded(message))

    def start(self, cell: str, death: Death) -> None:
        """Have it started in the place of a rank that died in that cell, on the device that its host chooses."""
        self._line.send(event="start_rank", rank=self.rank, cell=cell, death=asdict(death))

    def dismiss(self) -> None:
        """Have it ended, without declaring it dead."""
        self.dismissed = True
        self._line.send(event="dismiss", rank=self.rank)


class OtherHosts:
    """The ranks of other hosts, and the messages about them. There is one per parent.

    ranks: at the first host's parent, the ranks of the other hosts; empty elsewhere and on a single host.
    undecided: at another host's parent, its ranks that have ended, until it hears what becomes of them.
    """

    def __init__(self, parent: HostParent) -> None:
        self.parent, spec = parent, parent.spec
        self.ranks: dict[int, RankElsewhere] = {}
        self.undecided: set[int] = set()
        self._to_start: dict[int, dict[str, Any]] = {}  # rank -> message: whom it replaces, in which cell
        self._line = parent.coordinator
        self.decides = self._line is None or spec.base == 0
        if self._line is not None and self.decides:
            line = self._line
            self.ranks = {n: RankElsewhere(n, line) for n in range(spec.world_size) if n not in spec.ranks}

    # At another host's parent

    def tell(self, event: str, rank: int, **more: Any) -> None:
        """Tell the first host's parent about a rank of this host."""
        if self._line is not None and not self.decides:
            self._line.link.send(event=event, rank=rank, **more)

    def tell_said(self, child: Any, said: ForParent) -> None:
        """Pass on a message of a rank of this host about its training."""
        if self.decides:
            deliver(said, self.parent.replacer, child)
        else:
            self.tell("of_rank", child.rank, pid=child.pid, said=encoded(said))

    def tell_left(self, child: Any) -> None:
        """Say that the cell of a rank has ended, and with it a training. Does nothing on the first host."""
        self.tell("of_rank", child.rank, pid=child.pid, said=encoded(FitLeft()))

    def tell_lost(self, death: Death) -> None:
        """Say that a rank of this host has ended. The first host's parent decides what becomes of it."""
        self.undecided.add(death.rank)
        self.tell("lost", **asdict(death))

    @property
    def awaited(self) -> bool:
        """Return True if this parent has to stay even if it has no ranks left."""
        waits = bool(self.undecided) and not self.parent.ending
        return waits and self._line is not None and not self._line.gone

    def go_on(self) -> None:
        """Start the ranks that are due, once the old rank of that number has been reaped."""
        for rank in sorted(set(self._to_start) - set(self.parent.children)):
            asked = self._to_start.pop(rank)
            if not self.parent.ending:
                self.parent.spares.place(asked["cell"], from_plain(Death, asked["death"]))
                self.parent.start_rank(rank, replaces=True)

    # At the first host's parent

    def begin(self, rank: int, cell: str, death: Death) -> None:
        """Have a rank started on its own host, in the place of one that died in a training in that cell."""
        if self._line is None or rank in self.parent.spec.ranks:
            self.parent.replacer.placed(rank, self.parent.spares.place(cell, death))
            self.parent.start_rank(rank, replaces=True)
            return
        there = self.ranks[rank] = RankElsewhere(rank, self._line)
        there.start(cell, death)

    # Both

    def forget(self, rank: int, how: str) -> None:
        """Forget a rank that was declared dead, on another host or on this one."""
        self.undecided.discard(rank)
        if self.ranks.pop(rank, None):
            self.parent.replacer.lost(rank, how)

    def hear(self, event: str, message: dict[str, Any]) -> bool:
        """Handle a message of the coordinator. Returns False if it is not about ranks of other hosts."""
        rank = message["rank"] if event in (*_TO_FIRST, *_FROM_FIRST) else -1
        if event in _TO_FIRST and (there := self.ranks.get(rank)) is not None:
            self._hear_of(there, event, message)
        elif event in _FROM_FIRST and rank in self.parent.spec.ranks:
            self._do(event, rank, message)
        return rank >= 0

    def _hear_of(self, there: RankElsewhere, event: str, message: dict[str, Any]) -> None:
        if event == "started":
            there.pid = message["pid"]
        elif event == "placed":
            self.parent.replacer.placed(there.rank, message["said"])
        elif message["pid"] not in (there.pid, 0):  # about a process that was replaced meanwhile
            return
        elif event == "of_rank":
            deliver(decoded(message["said"]), self.parent.replacer, there)
        else:
            del self.ranks[there.rank]
            death = self.parent.replacer.explained(there, replace(from_plain(Death, message), pid=there.pid))
            if not self.parent.ending and not self.parent.replacer.takes(there, death):
                self.parent.declare_dead(death)

    def _do(self, event: str, rank: int, message: dict[str, Any]) -> None:
        child = self.parent.children.get(rank)
        if event == "start_rank":
            self.undecided.discard(rank)
            self._to_start[rank] = message
            self.go_on()
        elif child is not None and event == "to_rank":
            child.link.send(decoded(message["word"]))
        elif child is not None:
            child.dismissed = True
            kill_group(child.pid)
