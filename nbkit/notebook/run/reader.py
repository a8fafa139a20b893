"""A run for display, read from its growing record files: the loss curve, the events, single steps."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any

from nbkit.durations import text_of
from nbkit.errors import UsageError
from nbkit.notebook.cluster import site_settings
from nbkit.notebook.run.follower import Curve, Run, short
from nbkit.notebook.run.step_picture import picture
from nbkit.quoting import user_path
from nbkit.records.readings import MEDIAN_OF, STANDS, usual_steps
from nbkit.records.record_file import changed, check_format, rank_files, runs_in

_LIVE_S = 15.0
_NAMED = 5  # runs, in an error


def read_run(path: str | os.PathLike[str]) -> RunReader:
    """Read the records of a run: what every rank of a training measured. It needs no cluster, and the training may
    still run.

    The returned reader has three methods. Each call first reads newly written records.

    `snapshot()` returns plain values (dicts, lists, numbers): "state", "strategies", "points", "events", "step".
    "points" has at most 4000 lists of 7 numbers, the oldest first. Each list is about one or more steps: the last step,
    the number of steps, the seconds and the tokens since the run began, loss, tokens per second, and an index into
    "strategies". NaN means not recorded. "events" are dicts with "step", "time" (seconds since the run began), "kind"
    and the fields of that kind.

    `picture(step)` returns a dict about one step on all ranks. "ranks" has an entry for each rank; "ranks" is empty if
    no rank recorded the step. An entry has the rank, the seconds of its step, and the seconds of the parts: compute,
    exposed communication, waiting for peers, pipeline bubble, data, optimizer, other. "table" has a dict for each
    operation and axis. There, "bytes" counts what all ranks together pass to the operation, "sent" counts the bytes
    that they send (a collective counts as a ring), and "seconds" is the time. "memory" has a dict for each rank, in
    bytes. "numbers" has loss, lr and tokens of the step. Without `step`, the picture is of the newest step, but "ranks"
    and the sentence "reading" come from medians of at most 20 steps; "of" says from which steps.

    `state()` returns the name, the world size, and whether the run is active.

    path: the run's directory, for example "runs/NAME". Raises UsageError if it holds no records, or only records in
    another format.
    """
    folder = user_path(path).absolute()
    if not rank_files(folder):
        raise no_run(path, lambda run: f"nbkit.read_run({run!r})")
    check_format(folder)
    return RunReader(folder)


def no_run(path: str | os.PathLike[str], typed: Callable[[str], str]) -> UsageError:
    """Return the error for a run that does not exist. It names the five newest runs of those that exist.

    It looks for runs in `path`, in the parent of `path`, and in the user's folder of runs. It stops at the first folder
    that has some. path: what the user typed. typed: returns the line to type for the path of a run.
    """
    folder, usual = user_path(path).absolute(), user_path(site_settings.read().runs).absolute()
    runs = next((runs for place in (folder, folder.parent, usual) if (runs := runs_in(place))), [])
    names = [min(str(run), os.path.relpath(run), key=len) for run in runs[:_NAMED]]
    more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
    exist = f"runs that exist, the newest first: {', '.join(names)}{more}" if names else f"no run exists in {usual}"
    return UsageError(
        "There are no records of a run." if folder.is_dir() else "There is no such run.",
        numbers=f"{path}; {exist}",
        hint=typed(names[0]) if names else "trainer.fit(...)   in a %%distributed cell records a run",
    )


class RunReader:
    """A reader of a run directory, which may be empty. lock: needed to read `curve` or `step` in another thread."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.step: dict[str, Any] = {}  # the last picture
        self._run = Run(run_dir, newest_only=True)
        self.lock = self._run.lock

    @property
    def curve(self) -> Curve:
        """Return the loss, tokens and events that have been read so far."""
        return self._run.curve

    def look(self) -> bool:
        """Read new data of the curve from one rank's file. Return True if there was any."""
        return self._run.look()

    def picture(self, step: int | None = None) -> dict[str, Any]:
        """Return one step of all ranks, by default the newest; {} if there is none."""
        with self.lock:
            self._run.refresh()
            if not self._run.newest:
                return {}
            self.step = picture(self._run, step or self._run.newest, usual=step is None)
            return self.step

    def state(self) -> dict[str, Any]:
        """Return a dict with the state of the run.

        Its keys are "run" (its name), "folder", "world", "stands" ("running", "ended: WHY", "quiet"), "goal", "left",
        "rate", "unit".

        quiet: nothing has been written for 15 s. goal: the step at which it ends, which counts the steps of earlier
        trainings in the same run, like the curve; 0 if unknown. left: the time to that step in words, if steps take as
        long as the newest 20 under the current strategy; "" if unknown. rate: tokens per second, the median of these
        steps; None if unknown. unit: "tokens", or "rows" if the training reads no sequences. Then each row counts as
        one token.
        """
        with self.lock:
            last = next((e for e in reversed(self.curve.events) if e["kind"] in ("run_started", "run_stopped")), None)
            path = self._run.files.get(self._run.first)
            quiet = path is None or time.time() - changed(path) > _LIVE_S
            if last is not None and last["kind"] == "run_stopped":
                stands = f"ended: {last.get('reason', '')}"
            elif quiet and self.curve.events and _ends(event := self.curve.events[-1]):
                stands = f"ended: {event.get('what', '')}"  # this rank could not record its own end
            else:
                stands = "quiet" if quiet else "running"
            goal, points = _goal(self.curve.events), self.curve.points
            rate = _rate(points)
            return {
                "run": self.run_dir.name,
                "folder": str(self.run_dir),
                "world": self._run.world_size,
                "stands": stands,
                "goal": goal,
                "left": _left(points, goal, rate) if stands == "running" else "",
                "rate": rate,
                "unit": self.curve.unit,
            }

    def snapshot(self, *, anew: bool = True, steps: tuple[int, int] | None = None) -> dict[str, Any]:
        """Return everything that views draw, as plain values: {"state", "strategies", "points", "events", "step"}.

        state: see `state`. events: the same as for sinks. points: rows of step, span, time, tokens, loss, rate, and
        strategy (an index into strategies). step: the newest measured step, by part and rank.

        anew: make a new picture of a step, which takes most of the time. steps: the first and the last step to return;
        then the picture is of the last one.
        """
        with self.lock:
            self.look()
            first, last = steps or (0, math.inf)
            if anew:
                self.picture(steps[1] if steps and self.curve.points and self.curve.points[-1][0] >= last else None)
            points = [list(point) for point in self.curve.points if first <= point[0] <= last]
            told = {"goal": 0, "left": "", "rate": _rate(points) if points else None} if steps else {}
            return {
                "state": self.state() | told,
                "epoch": self.curve.epoch,
                "strategies": list(self.curve.strategies),
                "points": points,
                "events": [event for event in self.curve.events if first - 1 <= event["step"] <= last],
                "step": self.step,
            }


def _ends(event: dict[str, Any]) -> bool:
    """Return True if a training ends with this event. After a failed switch it goes on."""
    return event["kind"] == "failure" and event.get("error") != "SwitchError"


def _points_of_strategy(points: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Return the newest points, as far back as the strategy is the current one."""
    newest = reversed(points[-MEDIAN_OF - STANDS - 1 :])
    return list(takewhile(lambda point: point[6] == points[-1][6], newest))[::-1]


def _usual_range(alike: Sequence[Sequence[float]]) -> range:
    """Return the steps whose medians describe the current strategy; see `usual_steps`."""
    return usual_steps(int(alike[-1][0]), int(alike[0][0])) if alike else range(0)


def _left(points: Sequence[Sequence[float]], goal: int, rate: float | None) -> str:
    """Return the time left as text, "" if it is under a second or unknown.

    If tokens are recorded, it is computed from the displayed rate, so that all views agree.
    """
    column, alike = 3 if rate else 2, _points_of_strategy(points)
    each = [(b[column] - a[column]) / b[1] for a, b in pairwise(alike) if int(b[0]) in _usual_range(alike)]
    seconds = (goal - points[-1][0]) * median(each) / (rate or 1.0) if each else 0.0
    return f"{text_of(seconds)} to go" if seconds >= 1 else ""


def _rate(points: Sequence[Sequence[float]]) -> float | None:
    alike = _points_of_strategy(points)
    known = [point[5] for point in alike if int(point[0]) in _usual_range(alike) and math.isfinite(point[5])]
    return float(short(median(known))) if known else None


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
