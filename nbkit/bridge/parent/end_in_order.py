"""The end of the ranks of one host that their user has not asked for: a training is saved at its next step boundary.

Batch systems ask so by SIGTERM before they kill: at a job's time limit, or for a job that goes before it. Some say it
twice. On a cluster of several hosts the coordinator is told, which knows more about why, and tells the other hosts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from nbkit.bridge.parent.child_processes import log
from nbkit.bridge.parent.other_hosts import CoordinatorLine

END_SECONDS = 600.0  # for a training to reach a boundary and to be saved; whoever sends SIGTERM gives less


class Parent(Protocol):
    """nbkit.bridge.parent.parent's, which imports this file: what is used of it. children: by rank."""

    coordinator: CoordinatorLine | None
    ending: bool

    @property
    def children(self) -> Mapping[int, Any]: ...

    def end_all(self, why: str) -> None: ...


class EndInOrder:
    """One per parent. asked: by a signal, which does nothing else, so that it can come at any time."""

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self.asked, self.why, self.deadline = False, "", float("inf")

    def go_on(self) -> None:
        """Do what the signal has asked for, and do not wait forever for what was begun."""
        if self.asked:
            self.asked = False  # what comes again finds that the end was begun
            if self.parent.coordinator:
                self.parent.coordinator.link.send(event="told_to_end")
            if not self.parent.ending:
                self.begin("the cluster was told to end (SIGTERM)")
        if time.monotonic() > self.deadline:
            self.deadline = float("inf")
            self.parent.end_all("the training did not end in time")

    def begin(self, why: str, *, now: bool = True) -> None:
        """End every rank: one that trains after its next step boundary, where it is saved; if none does, at once.

        now: what runs besides trainings is not waited for.
        """
        parent = self.parent
        if parent.ending and not self.why:  # at once, and that was begun
            return
        if not parent.ending and not any(child.cells for child in parent.children.values()):
            parent.end_all(why)
            return
        parent.ending = True
        if now:
            self.deadline = min(self.deadline, time.monotonic() + END_SECONDS)
        self.tell(why, now=now)

    def tell(self, why: str, *, now: bool) -> None:
        """Tell the ranks to end, once for each reason. now: one that does not train ends at once."""
        if why != self.why:
            self.why = why
            log(f"a training is to end in order: {why}")
            for child in self.parent.children.values():
                child.link.send(do="end", why=why, now=now)
