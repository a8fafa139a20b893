"""The strategy panel: a widget, or the same content as text where widgets are not available.

All panels of a cluster share a controller and show its State. Panels call the controller from any thread, and these
calls do not block. While a panel listens, one thread asks the ranks for news a few times a second. Controls, such as a
switch, run one at a time in threads of their own.
"""

from __future__ import annotations

import html
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import wait as wait_futures
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbkit.errors import CellStopped, ClusterError, NbkitError
from nbkit.notebook.cluster.cells.handle import TICK_SECONDS
from nbkit.notebook.cluster.cells.stop import begin_stop
from nbkit.notebook.cluster.cluster import Cluster, current
from nbkit.notebook.cluster.training_control import ControlResult, stopped
from nbkit.notebook.widgets import javascript
from nbkit.notebook.widgets.panel.svg_view import svg_of
from nbkit.notebook.widgets.panel.view import (
    Asked,
    Finished,
    Looked,
    Lost,
    News,
    State,
    SwitchedElsewhere,
    checked,
    in_table,
    job_view,
    previewed,
    pulse_view,
    reduce,
    text_of,
)
from nbkit.notebook.widgets.svg import image
from nbkit.notebook.widgets.widget_output import (
    display_until_stopped,
    hear_always,
    here,
    lost_words,
    note_words,
    with_widget,
)
from nbkit.planner.choose.search import undecided

LOOK_SECONDS = 0.4
_WORDS = {
    "switch": "asked to switch to {strategy}; takes effect at a step boundary …",
    "try": "asked to try {strategy} for {steps} steps; begins at a step boundary …",
    "compare": "asked to measure {number} strategies in turns; begins at a step boundary …",
    "undo": "asked to go back; takes effect at a step boundary …",
    "pause": "asked to pause; takes effect at a step boundary …",
    "resume": "going on …",
    "save": "asked to save; takes effect at a step boundary …",
    "stop": "asked to stop; takes effect at a step boundary …",
}
"""Texts shown until a control has ended. Ranks first finish steps that have begun, and agree on the boundary."""
_controllers: weakref.WeakKeyDictionary[Cluster, PanelController] = weakref.WeakKeyDictionary()


def controller_of(cluster: Cluster) -> PanelController:
    """Return the controller of a cluster. The first call makes it."""
    if cluster not in _controllers:
        _controllers[cluster] = PanelController(cluster)
    return _controllers[cluster]


class PanelController:
    """The controller of all panels of one Cluster object."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = weakref.ref(cluster)
        self.state = State(cluster.entry.name, cluster.entry.n)
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._listeners: list[Callable[[State], None]] = []
        self._looking: threading.Thread | None = None
        self._heard = len(cluster.training.switched)

    def listen(self, listener: Callable[[State], None]) -> None:
        """Call `listener` with the current state now, and with each later state on any thread."""
        with self._lock:
            self._listeners.append(listener)
            listener(self.state)
            if self._looking is None:
                self._looking = threading.Thread(target=self._keep_looking, name="nbkit-panel", daemon=True)
                self._looking.start()

    def leave(self, listener: Callable[[State], None]) -> None:
        """Stop calling this listener."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
        self._wake.set()

    def look(self) -> State:
        """Ask the ranks for news now, and return the new state."""
        cluster = self._cluster()
        if cluster is None:
            return self._news(Lost("the cluster is gone"))
        try:
            why = cluster.connection.why_gone()
            self._hear(cluster)
            return self._news(Lost(why) if why else Looked(cluster.training.look()))
        except (NbkitError, OSError) as error:
            return self._news(Lost(str(error).splitlines()[0]))

    def _hear(self, cluster: Cluster) -> None:
        """Show the newest switch since the last call, whoever asked for it."""
        with self._lock:
            every = cluster.training.switched
            new, self._heard = every[self._heard :], len(every)
            for result in new[-1:]:
                self._news(SwitchedElsewhere(result))

    def option(self, strategy: str) -> dict[str, Any]:
        """Return the ranks' prediction for a strategy that the table does not have; {} if they do not answer."""
        cluster = self._cluster()
        try:
            return cluster.training.option(strategy) if cluster is not None else {}
        except (NbkitError, OSError):
            return {}  # `look` shows what is wrong with the ranks

    def ask(self, do: str, **args: Any) -> None:
        """Start a control of the training, e.g. ask("switch", strategy="zero3"). All panels show the result."""
        with self._lock:
            if self.state.asked and do != "stop":
                return  # one control at a time; the panels show which one runs
            self._news(Asked(_WORDS[do].format(**args)))
        threading.Thread(target=self._do, args=(do, args), name=f"nbkit-{do}", daemon=True).start()

    def _do(self, do: str, args: dict[str, Any]) -> None:
        try:
            result = self._result(do, args)
        except Exception as error:  # the panels must never wait for ever
            result = _failed(do, args, error)
        self.look()  # so that the table is up to date when the result appears
        self._news(Finished(result))
        self._wake.set()

    def _result(self, do: str, args: dict[str, Any]) -> ControlResult:
        cluster = self._cluster()
        assert cluster is not None
        training = cluster.training
        if do == "stop":
            return _stopped(cluster, lambda words: self._news(Asked(words)))
        acts: dict[str, Callable[..., ControlResult]] = {
            "switch": training.switch,
            "try": training.try_out,
            "compare": lambda strategies, steps, number: _compared(training, strategies, steps),
            "undo": training.undo,
            "pause": training.pause,
            "resume": training.resume,
            "save": training.save,
        }
        return acts[do](**args)

    def _keep_looking(self) -> None:
        while True:
            self._wake.clear()
            with self._lock:
                if not self._listeners or self._cluster() is None:
                    self._looking = None
                    return
            self.look()
            self._wake.wait(LOOK_SECONDS)

    def _news(self, news: News) -> State:
        with self._lock:
            cluster = self._cluster()
            now = self.state if cluster is None else replace(self.state, ranks=cluster.entry.n)  # it may be resized
            state = reduce(now, news)
            if state != self.state:
                self.state = state
                for listener in list(self._listeners):
                    listener(state)
            return state


def _compared(training: Any, strategies: list[str], steps: int) -> ControlResult:
    """Compare strategies. Then compare those whose difference is within the noise again, with more steps."""
    result: ControlResult = training.compare(*strategies, steps=steps)
    close = undecided(result.result["strategies"], result.strategy) if result.ok else []
    if not close:
        return result
    again: ControlResult = training.compare(*close, steps=SURE_STEPS)
    if not again.ok:
        return result
    newer = {row["strategy"]: row for row in again.result["strategies"]}
    rows = [newer.get(row["strategy"], row) for row in result.result["strategies"]]
    return replace(again, result={**again.result, "strategies": rows})


def _stopped(cluster: Cluster, tell: Callable[[str], object]) -> ControlResult:
    """Stop the running cell and wait for its end. tell: called with messages for the user meanwhile."""
    connection = cluster.connection
    execution, shown = connection.busy(), ""
    if execution is not None:
        connection.client.soon(execution.say, "stopped from the panel")
        stop = begin_stop(connection.entry, connection.client, execution)
        while not execution.done.done():
            try:
                stop.tick()
            except CellStopped as given_up:
                raise ClusterError(str(given_up)) from None
            if stop.words != shown:
                shown = stop.words
                tell(shown)
            wait_futures([execution.done], TICK_SECONDS)
        execution.done.result()
    return stopped(cluster.training.look().get("step", 0))


def _failed(do: str, args: dict[str, Any], error: Exception) -> ControlResult:
    what = getattr(error, "what", "") or f"{type(error).__name__}: {error}".splitlines()[0]
    numbers, hint = getattr(error, "numbers", ""), getattr(error, "hint", "")
    return ControlResult("", do, args, 0, "", False, type(error).__name__, what, numbers, hint, {})


STATIC = Path(__file__).parents[1] / "static"
TRY_STEPS = 10
SURE_STEPS = 20  # for strategies whose difference is within the noise
PATIENCE_SECONDS = 3.0  # how long the first display waits for a complete table
BEAT_SECONDS = 2.0  # after three missing beats, panel.js says that the kernel is gone


class StrategyPanel:
    """Shows the training on a cluster's ranks and controls it, also while a `%%distributed` cell trains.

    cluster: the cluster to show; default: the notebook's. All panels of one cluster show the same values. `close()`
    ends only this panel.
    """

    def __init__(self, cluster: Cluster | None = None) -> None:
        cluster = cluster or current()
        cluster.training.look_well(PATIENCE_SECONDS)
        self.controller = controller_of(cluster)
        self.controller.look()
        self._before_stop = cluster.before_stop
        self.widget = _widget(self.controller)

    def close(self) -> None:
        """Close the widget."""
        if self.widget is not None:
            self.widget.close()

    def still(self) -> dict[str, Any]:
        """Return the content as text and as a picture: a MIME bundle that needs no kernel."""
        state = self.controller.state
        text, job, pulse = text_of(state), job_view(state), pulse_view(state)
        if not job:
            # Pages made from a notebook show a plain <pre> in the font of their text, and wrap its lines.
            style = "font-family:monospace;white-space:pre;overflow-x:auto"
            return {"text/plain": text, "text/html": f"<pre style='{style}'>{html.escape(text)}</pre>"}
        picture = svg_of(pulse["headline"], job, state.results[0].line if state.results else "")
        return {"text/plain": text, "text/html": image(picture, f"strategies of cluster {state.cluster}")}

    def __repr__(self) -> str:
        return text_of(self.controller.state)

    def _ipython_display_(self) -> None:
        words = lost_words(**here()) if self.widget is not None else ""
        display_until_stopped(self, self._before_stop, words)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return with_widget(self.still(), self.widget, **options)


def _widget(controller: PanelController) -> Any:
    """Return the widget of a panel, or None without anywidget."""
    try:
        import anywidget
        import traitlets
    except ImportError:
        return None

    class Panel(anywidget.AnyWidget):  # type: ignore[misc, name-defined, no-any-unimported]
        """Python changes traits. The page sends messages, because its trait changes may be lost during a cell."""

        _esm = javascript.panel()
        _css = STATIC / "panel.css"
        job = traitlets.Dict().tag(sync=True)
        pulse = traitlets.Dict().tag(sync=True)
        note = traitlets.Unicode().tag(sync=True)

    widget = Panel(note=note_words(**here()))
    hear_always(widget.comm)
    lock = threading.Lock()

    made_of: tuple[object, ...] = ()

    def show(state: State) -> None:
        nonlocal made_of
        with lock:
            widget.pulse = pulse_view(state)
            # Mostly the table is unchanged, and making its rows takes 30 ms (735 rows on 256 ranks).
            if (now := (state.cluster, state.table, state.pace)) != made_of:
                made_of, job = now, job_view(state)
                if job != widget.job:
                    widget.job = job

    def preview(verdict: dict[str, Any]) -> None:
        option = controller.option(verdict["strategy"])  # ranks may take a second to answer
        widget.send({"checked": previewed(controller.state, verdict, option)})

    def heard(_: Any, message: dict[str, Any], buffers: Any) -> None:
        if "press" in message:
            widget.send({"heard": message["press"]})  # if this does not come, the page tells the user
        do, text = str(message.get("do", "")), str(message.get("strategy", ""))
        if do == "check":
            verdict = checked(controller.state, text)
            widget.send({"checked": verdict})
            if verdict["strategy"] and not in_table(controller.state, verdict["strategy"]):
                threading.Thread(target=preview, args=(verdict,), name="nbkit-preview", daemon=True).start()
        elif do == "switch":
            controller.ask("switch", strategy=text)
        elif do == "measure" and (asked := (widget.job or {}).get("measure")):
            strategies = asked["strategies"]
            controller.ask("compare", strategies=strategies, steps=asked["steps"], number=len(strategies) + 1)
        elif do == "try":
            controller.ask("try", strategy=text, steps=TRY_STEPS)
        elif do in ("undo", "pause", "resume", "save", "stop"):
            controller.ask(do)

    widget.on_msg(heard)
    controller.listen(show)
    threading.Thread(target=_beat, args=(widget,), name="nbkit-beat", daemon=True).start()
    widget.observe(lambda change: controller.leave(show) if change["new"] is None else None, names="comm")
    return widget


def _beat(widget: Any) -> None:
    """Tell the pages regularly that the kernel lives. During a pause of the training there may be no other message."""
    while widget.comm is not None:
        widget.send({"beat": True})
        time.sleep(BEAT_SECONDS)
