"""The live dashboard of a training: a widget, or the same content as text where widgets are not available.

    nbkit.Dashboard()                   # the notebook's cluster
    nbkit.Dashboard("runs/2026...-dp4") # a recorded run
    nbkit.Dashboard("runs/b", beside="runs/a")  # two runs in one chart

A thread refreshes a dashboard, even while the kernel runs a cell. It uses only a small share of a core.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbkit.errors import ClusterError, NbkitError, UsageError
from nbkit.notebook.cluster import site_settings
from nbkit.notebook.cluster.cluster import Cluster, current
from nbkit.notebook.cluster.newest_run import NewestRun
from nbkit.notebook.run.follower import packed
from nbkit.notebook.run.reader import RunReader, no_run
from nbkit.notebook.tracing import TraceFile
from nbkit.notebook.widgets.dashboard.svg_view import svg_of
from nbkit.notebook.widgets.dashboard.text_view import lines_of, plain
from nbkit.notebook.widgets.javascript import joined, style
from nbkit.notebook.widgets.run_report import write_report
from nbkit.notebook.widgets.svg import image
from nbkit.notebook.widgets.widget_output import display_until_stopped, hear_always, here, lost_words, with_widget
from nbkit.quoting import shell_words, user_path
from nbkit.records.record_file import newest_run

Send = Callable[[dict[str, Any], list[bytes]], None]

_CURVE_S, _PICTURE_S, _AT_MOST_S = 0.05, 0.5, 3.0
_SHARE = 0.003  # of a core, for curve and picture each; messages cost other threads of the kernel some more
_WHERE_S = 1.0
_RUNS_AT_MOST = 100  # in the list to choose from


class RefreshThread:
    """A thread that reads a run's directory, and passes new data to `send`.

    where: returns the directory of the run, or None if there is none yet; called once a second. send: called on this
    thread with a message and its binary parts. static/dashboard.js lists the kinds of messages.
    """

    def __init__(self, where: Callable[[], Path | None], send: Send) -> None:
        self._where, self._send = where, send
        self.reader: RunReader | None = None
        self._sent = (-1, 0, 0)
        self._beside: RunReader | None = None
        self._beside_sent = (-1, 0)
        self._pinned: Path | None = None  # the run that the user has chosen
        self.steps: tuple[int, int] | None = None  # the first and last step to show
        self._pins_next = False
        self._listed: tuple[Path, int] | None = None
        self._runs: list[str] = []
        self._told: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._ended = threading.Event()
        self._lock = threading.RLock()
        self._due = [0.0, 0.0, 0.0]  # when to read next: the curve, the picture, which run it is
        self._step: int | None = None

    def start(self) -> None:
        """Start the thread. It ends with `stop`, or with the process."""
        threading.Thread(target=self._run, name="nbkit-dashboard", daemon=True).start()

    def stop(self) -> None:
        """Send no more messages."""
        self._ended.set()

    def again(self) -> None:
        """Send everything again, because a new page has nothing yet."""
        with self._lock:
            self._sent, self._state, self._beside_sent, self._told = (-1, 0, 0), {}, (-1, 0), {}
            if self.reader is not None and self.reader.step:
                self._send({"kind": "step", "step": self.reader.step}, [])
            self._due = [0.0, 0.0, self._due[2]]

    def show(self, step: int | None) -> None:
        """Show this step from now on, or the newest step if it is None."""
        self._step = step
        self._due[1] = 0.0

    def choose(self, run: str | None = None, beside: str | Path | None = None) -> None:
        """Choose a run of the same folder to show ("": the newest), or a second run to draw with it ("": none)."""
        with self._lock:
            if run is not None:
                self._pinned, self._pins_next, self.steps = self._sibling(run), False, None
            if beside is not None:
                folder = beside if isinstance(beside, Path) else self._sibling(beside)
                self._beside, self._beside_sent = None if folder is None else RunReader(folder), (-1, 0)
            self._due = [0.0, 0.0, 0.0]

    def pin(self, steps: tuple[int, int] | None = None) -> None:
        """Keep showing the current run, or the next one if there is none yet. steps: the first and last to show."""
        with self._lock:
            self._pins_next, self.steps = True, steps
            self._due = [0.0, 0.0, 0.0]

    def unpin(self) -> None:
        """Follow the newest run again, with all its steps."""
        with self._lock:
            self._pinned, self._pins_next, self.steps = None, False, None
            self._due = [0.0, 0.0, 0.0]

    def _sibling(self, name: str) -> Path | None:
        """Return the directory of the run with that name in the same folder, or None."""
        self._list()
        return self.reader.run_dir.parent / name if self.reader is not None and name in self._runs else None

    def _list(self) -> None:
        """List the runs in the shown run's folder, newest first. List them again only if the folder has changed."""
        if self.reader is None:
            return
        parent = self.reader.run_dir.parent
        try:
            now = parent, parent.stat().st_mtime_ns
            if now != self._listed:
                runs = [one for one in os.scandir(parent) if (Path(one.path) / "telemetry").is_dir()]
                self._runs = [one.name for one in sorted(runs, key=lambda one: -one.stat().st_mtime)][:_RUNS_AT_MOST]
                self._listed = now
        except OSError:
            self._runs = []

    def turn(self, now: float) -> None:
        """Do everything that is due at `now`, a value of time.monotonic()."""
        with self._lock:
            if now >= self._due[2]:
                self._due[2] = now + _WHERE_S
                self.find()
            if self.reader is None:
                return
            if now >= self._due[0]:
                cost = _cpu_seconds(self._tell_curve) + _cpu_seconds(self._tell_beside)
                self._due[0] = now + min(max(_CURVE_S, cost / _SHARE), _AT_MOST_S)
            if now >= self._due[1]:
                cost = _cpu_seconds(self._tell_picture)
                self._due[1] = now + min(max(_PICTURE_S, cost / _SHARE), _AT_MOST_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.turn(time.monotonic())
            except Exception as error:  # a failed drawing does not deserve a traceback in a running notebook
                self._send({"kind": "note", "text": f"{type(error).__name__}: {error}"}, [])
                self._ended.wait(_AT_MOST_S)
            wait = min(self._due[:2] if self.reader else self._due[2:]) - time.monotonic()
            self._ended.wait(max(wait, 0.01))

    def current(self) -> RunReader | None:
        """Return the reader of the shown run, or None if there is none yet."""
        with self._lock:
            if self.reader is None or self._pins_next:
                self.find()
            return self.reader

    def find(self) -> None:
        """Find the run to show, and the list of runs; tell the page if they changed."""
        folder = self._pinned or self._where()
        if folder is None:
            if self.reader is None:
                self._tell_state({"run": "", "world": 0, "stands": "waiting", "folder": "", "goal": 0, "left": ""})
            return
        if self.reader is None or self.reader.run_dir != folder:
            self.reader = RunReader(folder)
            self._sent, self._state, self._step = (-1, 0, 0), {}, None
            self._send({"kind": "step", "step": None}, [])
            self._due[:2] = [0.0, 0.0]
        if self._pins_next:
            self._pinned, self._pins_next = folder, False
        self._list()
        beside = self._beside.run_dir.name if self._beside is not None else ""
        told: dict[str, Any] = {"runs": self._runs, "beside": beside, "steps": list(self.steps) if self.steps else None}
        told["pinned"] = self._pinned.name if self._pinned else ""
        if told != self._told:
            self._told = told
            self._send({"kind": "runs", **told}, [])

    def _tell_curve(self) -> None:
        assert self.reader is not None
        with self.reader.lock:
            self.reader.look()
            curve = self.reader.curve
            # Compare with what was sent: `_tell_picture` may have read new points before this `look`.
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

    def _tell_beside(self) -> None:
        """Send the new points of the second run."""
        if self._beside is None:
            return
        with self._beside.lock:
            self._beside.look()
            curve = self._beside.curve
            if self._beside_sent == (curve.epoch, len(curve.points)):
                return
            grown = curve.since(*self._beside_sent, 0)
            self._beside_sent = grown.epoch, len(curve.points)
            content = {
                "kind": "beside",
                "run": self._beside.run_dir.name,
                "epoch": grown.epoch,
                "keep": grown.keep,
                "strategies": list(curve.strategies),
            }
        self._send(content, [packed(grown.points)])

    def _tell_picture(self) -> None:
        assert self.reader is not None
        before = self.reader.step.get("asked")
        points = self.reader.curve.points
        last = self.steps[1] if self.steps and points and points[-1][0] >= self.steps[1] else None
        found = self.reader.picture(self._step if self._step is not None else last)
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


class Dashboard:
    """Shows the newest training of a cluster (default: the notebook's), or the run in a directory.

    Without a cluster, the default is the newest run in the folder of runs. beside: the directory of a second run, whose
    curve is drawn over the first. On the page you can choose other runs of the same folder. pin: keep showing this run
    when another training begins. If there is no run yet, the next one is pinned. steps: the first and the last step to
    show. This also pins the run. On the page, the button "pin" does both.

    The dashboard updates itself, also while a cell runs, until the cluster is stopped or `close()` is called. Without
    widgets, it is shown as text and as an SVG picture. Raises ClusterError if there is no cluster, and UsageError if
    there is no such run.
    """

    def __init__(
        self,
        of: Cluster | str | Path | None = None,
        *,
        beside: str | Path | None = None,
        pin: bool = False,
        steps: tuple[int, int] | None = None,
    ) -> None:
        if steps is not None and not 1 <= steps[0] <= steps[1]:
            raise UsageError("There are no such steps.", numbers=f"{steps[0]} to {steps[1]}", hint="--steps 100-200")
        source = of if of is not None else _newest()
        self._cluster = source if isinstance(source, Cluster) else None
        self._directory = NewestRun(source.connection) if isinstance(source, Cluster) else _always(source)
        self._tracing = threading.Lock()
        self.widget: Any = None
        self._refresh = RefreshThread(self._directory, self._send)
        self.widget = _widget(self._refresh, self._trace if self._cluster is not None else None)
        if beside is not None:
            self._refresh.choose(beside=_always(beside, "--beside")())
        if pin or steps is not None:
            self._refresh.pin(steps)
        if self.widget is not None:
            self._refresh.start()

    def close(self) -> None:
        """Stop updating. The dashboard keeps its last content."""
        self._refresh.stop()

    def report(self, path: str | Path = "run.html") -> Path:
        """Write one self-contained page with every chart. Return its path."""
        folder = self._directory()
        if folder is None:
            raise UsageError("There is no run to report on yet.", hint="trainer.fit(...)")
        return write_report(folder, user_path(path))

    def trace(self, steps: int = 3, path: str | os.PathLike[str] | None = None) -> TraceFile:
        """Trace the next steps of the cluster's training: one file for Perfetto with all ranks. See Cluster.trace."""
        if self._cluster is None:
            raise UsageError("A recorded run has no next step.", hint="%dashboard   of a cluster that trains")
        return self._cluster.trace(steps, path)

    def snapshot(self) -> dict[str, Any]:
        """Return the content of the dashboard as plain values, or {} if nothing has been recorded yet."""
        reader = self._refresh.current()
        return reader.snapshot(steps=self._refresh.steps) if reader is not None else {}

    def _trace(self, steps: int) -> None:
        """Handle the button "trace": trace in a thread, one trace at a time, and send the result to the page."""

        def work() -> None:
            with self._tracing:
                self._send({"kind": "traced", "busy": True, "text": f"tracing the next {steps} steps …"}, [])
                try:
                    text = repr(self.trace(steps))
                except (NbkitError, OSError) as error:
                    text = str(error).splitlines()[0]
                self._send({"kind": "traced", "busy": False, "text": text}, [])

        if not self._tracing.locked():
            threading.Thread(target=work, name="nbkit-trace", daemon=True).start()

    def _send(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        if self.widget is None or self.widget.comm is None:
            return
        if buffers and "google.colab" in sys.modules:
            # Colab's front end drops binary parts.
            values = memoryview(buffers[0]).cast("d").tolist()
            content, buffers = {**content, "points": [values[i : i + 7] for i in range(0, len(values), 7)]}, []
        self.widget.send(content, buffers)

    def still(self) -> dict[str, Any]:
        """Return the content as text and as a picture: a MIME bundle that needs no kernel."""
        found = self.snapshot()
        if not found:
            return {"text/plain": "nothing is recorded yet: trainer.fit(...) in a %%distributed cell"}
        text, picture = plain(lines_of(found)), svg_of(found)
        return {"text/plain": text} | ({"text/html": image(picture, text.partition("\n")[0])} if picture else {})

    def __repr__(self) -> str:
        return str(self.still()["text/plain"])

    def _ipython_display_(self) -> None:
        before_stop = self._cluster.before_stop if self._cluster is not None else None
        display_until_stopped(self, before_stop, lost_words(**here()) if self.widget is not None else "")

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return with_widget(self.still(), self.widget, **options)


def _newest() -> Cluster | Path:
    """Return the notebook's cluster, or without one the newest run on disk."""
    try:
        return current()
    except ClusterError:
        if (run := newest_run(user_path(site_settings.read().runs))) is None:
            raise
        return run


def _always(folder: str | Path, *option: str) -> Callable[[], Path]:
    path = user_path(folder).absolute()
    if not path.is_dir():
        raise no_run(folder, lambda run: shell_words("%dashboard", *option, run))
    return lambda: path


def _widget(refresh: RefreshThread, trace: Callable[[int], None] | None) -> Any:
    """Return the widget of a dashboard, or None without anywidget."""
    try:
        import anywidget
        import traitlets
    except ImportError:
        return None

    class View(anywidget.AnyWidget):  # type: ignore[misc, name-defined, no-any-unimported]
        """Uses messages only. No trait is ever changed, so nothing waits for an answer of the page."""

        _esm = joined()
        _css = style()
        key = traitlets.Unicode().tag(sync=True)
        live = traitlets.Bool().tag(sync=True)

    view = View(key=uuid.uuid4().hex, live=trace is not None)
    hear_always(view.comm)

    def heard(_: Any, message: dict[str, Any], buffers: Any) -> None:
        if message.get("ask") == "all":
            refresh.again()
        elif message.get("ask") == "step":
            refresh.show(message.get("step"))
        elif message.get("ask") in ("run", "beside"):
            refresh.choose(**{message["ask"]: str(message.get("run", ""))})
        elif message.get("ask") == "pin":
            steps = message.get("steps")
            refresh.pin((int(steps[0]), int(steps[1])) if steps else None)
        elif message.get("ask") == "unpin":
            refresh.unpin()
        elif message.get("ask") == "trace" and trace is not None:
            trace(3)

    view.on_msg(heard)
    view.observe(lambda change: refresh.stop() if change["new"] is None else None, names="comm")
    return view
