"""The tab "Communication" as TensorBoard loads it: a page, and JSON that the page asks for each second.

    runs                                    one line for each run
    newest                                  another word when TensorBoard's own tabs have something new
    poll?run=&epoch=&points=&events=        what has been added to a run's timeline since the reader's cursor
    step?run=&step=N|newest&replica=        one step

Everything is read from the run's record files; TensorBoard's own event files are not needed.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from nbkit.notebook.board.plugin.runs import Runs
from nbkit.notebook.run.step_picture import lateness, picture

NAME = "communication"
_STATIC = Path(__file__).parent / "static"
_TYPES = {".js": "application/javascript", ".css": "text/css"}


class CommunicationPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """A dynamic plugin: its page runs in a frame of TensorBoard's, of the same origin."""

    plugin_name = NAME

    def __init__(self, context: Any) -> None:
        self._runs = Runs(Path(context.logdir).absolute() if context.logdir else None)
        self._lock = threading.Lock()

    def is_active(self) -> bool:
        """Always: an empty page says what it waits for, a missing tab does not."""
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
            asked = _number(request, "step", 0)  # "newest" is no number
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
