"""TensorBoard's tab "Communication": a page, and JSON that the page requests every second.

    runs                                    one line for each run
    newest                                  a value that changes when TensorBoard's own tabs have something new
    poll?run=&epoch=&points=&events=        what was added to a run's timeline since the reader's cursor
    step?run=&step=N|newest&replica=        one step

Everything is read from the runs' record files, not from TensorBoard's event files. `RunCatalog` has the runs under a
log directory, with a summary of each.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from nbkit.figures import unit_of
from nbkit.notebook.run.follower import PARTS, Run, point_of, rate_of, short, strategy_of
from nbkit.notebook.run.step_picture import lateness, picture
from nbkit.records.events import RunStopped
from nbkit.records.readings import MEDIAN_OF, STANDS, bars, busiest, members_of, usual_bars, usual_steps
from nbkit.records.record_file import changed, groups_of, overview_of, rank_files, read_head
from nbkit.records.records import EventRecord, Group, Header, StepRecord, from_line

_DEPTH = 4
_LOOK_S = 2.0
_LIVE_S = 15.0
_OPEN_AT_MOST = 4
_TAIL_BYTES = 128 << 10


class RunCatalog:
    """The runs under `logdir` (None: no directory). A run's name is its path relative to `logdir`. Not thread-safe."""

    def __init__(self, logdir: Path | None) -> None:
        self.logdir = logdir
        self._folders: dict[str, Path] = {}
        self._written: list[Path] = []
        self._looked = float("-inf")
        self._open: dict[str, Run] = {}
        self._summaries: dict[str, tuple[float, dict[str, Any]]] = {}

    def open(self, name: str) -> Run | None:
        """Return the run with that name, or None. If too many runs are open, close the least recently used one."""
        self._look()
        if name not in self._folders:
            return None
        run = self._open.pop(name, None) or Run(self._folders[name])
        self._open[name] = run
        while len(self._open) > _OPEN_AT_MOST:
            del self._open[next(iter(self._open))]
        return run

    def summaries(self) -> list[dict[str, Any]]:
        """Return a summary of each run. Live runs come first, then the newest.

        seconds (wall clock), parts, rate, and sent (of the busiest rank) are medians of the newest steps under the
        current strategy. loss: the newest loss. unit: the unit of the rate, "tokens" or "rows".
        """
        self._look()
        found = []
        for name, folder in self._folders.items():
            files = rank_files(folder)
            written = max((changed(path) for path in files.values()), default=0.0)
            known = self._summaries.get(name)
            # Do not read all ranks of a live run each time.
            if known is None or written > known[0] + 1.0:
                known = written, _summary(files)
                self._summaries[name] = known
            live = time.time() - written < _LIVE_S and any(_trains(path) for path in files.values())
            found.append({"name": name, "live": live, "changed": round(written, 1), **known[1]})
        # Do not sort by write time: a finished Trainer still records what its process sends.
        return sorted(found, key=lambda one: (one["live"], one["step"] > 0, one["began"]), reverse=True)

    def newest(self) -> str:
        """Return a value that changes when something is written for TensorBoard's own tabs."""
        self._look()
        return f"{len(self._written)} {max((changed(path) for path in self._written), default=0.0)}"

    def _look(self) -> None:
        if self.logdir is None or time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        found, written = {}, []
        top = len(self.logdir.parts)
        for folder, below, files in os.walk(self.logdir):
            path = Path(folder)
            written += [path / name for name in files if ".tfevents." in name]
            if "telemetry" in below:
                if rank_files(path):
                    # TensorBoard calls the log directory itself "." too.
                    found[path.relative_to(self.logdir).as_posix()] = path
                below.remove("telemetry")
            if len(path.parts) - top >= _DEPTH:
                below.clear()
        self._folders, self._written = found, written


def _summary(files: dict[int, Path]) -> dict[str, Any]:
    steps: dict[int, dict[int, StepRecord]] = {}
    began = 0.0
    for rank, path in files.items():
        for record in _tail(overview_of(path)):
            steps.setdefault(record.step, {})[rank] = record
        began = max([began, *(one.unix_s for one in read_head(path) if isinstance(one, Header))])
    complete = [those for _, those in sorted(steps.items()) if len(those) == len(files)]
    made: dict[str, Any] = {"ranks": len(files), "step": max(steps, default=0), "began": began}
    if not complete:
        return made | {"seconds": None, "parts": [], "rate": None, "unit": unit_of({}), "loss": None, "strategy": ""}
    newest = strategy_of(complete[-1])
    alike = list(takewhile(lambda those: strategy_of(those) == newest, reversed(complete)))[::-1]
    numbers = usual_steps(_number_of(alike[-1]), _number_of(alike[0]))
    complete = [those for those in alike if _number_of(those) in numbers]
    members = members_of(_groups(files, complete[-1]))
    of = usual_bars(complete, members)
    points = [point_of(those, bars(those, members)) for those in complete]
    rates = [rate for those in complete if (rate := rate_of(those[min(those)])) is not None]
    count = max(len(of), 1)
    parts = [sum(getattr(bar, part) for bar in of) / count for part in PARTS]
    seconds = sum(bar.seconds for bar in of) / count if of else median(point[2] for point in points)
    return made | {
        "seconds": short(seconds),
        "parts": [short(value) for value in parts] if of else [],
        "rate": short(median(rates)) if rates else None,
        "unit": unit_of(complete[-1][min(complete[-1])].numbers),
        "loss": point_of(alike[-1], [])[-2],
        "strategy": newest,
        "sent": round(median(busiest(those, members) for those in complete)),
    }


def _number_of(steps: Mapping[int, StepRecord]) -> int:
    return steps[min(steps)].step


def _groups(files: dict[int, Path], step: Mapping[int, StepRecord]) -> list[Group]:
    """Return the groups of a step.

    The record of a group is where a switch created it, so this may have to read a whole file.
    """
    found = [one for path in files.values() for one in read_head(path) if isinstance(one, Group)]
    known = {one.label for one in found}
    lacking = [rank for rank, record in step.items() if any(row.group not in known for row in record.traffic)]
    return found + [one for rank in lacking for one in groups_of(files[rank])]


def _tail(path: Path) -> list[StepRecord]:
    """Return the last step records of a file."""
    lines = _last_lines(path)[-MEDIAN_OF - STANDS - 1 :]
    return [record for line in lines if isinstance(record := from_line(line), StepRecord)]


def _trains(path: Path) -> bool:
    """Return True if a rank has recorded a training and has not recorded its end."""
    for line in reversed(_last_lines(path)):
        record = from_line(line)
        if isinstance(record, EventRecord | StepRecord):
            return isinstance(record, StepRecord) or record.event.get("kind") != RunStopped.kind
    return False


def _last_lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().splitlines()
    except FileNotFoundError:
        return []


NAME = "communication"
_STATIC = Path(__file__).parent / "static"
_TYPES = {".js": "application/javascript", ".css": "text/css"}


class CommunicationPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """A dynamic plugin of TensorBoard. Its page runs in a frame, with the same origin."""

    plugin_name = NAME

    def __init__(self, context: Any) -> None:
        self._runs = RunCatalog(Path(context.logdir).absolute() if context.logdir else None)
        self._lock = threading.Lock()

    def is_active(self) -> bool:
        """Return True always. Without runs, the page says what it waits for."""
        return True

    def frontend_metadata(self) -> Any:
        return base_plugin.FrontendMetadata(es_module_path="/static/index.js", tab_name="Communication")

    def get_plugin_apps(self) -> dict[str, Any]:
        answers = {
            "/static/*": self._static,
            "/runs": self._list,
            "/newest": self._newest,
            "/poll": self._poll,
            "/step": self._step,
        }
        return {path: wrappers.Request.application(answer) for path, answer in answers.items()}

    def _static(self, request: wrappers.Request) -> Any:
        path = _STATIC / Path(request.path).name
        if path.suffix not in _TYPES or not path.is_file():
            return http_util.Respond(request, "not found", "text/plain", code=404)
        return http_util.Respond(request, path.read_bytes(), _TYPES[path.suffix])

    def _list(self, request: wrappers.Request) -> Any:
        with self._lock:
            return _json(request, {"runs": self._runs.summaries()})

    def _newest(self, request: wrappers.Request) -> Any:
        with self._lock:
            return _json(request, {"newest": self._runs.newest()})

    def _poll(self, request: wrappers.Request) -> Any:
        run = self._open(request)
        if run is None:
            return _no_run(request)
        with run.lock:
            run.refresh()
            line, epoch = run.timeline, run.timeline.epoch + run.curve.epoch
            known = _number(request, "points", 0) if _number(request, "epoch", -1) == epoch else 0
            keep, points = line.since(line.epoch, known)
            first = min(_number(request, "events", 0), len(run.curve.events)) if keep else 0
            return _json(
                request,
                {
                    "epoch": epoch,
                    "keep": keep,
                    "points": points,
                    "events_keep": first,
                    "events": run.curve.events[first:],
                    "newest": run.newest,
                    "world": run.world_size,
                    "lateness": lateness(run),
                },
            )

    def _step(self, request: wrappers.Request) -> Any:
        run = self._open(request)
        if run is None:
            return _no_run(request)
        with run.lock:
            run.refresh()
            asked = _number(request, "step", 0)  # "newest" becomes 0
            shown = picture(run, asked or run.newest, usual=not asked, replica=_number(request, "replica", 0))
            return _json(request, shown)

    def _open(self, request: wrappers.Request) -> Any:
        with self._lock:
            return self._runs.open(request.args.get("run", ""))


def _number(request: wrappers.Request, name: str, otherwise: int) -> int:
    try:
        return int(request.args.get(name, otherwise))
    except ValueError:
        return otherwise


def _json(request: wrappers.Request, values: dict[str, Any]) -> Any:
    return http_util.Respond(request, values, "application/json")


def _no_run(request: wrappers.Request) -> Any:
    name = request.args.get("run", "")
    return http_util.Respond(request, {"error": f"no run {name!r} with records"}, "application/json", code=404)
