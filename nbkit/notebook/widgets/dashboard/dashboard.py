"""The live dashboard of a training: a widget where there are widgets, else the same as text.

nbkit.Dashboard()                   # of the notebook's cluster
nbkit.Dashboard("runs/2026...-dp4") # of a run that was recorded
"""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbkit.errors import NbkitError, UsageError
from nbkit.notebook.cluster.cluster import Cluster, current
from nbkit.notebook.cluster.newest_run import NewestRun
from nbkit.notebook.tracing import Traced
from nbkit.notebook.widgets.dashboard.refresh_thread import RefreshThread
from nbkit.notebook.widgets.dashboard.svg_view import svg_of
from nbkit.notebook.widgets.dashboard.text_view import lines_of, plain
from nbkit.notebook.widgets.javascript import joined, style
from nbkit.notebook.widgets.messages_during_cells import hear_always, here, lost_words
from nbkit.notebook.widgets.run_report import write_report
from nbkit.notebook.widgets.widget_output import display_until_stopped, with_widget
from nbkit.quoting import user_path


class Dashboard:
    """Follows the newest training of a cluster (default: the notebook's), or the run in a directory.

    It goes on by itself, also while a cell runs and when another training begins, until the cluster is stopped or
    `close()` ends it. `str()` of it and its SVG picture are for where no widgets are. Raises ClusterError without a
    cluster, UsageError without the run.
    """

    def __init__(self, of: Cluster | str | Path | None = None) -> None:
        source = of if of is not None else current()
        self._cluster = source if isinstance(source, Cluster) else None
        self._directory = NewestRun(source.connection) if isinstance(source, Cluster) else _always(source)
        self._tracing = threading.Lock()
        self.widget: Any = None
        self._refresh = RefreshThread(self._directory, self._send)
        self.widget = _widget(self._refresh, self._trace if self._cluster is not None else None)
        if self.widget is not None:
            self._refresh.start()

    def close(self) -> None:
        """End it; what it shows stays as it is."""
        self._refresh.stop()

    def report(self, path: str | Path = "run.html") -> Path:
        """Write one self-contained page with every chart; returns its path."""
        folder = self._directory()
        if folder is None:
            raise UsageError("There is no run to report on yet.", hint="trainer.fit(...)")
        return write_report(folder, user_path(path))

    def trace(self, steps: int = 3, path: str | os.PathLike[str] | None = None) -> Traced:
        """The next steps of the training that is shown, all ranks in one file for Perfetto: see Cluster.trace."""
        if self._cluster is None:
            raise UsageError("What was recorded has no next step.", hint="%dashboard   of a cluster that trains")
        return self._cluster.trace(steps, path)

    def snapshot(self) -> dict[str, Any]:
        """All that is shown, as plain values; {} when nothing has been recorded yet."""
        if self._refresh.reader is None:
            self._refresh.find()
        return self._refresh.reader.snapshot() if self._refresh.reader is not None else {}

    def _trace(self, steps: int) -> None:
        """The button: what comes of it is told to the page. One at a time."""

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
            # Its front end drops binary parts.
            values = memoryview(buffers[0]).cast("d").tolist()
            content, buffers = {**content, "points": [values[i : i + 7] for i in range(0, len(values), 7)]}, []
        self.widget.send(content, buffers)

    def still(self) -> dict[str, Any]:
        """What it shows, as text and as an SVG picture: a MIME bundle that needs no kernel."""
        found = self.snapshot()
        if not found:
            return {"text/plain": "nothing is recorded yet: trainer.fit(...) in a %%distributed cell"}
        text, picture = plain(lines_of(found)), svg_of(found)
        return {"text/plain": text} | ({"image/svg+xml": picture} if picture else {})

    def __repr__(self) -> str:
        return str(self.still()["text/plain"])

    def _ipython_display_(self) -> None:
        before_stop = self._cluster.before_stop if self._cluster is not None else None
        display_until_stopped(self, before_stop, lost_words(**here()) if self.widget is not None else "")

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return with_widget(self.still(), self.widget, **options)


def _always(folder: str | Path) -> Callable[[], Path]:
    path = user_path(folder).absolute()
    if not path.is_dir():
        raise UsageError("There is no such run.", numbers=str(folder), hint="%dashboard runs/NAME")
    return lambda: path


def _widget(refresh: RefreshThread, trace: Callable[[int], None] | None) -> Any:
    """None without anywidget."""
    try:
        import anywidget
        import traitlets
    except ImportError:
        return None

    class View(anywidget.AnyWidget):  # type: ignore[misc, name-defined, no-any-unimported]
        """Everything goes by messages; no trait is ever changed, so that nothing waits for an answer of the page."""

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
        elif message.get("ask") == "trace" and trace is not None:
            trace(3)

    view.on_msg(heard)
    view.observe(lambda change: refresh.stop() if change["new"] is None else None, names="comm")
    return view
