"""Waiting for a cell: an event ends the wait, a tick admits the user's interrupt.

A bare future would keep the interrupt out until it is set; a poll alone would make every cell as slow as its
period. So both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import wait as wait_futures

from nbkit.durations import seconds_given
from nbkit.errors import CellError, CellStopped, UsageError
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.notebook.cluster.cells.results import Results
from nbkit.notebook.cluster.cells.stop import Presses, Stop, begin_stop
from nbkit.notebook.cluster.debugging.prompt import PromptTalk

TICK_SECONDS = 0.1


def wait_here(connection: Connection, execution: Execution, timeout: float | None = None) -> Results:
    """Block until the cell has ended. Raises what it raised, CellStopped after an interrupt."""
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
    """Have the prompts of ranks answered. Returns the deadline, later by what that took.

    Raises KeyboardInterrupt if the person wants the cell stopped.
    """
    began = time.monotonic()
    if PromptTalk(connection.client, execution).answer_all():
        raise KeyboardInterrupt
    return None if deadline is None else deadline + time.monotonic() - began


def wait_for(connection: Connection, execution: Execution, timeout: str | float | None = None) -> Results:
    """Wait for a detached cell. An interrupt or the timeout (seconds, or "30s") ends the waiting, never the cell.

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
    """Like `wait_here`, but the kernel's event loop stays free; an interrupt arrives as a cancellation."""
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
    """Yield until all ranks are between two steps of a training; the cell that runs may not have got there yet."""
    while True:
        states = connection.client.ask(range(connection.entry.n), "status")
        if states and all(state["training"] for state in states.values()):
            return
        if not connection.busy():
            raise UsageError(
                "No training is running, so there is no step boundary.",
                hint="run it as an ordinary %%distributed cell; or start trainer.fit(...) with --detach first",
            )
        yield


def outcome(execution: Execution, stop: Stop | None) -> Results:
    """The results, or the error that ends the cell in the notebook too, so that Run All stops."""
    results = execution.done.result()
    if stop is None:
        return results
    if "--timeout" in execution.reason:
        first = min(execution.records, default=0)
        raise CellError(f"The cell was {stop.summary()}.", rank=first, ranks=execution.request.ranks)
    raise CellStopped(stop.summary())
