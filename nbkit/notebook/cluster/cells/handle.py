"""The handle of a detached cell, which `--detach` returns. Its output goes to the notebook cell that sent it."""

from __future__ import annotations

import html
from collections.abc import Mapping
from contextlib import suppress

from nbkit.durations import seconds_given
from nbkit.errors import CellStopped
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.notebook.cluster.cells.results import Results
from nbkit.notebook.cluster.cells.stop import begin_stop
from nbkit.notebook.cluster.cells.wait import TICK_SECONDS, stopped, wait_for

_COLOURS = {
    "running": "var(--jp-brand-color1,#1976d2)",
    "ok": "var(--jp-success-color1,#388e3c)",
    "error": "var(--jp-error-color1,#d32f2f)",
    "interrupted": "var(--jp-warn-color1,#f57c00)",
}


def handle_of(connection: Connection) -> CellHandle | None:
    """The handle of the cell that runs now; None if none does."""
    execution = connection.busy()
    return CellHandle(connection, execution) if execution is not None else None


class CellHandle:
    """wait(), stop(), .output, .status of a detached cell."""

    def __init__(self, connection: Connection, execution: Execution, timeout: float | None = None) -> None:
        self._connection, self._execution = connection, execution
        if timeout is not None:
            client = connection.client
            client.soon(lambda: client.later(timeout, self._out_of_time, timeout))

    def wait(self, timeout: str | float | None = None) -> Results:
        """Wait until the cell is over. Raises CellError if it failed, TimeoutError after `timeout`
        (seconds, or "30s").

        The stop button ends the waiting; `stop()` ends the cell.
        """
        return wait_for(self._connection, self._execution, timeout)

    def stop(self, end_after: str | float | None = None) -> Results:
        """Stop the cell and wait for its end; a training stops at a step boundary, its state intact.

        A warning names a rank that does not end; pressing the stop button then ends its process. end_after: seconds
        (or "30s") after that warning when it is ended without a press, for programs that nobody watches. Its variables
        are lost.
        """
        return stopped(self._connection, self._execution, seconds_given(end_after))

    @property
    def output(self) -> Mapping[int, str]:
        """The text that each rank has printed so far."""
        return self._execution.results(self.status).output

    @property
    def status(self) -> str:
        """ "running", "ok", "error" or "interrupted"."""
        done = self._execution.done
        if not done.done():
            return "running"
        return "error" if done.exception() else done.result().status

    def _out_of_time(self, seconds: float) -> None:
        if self._execution.done.done():
            return
        stop = begin_stop(self._connection.entry, self._connection.client, self._execution, seconds)

        def tick() -> None:
            if not self._execution.done.done():
                with suppress(CellStopped):  # nobody waits here who could be given back
                    stop.tick()
                self._connection.client.later(TICK_SECONDS, tick)

        tick()

    def show(self) -> None:
        """Show a line about this cell where its output goes; the line changes in place when the cell ends."""
        execution, client = self._execution, self._connection.client
        transient = {"display_id": f"nbkit-{execution.request.id}"}
        client.soon(lambda: execution.outbox.put("display", self._bundle(age=False), {}, transient))
        if hasattr(execution.outbox.screen, "kernel"):  # a plain screen cannot change what it has shown
            execution.done.add_done_callback(lambda _: execution.outbox.put("update", self._bundle(), {}, transient))

    def _bundle(self, *, age: bool = True) -> dict[str, str]:
        return {"text/plain": self._text(age=age), "text/html": self._html(age=age)}

    def __repr__(self) -> str:
        return self._text(age=True)

    def _repr_html_(self) -> str:
        return self._html(age=True)

    def _text(self, *, age: bool) -> str:
        return f"<CellHandle of {self._execution.describe(age=age)}: {self.status}>"

    def _html(self, *, age: bool) -> str:
        status = self.status
        next_words = (
            "handle.stop() · handle.wait() · %%distributed --at-step runs inside it" if status == "running" else ""
        )
        return (
            f"<span style='color:{_COLOURS[status]}'>●</span> <b>{status}</b> · "
            f"<code>{html.escape(self._execution.describe(age=age))}</code> "
            f"<span style='color:var(--jp-ui-font-color2,gray)'>{next_words}</span>"
        )
