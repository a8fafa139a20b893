"""The thread that refreshes a dashboard, also while the kernel runs a cell; it rests for longer than it works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbkit.notebook.run.curve import packed
from nbkit.notebook.run.reader import RunReader

Send = Callable[[dict[str, Any], list[bytes]], None]

_CURVE_S, _PICTURE_S, _AT_MOST_S = 0.05, 0.5, 3.0
_SHARE = 0.003  # of a core, for each of the two; messages cost other threads of the kernel some more
_WHERE_S = 1.0


class RefreshThread:
    """Reads the run in the directory that `where` returns and passes what is new to `send`.

    where: the directory of the run, None when there is none yet; asked once a second. send: called on this
    thread with a message and its binary parts; see static/dashboard.js for what it may be.
    """

    def __init__(self, where: Callable[[], Path | None], send: Send) -> None:
        self._where, self._send = where, send
        self.reader: RunReader | None = None
        self._sent = (-1, 0, 0)
        self._state: dict[str, Any] = {}
        self._ended = threading.Event()
        self._lock = threading.RLock()
        self._due = [0.0, 0.0, 0.0]  # when to look for the curve, the picture, the run
        self._step: int | None = None

    def start(self) -> None:
        """Begin; ends with `stop`, or with the process."""
        threading.Thread(target=self._run, name="nbkit-dashboard", daemon=True).start()

    def stop(self) -> None:
        """No more messages."""
        self._ended.set()

    def again(self) -> None:
        """A page was opened that has nothing yet: the next message is the whole."""
        with self._lock:
            self._sent, self._state = (-1, 0, 0), {}
            if self.reader is not None and self.reader.step:
                self._send({"kind": "step", "step": self.reader.step}, [])
            self._due = [0.0, 0.0, self._due[2]]

    def show(self, step: int | None) -> None:
        """Show this step from now on; None: the newest one."""
        self._step = step
        self._due[1] = 0.0

    def turn(self, now: float) -> None:
        """One round: whatever is due by `now`, the clock of time.monotonic."""
        with self._lock:
            if now >= self._due[2]:
                self._due[2] = now + _WHERE_S
                self.find()
            if self.reader is None:
                return
            if now >= self._due[0]:
                cost = _cpu_seconds(self._tell_curve)
                self._due[0] = now + min(max(_CURVE_S, cost / _SHARE), _AT_MOST_S)
            if now >= self._due[1]:
                cost = _cpu_seconds(self._tell_picture)
                self._due[1] = now + min(max(_PICTURE_S, cost / _SHARE), _AT_MOST_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.turn(time.monotonic())
            except Exception as error:  # a picture is worth no traceback in a running notebook
                self._send({"kind": "note", "text": f"{type(error).__name__}: {error}"}, [])
                self._ended.wait(_AT_MOST_S)
            wait = min(self._due[:2] if self.reader else self._due[2:]) - time.monotonic()
            self._ended.wait(max(wait, 0.01))

    def find(self) -> None:
        """Look which run there is."""
        folder = self._where()
        if folder is None:
            if self.reader is None:
                self._tell_state({"run": "", "world": 0, "stands": "waiting", "folder": "", "goal": 0, "left": ""})
            return
        if self.reader is None or self.reader.run_dir != folder:
            self.reader = RunReader(folder)
            self._sent, self._state, self._step = (-1, 0, 0), {}, None

    def _tell_curve(self) -> None:
        assert self.reader is not None
        with self.reader.lock:
            self.reader.look()
            curve = self.reader.curve
            # Not what `look` has read: a picture reads the same file.
            if self._sent == (curve.epoch, len(curve.points), len(curve.events)):
                return
            grown = curve.since(*self._sent)
            self._sent = grown.epoch, len(curve.points), len(curve.events)
            content = {
                "kind": "curve",
                "epoch": grown.epoch,
                "keep": grown.keep,
                "strategies": list(curve.strategies),
                "events_keep": grown.events_keep,
                "events": grown.events,
            }
        self._send(content, [packed(grown.points)])

    def _tell_picture(self) -> None:
        assert self.reader is not None
        before = self.reader.step.get("asked")
        found = self.reader.picture(self._step)
        self._tell_state(self.reader.state())
        if found and (found.get("asked") != before or self._step is not None):
            self._send({"kind": "step", "step": found}, [])

    def _tell_state(self, state: dict[str, Any]) -> None:
        if state != self._state:
            self._state = state
            self._send({"kind": "state", "state": state}, [])


def _cpu_seconds(work: Callable[[], None]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
