"""The parent's side of a cluster on several hosts: its line to the coordinator, and ranks on other hosts.

The coordinator runs on the notebook's host (nbkit/notebook/cluster/hosts). It passes messages about ranks between the
parents: a cell that failed, a rank that died. So the ranks of all hosts are released without the notebook.

When ranks are replaced, the parent of the first host decides for the ranks of all hosts. Each parent forks and reaps
the ranks of its own host. It tells the first host's parent what these ranks say about a training, and how they end.
The first host's parent sends commands for them. All these messages go through the coordinator, which keeps their order.

    RankSaid   RankStarted   RankPlaced   RankEnded   to the first host's parent
    StartRank   TellRank   DismissRank                from it, to the parent of that rank
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from nbkit.bridge.parent.spec import CoordinatorAddress
from nbkit.wire.link import SignedLink
from nbkit.wire.messages import (
    Death,
    DismissRank,
    FitEntered,
    FitLeft,
    ForCoordinator,
    ForHost,
    ForParent,
    ForRank,
    InUse,
    RankEnded,
    RankPlaced,
    RankSaid,
    RankStarted,
    StartFailed,
    StartRank,
    TellRank,
    deliver,
    handles,
)

if TYPE_CHECKING:
    from nbkit.bridge.parent.parent import Child, Parent

Line: TypeAlias = SignedLink[ForCoordinator, ForHost]

SEEN_SECONDS = 10.0  # between two messages that the cluster is in use
LOG_LINES = 15


class CoordinatorLine:
    """The line to the coordinator. gone: the coordinator has ended, or its host cannot be reached."""

    def __init__(self, line: CoordinatorAddress) -> None:
        os.set_inheritable(line.fd, False)
        sock = socket.socket(fileno=line.fd)
        self.link: Line = SignedLink(sock, line.key, opened=True, sent=line.sent, received=line.received)
        self.gone = False
        self._told = 0.0

    def receive(self) -> list[ForHost]:
        """Return the messages that have arrived. Block until there is one."""
        messages = self.link.receive()
        self.gone = messages is None
        return messages or []

    def tell_seen(self, seen: float) -> None:
        """Say that the cluster was in use at `seen` (monotonic), unless that was said a moment ago."""
        now = time.monotonic()
        if now - self._told > SEEN_SECONDS > now - seen:
            self._told = now
            self.link.send(InUse())

    def tell_failed_start(self, rank: int, how: str, log: Path) -> None:
        """Say that a rank ended before the cluster was ready, with the last lines of its log."""
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        self.link.send(StartFailed(rank, how, tuple(lines)))


class RankElsewhere:
    """A rank of another host, as the first host's parent sees it. It can be used like a Child (see parent.py).

    pid: 0 until the parent on its host has said that the rank was started.
    """

    def __init__(self, rank: int, coordinator: CoordinatorLine) -> None:
        self.rank, self.pid, self._line = rank, 0, coordinator.link
        self.fit: FitEntered | None = None
        self.dismissed = False
        self.link = self  # so that `link.send` reaches the rank

    def send(self, message: ForRank) -> None:
        """Send a message to the rank."""
        self._line.send(TellRank(self.rank, message))

    def start(self, cell: str, death: Death) -> None:
        """Have this rank started on its host, which chooses the device. It replaces a rank that died in cell `cell`."""
        self._line.send(StartRank(self.rank, cell, death))

    def dismiss(self) -> None:
        """Have the rank ended, without declaring it dead."""
        self.dismissed = True
        self._line.send(DismissRank(self.rank))


class OtherHosts:
    """The ranks of other hosts, and the messages about them. There is one per parent.

    ranks: at the first host's parent, the ranks of the other hosts; empty elsewhere and on a single host.
    undecided: at another host's parent, its ranks that have ended, until it hears if they are replaced or dead.
    """

    def __init__(self, parent: Parent) -> None:
        self.parent, spec = parent, parent.spec
        self.ranks: dict[int, RankElsewhere] = {}
        self.undecided: set[int] = set()
        self._to_start: dict[int, StartRank] = {}
        self._line = parent.coordinator
        self.decides = self._line is None or spec.base == 0
        if self._line is not None and self.decides:
            line = self._line
            self.ranks = {n: RankElsewhere(n, line) for n in range(spec.world_size) if n not in spec.ranks}

    # At another host's parent

    def tell(self, message: ForCoordinator) -> None:
        """Tell the first host's parent about a rank of this host. Does nothing on the first host."""
        if self._line is not None and not self.decides:
            self._line.link.send(message)

    def tell_said(self, child: Child, said: ForParent) -> None:
        """Pass on a message of a rank of this host about its training."""
        if self.decides:
            deliver(said, self.parent.replacer, child)
        else:
            self.tell(RankSaid(child.rank, child.pid, said))

    def tell_left(self, child: Child) -> None:
        """Say that the cell of a rank has ended, and with it a training. Does nothing on the first host."""
        self.tell(RankSaid(child.rank, child.pid, FitLeft()))

    def tell_lost(self, death: Death) -> None:
        """Say that a rank of this host has ended. The first host's parent decides what becomes of it."""
        self.undecided.add(death.rank)
        self.tell(RankEnded(death))

    @property
    def awaited(self) -> bool:
        """Return True if this parent has to stay even if it has no ranks left."""
        waits = bool(self.undecided) and not self.parent.ending
        return waits and self._line is not None and not self._line.gone

    def go_on(self) -> None:
        """Start each replacement that is due, if the old rank of that number has been reaped."""
        for rank in sorted(set(self._to_start) - set(self.parent.children)):
            asked = self._to_start.pop(rank)
            if not self.parent.ending:
                self.parent.spares.place(asked.cell, asked.death)
                self.parent.start_rank(rank, replaces=True)

    @handles(StartRank)
    def _on_start(self, start: StartRank) -> None:
        if start.rank in self.parent.spec.ranks:
            self.undecided.discard(start.rank)
            self._to_start[start.rank] = start
            self.go_on()

    @handles(TellRank)
    def _on_tell(self, tell: TellRank) -> None:
        if child := self.parent.children.get(tell.rank):
            child.link.send(tell.message)

    @handles(DismissRank)
    def _on_dismiss(self, dismiss: DismissRank) -> None:
        if child := self.parent.children.get(dismiss.rank):
            child.dismiss()

    # At the first host's parent

    def begin(self, rank: int, cell: str, death: Death) -> None:
        """Have a rank started on its own host. It replaces one that died in a training in cell `cell`."""
        if self._line is None or rank in self.parent.spec.ranks:
            self.parent.replacer.placed(rank, self.parent.spares.place(cell, death))
            self.parent.start_rank(rank, replaces=True)
            return
        there = self.ranks[rank] = RankElsewhere(rank, self._line)
        there.start(cell, death)

    @handles(RankStarted)
    def _on_started(self, started: RankStarted) -> None:
        if there := self.ranks.get(started.rank):
            there.pid = started.pid

    @handles(RankPlaced)
    def _on_placed(self, placed: RankPlaced) -> None:
        if placed.rank in self.ranks:
            self.parent.replacer.placed(placed.rank, placed.said)

    @handles(RankSaid)
    def _on_said(self, message: RankSaid) -> None:
        if there := self._newest(message.rank, message.pid):
            deliver(message.said, self.parent.replacer, there)

    @handles(RankEnded)
    def _on_ended(self, ended: RankEnded) -> None:
        if there := self._newest(ended.death.rank, ended.death.pid):
            del self.ranks[there.rank]
            death = self.parent.replacer.explained(there, replace(ended.death, pid=there.pid))
            if not self.parent.ending and not self.parent.replacer.takes(there, death):
                self.parent.declare_dead(death)

    def _newest(self, rank: int, pid: int) -> RankElsewhere | None:
        """Return the rank with this pid (0: any); None if the message is about a process that was replaced."""
        there = self.ranks.get(rank)
        return there if there is not None and pid in (there.pid, 0) else None

    # Both

    def forget(self, rank: int, how: str) -> None:
        """Forget a rank that was declared dead, on another host or on this one."""
        self.undecided.discard(rank)
        if self.ranks.pop(rank, None):
            self.parent.replacer.lost(rank, how)
