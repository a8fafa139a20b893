"""Comms of a rank: what its widgets tell the pages that show them, at a pace that pages can follow.

A progress bar tells its state thirty times a second. Such updates are held for a moment and sent as one; they are not
counted among the cell's outputs, nor kept. What has changed by the end of the cell is sent once more, counted and kept:
a bar that is over stands where it ended, also in a notebook that comes later.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbkit.bridge.output.output_widgets import OutputWidgets

PACE_SECONDS = 0.1  # between two updates of one widget
CHARACTERS_PER_SECOND = 2_000_000  # of large ones

Keep = Callable[[str, dict[str, Any]], dict[str, Any]]


@dataclass
class _Update:
    """An update of a widget's state. state: all that it has told since the cell began. waiting: what has not gone."""

    stream: Any
    options: dict[str, Any]
    state: dict[str, Any]
    waiting: dict[str, Any]


class Comms:
    """One per rank.

    send: the session's own. keep: counts and keeps a message of the cell that runs, and gives its mark; mark: gives one
    for a message that is not counted.
    """

    def __init__(self, send: Callable[..., Any], keep: Keep, mark: Callable[[], dict[str, Any]]) -> None:
        self._send, self._keep, self._mark = send, keep, mark
        self._output_widgets = OutputWidgets()
        self._updates: dict[str, _Update] = {}
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()

    def send(self, stream: Any, kind: str, content: dict[str, Any], **options: Any) -> None:
        """A comm's `send`: publish its message with the mark of the running cell."""
        comm, data, widgets = content["comm_id"], content.get("data") or {}, self._output_widgets
        with self._lock:
            if _is_update(kind, data, options.get("buffers")):
                update = self._updates.setdefault(comm, _Update(stream, options, {}, {}))
                self._hold(update, widgets.on_update(comm, data["state"]))
            elif not widgets.is_echo(comm, data):
                self._let_go(comm, counted=False)  # what came before it has to arrive before it
                mark = self._mark() if kind == "comm_msg" else self._kept(kind, content, options)
                self._send(stream, kind, content, **_marked(options, mark))
            if kind == "comm_open":
                widgets.on_open(comm, data.get("state") or {})
            elif kind == "comm_close":
                widgets.on_close(comm)
                self._updates.pop(comm, None)
        widgets.tell_objects()

    def take(self, kind: str, content: dict[str, Any]) -> bool:
        """Whether what is output now goes into a widget, and not into the cell."""
        with self._lock:
            taken = self._output_widgets.take(kind, content)
            if taken is not None:
                self._hold(self._updates[taken[0]], taken[1])
            return taken is not None

    def settle(self) -> None:
        """The cell is about to end: what has changed in it goes out, and is counted."""
        with self._lock:
            for comm in list(self._updates):
                self._let_go(comm, counted=True)

    def _hold(self, update: _Update, state: dict[str, Any]) -> None:
        update.state.update(state)
        update.waiting.update(state)
        if state and self._timer is None:
            size = sum(len(str(value)) for value in state.values())
            self._timer = threading.Timer(PACE_SECONDS + size / CHARACTERS_PER_SECOND, self._on_time)
            self._timer.daemon = True
            self._timer.start()

    def _on_time(self) -> None:
        with self._lock:
            self._timer = None
            for comm in list(self._updates):
                self._let_go(comm, counted=False)

    def _let_go(self, comm: str, *, counted: bool) -> None:
        update = self._updates.get(comm)
        if update is None or not (update.state if counted else update.waiting):
            return
        state, update.waiting = (update.state if counted else update.waiting), {}
        content = {"comm_id": comm, "data": {"method": "update", "state": state, "buffer_paths": []}}
        if counted:
            update.state = {}
        mark = self._kept("comm_msg", content, update.options) if counted else self._mark()
        self._send(update.stream, "comm_msg", content, **_marked(update.options, mark))

    def _kept(self, kind: str, content: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """Counts and keeps a message, with what JSON cannot hold as text; its mark."""
        buffers = [base64.b64encode(bytes(buffer)).decode() for buffer in options.get("buffers") or ()]
        return self._keep(kind, {**content, "metadata": options.get("metadata") or {}, "buffers": buffers})


def _marked(options: dict[str, Any], mark: dict[str, Any]) -> dict[str, Any]:
    return {**options, "metadata": {**(options.get("metadata") or {}), "nbkit": mark}}


def _is_update(kind: str, data: dict[str, Any], buffers: Any) -> bool:
    """Whether it is the new state of a widget, of which a later one makes it needless."""
    return kind == "comm_msg" and data.get("method") == "update" and "state" in data and not buffers
