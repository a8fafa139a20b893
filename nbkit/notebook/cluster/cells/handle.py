"""The handle of a detached cell, which `--detach` returns. Its output goes to the notebook cell that sent it.

A wait for a cell ends at once when the cell ends, and wakes regularly to receive the user's interrupt. Waiting only on
a future would block the interrupt. Polling alone would make every cell as slow as the polling period.
"""

from __future__ import annotations

import asyncio
import html
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import wait as wait_futures
from contextlib import suppress

from nbkit.durations import seconds_given
from nbkit.errors import CellError, CellStopped, UsageError
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.notebook.cluster.cells.results import Results
from nbkit.notebook.cluster.cells.stop import Presses, Stop, begin_stop
from nbkit.notebook.cluster.debugging.prompt import PromptTalk
from nbkit.wire.messages import GetStatus

TICK_SECONDS = 0.1


def wait_here(connection: Connection, execution: Execution, timeout: float | None = None) -> Results:
    """Block until the cell has ended. Raises what the cell raised, or CellStopped after an interrupt."""
    deadline = None if timeout is None else time.monotonic() + timeout
    stop: Stop | None = None
    with Presses() as presses:
        try:
            while not execution.done.done():
                wait_futures([execution.done], TICK_SECONDS)
                if execution.prompts:
                    deadline = _answered(connection, execution, deadline)
                if deadline is not None and time.monotonic() > deadline and not execution.done.done():
                    stop = presses.stop = begin_stop(connection.entry, connection.client, execution, timeout)
                    break
        except KeyboardInterrupt:
            stop = presses.stop = begin_stop(connection.entry, connection.client, execution)
        while stop is not None and not execution.done.done():
            stop.tick()
            wait_futures([execution.done], TICK_SECONDS)
    return outcome(execution, stop)


def _answered(connection: Connection, execution: Execution, deadline: float | None) -> float | None:
    """Let the person answer the prompts of ranks. Return the deadline, extended by the time that this took.

    Raises KeyboardInterrupt if the person wants the cell stopped.
    """
    began = time.monotonic()
    if PromptTalk(connection.client, execution).answer_all():
        raise KeyboardInterrupt
    return None if deadline is None else deadline + time.monotonic() - began


def wait_for(connection: Connection, execution: Execution, timeout: str | float | None = None) -> Results:
    """Wait for a detached cell. An interrupt or the timeout (seconds, or "30s") ends the wait, not the cell.

    Raises what the cell raised, TimeoutError, or CellStopped after an interrupt.
    """
    timeout = seconds_given(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        while not execution.done.done():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{execution.describe()} still runs after {timeout:g} s; handle.stop() ends it")
            wait_futures([execution.done], TICK_SECONDS)
            if execution.prompts and PromptTalk(connection.client, execution).answer_all():
                return stopped(connection, execution)
    except KeyboardInterrupt:
        raise CellStopped(f"stopped waiting; {execution.describe()} goes on. → handle.stop() ends it") from None
    return execution.done.result()


def stopped(connection: Connection, execution: Execution, end_after: float | None = None) -> Results:
    """Stop a cell and wait for its end. end_after: see Stop. Raises what the cell raised."""
    if not execution.done.done():
        stop = begin_stop(connection.entry, connection.client, execution, end_after=end_after)
        with Presses(stop):
            while not execution.done.done():
                stop.tick()
                wait_futures([execution.done], TICK_SECONDS / 2)
    return execution.done.result()


async def wait_async(connection: Connection, execution: Execution, timeout: float | None = None) -> Results:
    """Do the same as `wait_here`, but leave the kernel's event loop free. An interrupt arrives as a cancellation."""
    deadline = None if timeout is None else time.monotonic() + timeout
    over = asyncio.wrap_future(execution.done)
    over.add_done_callback(lambda future: future.cancelled() or future.exception())  # read below
    stop: Stop | None = None
    try:
        while not over.done():
            await asyncio.wait({over}, timeout=TICK_SECONDS)
            if execution.prompts:
                try:
                    deadline = _answered(connection, execution, deadline)
                except KeyboardInterrupt:
                    stop = begin_stop(connection.entry, connection.client, execution)
                    break
            if deadline is not None and time.monotonic() > deadline and not over.done():
                stop = begin_stop(connection.entry, connection.client, execution, timeout)
                break
    except asyncio.CancelledError:
        stop = begin_stop(connection.entry, connection.client, execution)
    if stop is not None:
        with Presses(stop):
            while not execution.done.done():
                stop.tick()
                await asyncio.sleep(TICK_SECONDS / 2)
    return outcome(execution, stop)


def until_training(connection: Connection) -> Iterator[None]:
    """Yield until all ranks are in a training. The running cell may not have reached its training yet."""
    while True:
        states = connection.client.ask(range(connection.entry.n), GetStatus())
        if states and all(state["training"] for state in states.values()):
            return
        if not connection.busy():
            raise UsageError(
                "No training is running, so there is no step boundary.",
                hint="run it as an ordinary %%distributed cell; or start trainer.fit(...) with --detach first",
            )
        yield


def outcome(execution: Execution, stop: Stop | None) -> Results:
    """Return the results. After a stop, raise the error that ends the notebook's cell, so that Run All stops."""
    results = execution.done.result()
    if stop is None:
        return results
    if "--timeout" in execution.reason:
        first = min(execution.records, default=0)
        raise CellError(f"The cell was {stop.summary()}.", rank=first, ranks=execution.request.ranks)
    raise CellStopped(stop.summary())


_COLOURS = {
    "running": "var(--jp-brand-color1,#1976d2)",
    "ok": "var(--jp-success-color1,#388e3c)",
    "error": "var(--jp-error-color1,#d32f2f)",
    "interrupted": "var(--jp-warn-color1,#f57c00)",
}


def handle_of(connection: Connection) -> CellHandle | None:
    """Return the handle of the cell that runs now, or None."""
    execution = connection.busy()
    return CellHandle(connection, execution) if execution is not None else None


class CellHandle:
    """A detached cell, with wait(), stop(), .output and .status."""

    def __init__(self, connection: Connection, execution: Execution, timeout: float | None = None) -> None:
        self._connection, self._execution = connection, execution
        if timeout is not None:
            client = connection.client
            client.soon(lambda: client.later(timeout, self._out_of_time, timeout))

    def wait(self, timeout: str | float | None = None) -> Results:
        """Wait until the cell is over.

        The stop button ends only the wait. To end the cell, call `stop()`. timeout: the limit of the wait, in seconds
        or as "30s". Raises CellError if the cell failed, TimeoutError after `timeout`.
        """
        return wait_for(self._connection, self._execution, timeout)

    def stop(self, end_after: str | float | None = None) -> Results:
        """Stop the cell and wait for its end. A training stops at a step boundary with its state intact.

        If a rank does not end, a warning names it. If you then press the stop button, the process of this rank is
        killed, and its variables are lost. end_after: kill the process without a press, this many seconds (or "30s")
        after the warning. Use it in programs without a user.
        """
        return stopped(self._connection, self._execution, seconds_given(end_after))

    @property
    def output(self) -> Mapping[int, str]:
        """Return the text that each rank has printed so far."""
        return self._execution.results(self.status).output

    @property
    def status(self) -> str:
        """Return "running", "ok", "error" or "interrupted"."""
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
                with suppress(CellStopped):  # nobody waits here for the notebook
                    stop.tick()
                self._connection.client.later(TICK_SECONDS, tick)

        tick()

    def show(self) -> None:
        """Show a line about this cell in the output of its notebook cell. The line is updated when the cell ends."""
        execution, client = self._execution, self._connection.client
        transient = {"display_id": f"nbkit-{execution.request.id}"}
        client.soon(lambda: execution.outbox.put("display", self._bundle(age=False), {}, transient))
        if hasattr(execution.outbox.screen, "kernel"):  # a plain screen cannot update earlier output
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
            f"<span style='opacity:.6'>{next_words}</span>"
        )
