"""The strategy panel: a widget where there are widgets, else the same as text."""

from __future__ import annotations

import html
import threading
import time
from pathlib import Path
from typing import Any

from nbkit.notebook.cluster.cluster import Cluster, current
from nbkit.notebook.widgets.messages_during_cells import hear_always, here, lost_words, note_words
from nbkit.notebook.widgets.panel.controller import PanelController, controller_of
from nbkit.notebook.widgets.panel.state import State
from nbkit.notebook.widgets.panel.view import checked, in_table, job_view, previewed, pulse_view, text_of
from nbkit.notebook.widgets.widget_output import display_until_stopped, with_widget

STATIC = Path(__file__).parents[1] / "static"
TRY_STEPS = 10
PATIENCE_SECONDS = 3.0  # for a panel that is complete from the start; it does not need to be
BEAT_SECONDS = 2.0  # panel.js takes three that do not come for a kernel that is gone


class StrategyPanel:
    """Shows the training on a cluster's ranks and steers it, also while a `%%distributed` cell trains.

    cluster: default the notebook's. Several panels on one cluster show the same. `close()` ends one.
    """

    def __init__(self, cluster: Cluster | None = None) -> None:
        cluster = cluster or current()
        cluster.training.look_well(PATIENCE_SECONDS)
        self.controller = controller_of(cluster)
        self.controller.look()
        self._before_stop = cluster.before_stop
        self.widget = _widget(self.controller)

    def close(self) -> None:
        """End the widget."""
        if self.widget is not None:
            self.widget.close()

    def still(self) -> dict[str, Any]:
        """What it shows, as text: a MIME bundle that needs no kernel."""
        text = repr(self)
        return {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}

    def __repr__(self) -> str:
        return text_of(self.controller.state)

    def _ipython_display_(self) -> None:
        words = lost_words(**here()) if self.widget is not None else ""
        display_until_stopped(self, self._before_stop, words)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return with_widget(self.still(), self.widget, **options)


def _widget(controller: PanelController) -> Any:
    """None without anywidget."""
    try:
        import anywidget
        import traitlets
    except ImportError:
        return None

    class Panel(anywidget.AnyWidget):  # type: ignore[misc, name-defined, no-any-unimported]
        """Python tells by traits; the page asks by messages: a trait that it sets may arrive only once in a cell."""

        _esm = STATIC / "panel.js"
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
            # Most looks find the same table, and to make its rows, 735 on 256 ranks, takes 30 ms.
            if (now := (state.cluster, state.table, state.pace)) != made_of:
                made_of, job = now, job_view(state)
                if job != widget.job:
                    widget.job = job

    def preview(verdict: dict[str, Any]) -> None:
        option = controller.option(verdict["strategy"])  # ranks may take a second to answer
        widget.send({"checked": previewed(controller.state, verdict, option)})

    def heard(_: Any, message: dict[str, Any], buffers: Any) -> None:
        if "press" in message:
            widget.send({"heard": message["press"]})  # the page says so when this does not come
        do, text = str(message.get("do", "")), str(message.get("strategy", ""))
        if do == "check":
            verdict = checked(controller.state, text)
            widget.send({"checked": verdict})
            if verdict["strategy"] and not in_table(controller.state, verdict["strategy"]):
                threading.Thread(target=preview, args=(verdict,), name="nbkit-preview", daemon=True).start()
        elif do == "switch":
            controller.ask("switch", strategy=text)
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
    """Tell the pages that the kernel lives, until the widget is closed: a training that is paused has no news."""
    while widget.comm is not None:
        widget.send({"beat": True})
        time.sleep(BEAT_SECONDS)
