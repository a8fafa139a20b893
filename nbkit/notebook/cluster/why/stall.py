"""Watches a running cell, and says in its output who is stuck when nothing has moved for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.notebook.cluster.output.root_cause import Death
from nbkit.notebook.cluster.registry import Entry
from nbkit.notebook.cluster.why.why import ask_why

QUIET_SECONDS = 30.0
_LOOK_SECONDS = 5.0
_ANSWER_SECONDS = 2.0


class QuietWatch:
    """Of one cell. Nothing moves when no rank issues an operation, makes a step or shows anything.

    It speaks once each time that nothing moves, and only if a rank waits for another or is held: who computes for long
    on all ranks is not stuck. Its methods run on the client's thread, but for the asking.
    """

    def __init__(self, entry: Entry, client: Client, deaths: Mapping[int, Death], execution: Execution) -> None:
        self.entry, self.client, self.deaths, self.execution = entry, client, deaths, execution
        self.moved: dict[int, Any] = {}
        self.shown = dict(execution.arrived)
        self.since, self.spoken = time.monotonic(), False

    def begin(self) -> None:
        """Look every few seconds from now on, until the cell has ended. From the client's thread."""
        self.client.later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        if self.execution.done.done():
            return
        self.begin()  # first: what fails once is tried again
        replies = self.client.request(self.execution.request.ranks, "moved")
        self.client.later(_ANSWER_SECONDS, self._compare, replies)

    def _compare(self, replies: Mapping[int, Future[Any]]) -> None:
        # A rank that does not answer has not moved, as far as anybody can tell.
        answered = {rank: reply for rank, reply in replies.items() if reply.done() and not reply.exception()}
        moved = {rank: reply.result()["content"].get("moved") for rank, reply in answered.items()}
        moved, shown = {**self.moved, **moved}, dict(self.execution.arrived)
        if (moved, shown) != (self.moved, self.shown):
            self.moved, self.shown, self.since, self.spoken = moved, shown, time.monotonic(), False
        elif not self.spoken and time.monotonic() - self.since >= QUIET_SECONDS:
            self.spoken = True
            threading.Thread(target=self._speak, name="nbkit-why", daemon=True).start()

    def _speak(self) -> None:
        why = ask_why(self.entry, self.client, self.deaths)
        if why.verdict.stuck and self.execution.stop is None and not self.execution.done.done():
            text = f"Nothing has moved for {QUIET_SECONDS:.0f} s. {why.sentence} {self._more()}"
            self.client.soon(self.execution.say, text)

    def _more(self) -> str:
        """Where there is more; the kernel is busy with a cell that it waits for."""
        return "→ %nbkit why" if self.execution.request.detached else f"→ nbkit why {self.entry.name}   in a terminal"
