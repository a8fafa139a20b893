"""A cell that runs by itself: what `--detach` gives back. Its output stays with the notebook cell that sent it."""

from __future__ import annotations

import html
from collections.abc import Mapping
from concurrent.futures import wait as wait_futures
from contextlib import suppress
from typing import TYPE_CHECKING

from nbkit.errors import CellStopped
from nbkit.notebook.cluster.cells.execution import Running
from nbkit.notebook.cluster.cells.results import Results
from nbkit.notebook.cluster.cells.stop import Presses
from nbkit.notebook.cluster.cells.wait import TICK_SECONDS, begin_stop, wait_for

if TYPE_CHECKING:
    from nbkit.notebook.cluster.cluster import Cluster

_COLOURS = {
    "running": "var(--jp-brand-color1,#1976d2)",
    "ok": "var(--jp-success-color1,#388e3c)",
    "error": "var(--jp-error-color1,#d32f2f)",
    "interrupted": "var(--jp-warn-color1,#f57c00)",
}


def handle_of(cluster: Cluster) -> CellHandle | None:
    """Of the cell that runs now, also one that was taken up; None where none does."""
    running = cluster.post.busy()
    return CellHandle(cluster, running) if running is not None else None


class CellHandle:
    """wait(), stop(), .output, .status of a detached cell."""

    def __init__(self, cluster: Cluster, running: Running, timeout: float | None = None) -> None:
        self._cluster, self._running = cluster, running
        if timeout is not None:
            cluster.post.wire.soon(lambda: cluster.post.wire.later(timeout, self._out_of_time, timeout))

    def wait(self, timeout: float | None = None) -> Results:
        """Wait until the cell is over. Raises CellError if it failed, TimeoutError after `timeout` seconds.

        The stop button ends the waiting; `stop()` ends the cell.
        """
        return wait_for(self._running, timeout)

    def stop(self, end_after: float | None = None) -> Results:
        """Stop the cell and wait for that; a training stops at a step boundary, its state intact.

        A rank that does not end is told of; the stop button, pressed then, ends it. end_after: seconds after that
        warning in which nobody need press, for programs that nobody watches; its variables are lost.
        """
        if not self._running.done.done():
            stop = begin_stop(self._cluster, self._running, end_after=end_after)
            with Presses(stop):
                while not self._running.done.done():
                    stop.tick()
                    wait_futures([self._running.done], TICK_SECONDS / 2)
        return self._running.done.result()

    @property
    def output(self) -> Mapping[int, str]:
        """What each rank has printed so far."""
        return self._running.results(self.status).output

    @property
    def status(self) -> str:
        """ "running", "ok", "error" or "interrupted"."""
        done = self._running.done
        if not done.done():
            return "running"
        return "error" if done.exception() else done.result().status

    def _out_of_time(self, seconds: float) -> None:
        if self._running.done.done():
            return
        stop = begin_stop(self._cluster, self._running, seconds)

        def tick() -> None:
            if not self._running.done.done():
                with suppress(CellStopped):  # nobody waits here who could be given back
                    stop.tick()
                self._cluster.post.wire.later(TICK_SECONDS, tick)

        tick()

    def show(self) -> None:
        """Show the card of this cell where its output goes; it tells in place how the cell ended."""
        running, wire = self._running, self._cluster.post.wire
        transient = {"display_id": f"nbkit-{running.request.id}"}
        wire.soon(lambda: running.outbox.put("display", self._bundle(age=False), {}, transient))
        if hasattr(running.outbox.screen, "kernel"):  # a plain screen cannot change what it has shown
            running.done.add_done_callback(lambda _: running.outbox.put("update", self._bundle(), {}, transient))

    def _bundle(self, *, age: bool = True) -> dict[str, str]:
        return {"text/plain": self._text(age=age), "text/html": self._html(age=age)}

    def __repr__(self) -> str:
        return self._text(age=True)

    def _repr_html_(self) -> str:
        return self._html(age=True)

    def _text(self, *, age: bool) -> str:
        return f"<CellHandle of {self._running.describe(age=age)}: {self.status}>"

    def _html(self, *, age: bool) -> str:
        status = self.status
        next_words = (
            "handle.stop() · handle.wait() · %%distributed --at-step runs inside it" if status == "running" else ""
        )
        return (
            f"<span style='color:{_COLOURS[status]}'>●</span> <b>{status}</b> · "
            f"<code>{html.escape(self._running.describe(age=age))}</code> "
            f"<span style='color:var(--jp-ui-font-color2,gray)'>{next_words}</span>"
        )
