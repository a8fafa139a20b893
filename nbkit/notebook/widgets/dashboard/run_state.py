"""What a dashboard shows of a run, kept up to date from its record files. No widget in here.

The curve is read from one rank's file, often: the numbers of a step are equal on all of them. The picture of a step
needs every rank's file, and is made as often as its cost allows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbkit.notebook.board.plugin.run_follower import Run
from nbkit.notebook.board.plugin.step_picture import picture
from nbkit.notebook.widgets.loss_curve import Curve
from nbkit.records.record_file import START, cursor_near_end, rank_files, read_head, read_overview, read_since
from nbkit.records.record_lookup import events_of
from nbkit.records.records import EventRecord, Header, Record, StepRecord

__all__ = ["Feed"]

_LIVE_S = 15.0


class Feed:
    """One run directory. `look` and `picture` read what is new; lock: for whoever reads beside them."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.lock = run_dir, threading.RLock()
        self.curve = Curve()
        self.step: dict[str, Any] = {}
        self._run = Run(run_dir, passing=True)
        self._file: Path | None = None
        self._cursor = START
        self._size = -1

    def look(self) -> bool:
        """Read what is new of the curve; whether anything is."""
        with self.lock:
            if self._file is None and not self._find():
                return False
            assert self._file is not None
            try:
                size = self._file.stat().st_size
            except FileNotFoundError:
                return False  # a new part is being begun
            if size == self._size:
                return False
            self._size = size
            records, self._cursor = read_since(self._file, self._cursor)
            for record in records:
                self._take(record)
            return bool(records)

    def picture(self, step: int | None = None) -> dict[str, Any]:
        """One step of all ranks, the newest or the one asked for; {} when there is none."""
        with self.lock:
            self._run.refresh()
            self._hear_of_failures()
            newest = self._run.newest
            if not newest:
                return {}
            self.step = picture(self._run, step or newest)
            return self.step

    def state(self) -> dict[str, Any]:
        """Name, world size, how the run stands: "running", "ended" (why), or "quiet" when nothing comes; and its goal.

        goal: the step that it ends with, steps of earlier runs counted as they are in the curve; 0 when not known.
        """
        with self.lock:
            last = next((e for e in reversed(self.curve.events) if e["kind"] in ("run_started", "run_stopped")), None)
            quiet = self._file is None or time.time() - _changed(self._file) > _LIVE_S
            if last is not None and last["kind"] == "run_stopped":
                stands = f"ended: {last.get('reason', '')}"
            elif quiet and self.curve.events and _ends(event := self.curve.events[-1]):
                stands = f"ended: {event.get('what', '')}"  # this rank could not tell any more
            else:
                stands = "quiet" if quiet else "running"
            return {
                "run": self.run_dir.name,
                "folder": str(self.run_dir),
                "world": self._run.world_size,
                "stands": stands,
                "goal": _goal(self.curve.events),
            }

    def snapshot(self, *, anew: bool = True) -> dict[str, Any]:
        """Everything there is to draw, as plain values. anew: with a new picture of a step, which costs the most."""
        with self.lock:
            self.look()
            if anew:
                self.picture()
            return {
                "state": self.state(),
                "epoch": self.curve.epoch,
                "strategies": list(self.curve.strategies),
                "points": [list(point) for point in self.curve.points],
                "events": list(self.curve.events),
                "step": self.step,
            }

    def _hear_of_failures(self) -> None:
        """The rank that fails says most of it, and one that died says nothing: all are listened to."""
        known = [{key: value for key, value in one.items() if key != "time"} for one in self.curve.events]
        for event in self._run.events:
            if event["kind"] == "failure" and event not in known:
                self.curve.take_event(EventRecord(event["step"], event=event))

    def _find(self) -> bool:
        files = rank_files(self.run_dir)
        if not files:
            return False
        self._file = path = files[min(files)]
        self._cursor = cursor_near_end(path)
        if self._cursor == START:
            return True
        # What lies before the cursor: the overview, and the events that are still there.
        for record in read_head(path):
            self._take(record)
        recent, self._cursor = read_since(path, self._cursor)
        first = next((one.step for one in recent if isinstance(one, StepRecord)), None)
        past = read_overview(path)
        first = first or max((one.step for one in past), default=0) + 1
        for step in past:
            if step.step < first:
                self._take(step)
        for event in events_of(path):
            if event.step < first and event not in recent:
                self._take(event)
        for record in recent:
            self._take(record)
        return True

    def _take(self, record: Record) -> None:
        if isinstance(record, Header):
            self.curve.take_header(record)
        elif isinstance(record, StepRecord):
            self.curve.take_step(record)
        elif isinstance(record, EventRecord):
            self.curve.take_event(record)


def _ends(event: dict[str, Any]) -> bool:
    """Whether a training ends with it; it goes on after a switch that failed."""
    return event["kind"] == "failure" and event.get("error") != "SwitchError"


def _goal(events: Sequence[dict[str, Any]]) -> int:
    goal = 0
    for event in events:
        if event["kind"] == "run_started":
            goal = event["step"] + event["total"] if event.get("total") else 0
        elif event["kind"] == "run_stopped":
            goal = 0
        elif event.get("action") == "loaded" and goal:
            goal += event["step"] - event.get("before", event["step"])
    return goal


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
