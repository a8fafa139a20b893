"""Waiting for a cell: an event ends the wait, a tick admits the user's interrupt.

A bare future would keep the interrupt out until it is set; a poll alone would make every cell as slow as its
period. So both.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait as wait_futures
from typing import TYPE_CHECKING

from nbkit.errors import CellError, CellStopped, UsageError
from nbkit.notebook.cluster.cells.execution import Running
from nbkit.notebook.cluster.cells.results import Results
from nbkit.notebook.cluster.cells.stop import END_AFTER_SECONDS, Presses, Stop
from nbkit.notebook.cluster.output import display

if TYPE_CHECKING:
    from nbkit.notebook.cluster.cluster import Cluster

TICK_SECONDS = 0.1


def wait_here(cluster: Cluster, running: Running, timeout: float | None = None) -> Results:
    """Block until the cell is over. Raises what it raised, CellStopped after an interrupt."""
    deadline = None if timeout is None else time.monotonic() + timeout
    stop: Stop | None = None
    with Presses() as presses:
        try:
            while not running.done.done():
                wait_futures([running.done], TICK_SECONDS)
                if deadline is not None and time.monotonic() > deadline and not running.done.done():
                    stop = presses.stop = begin_stop(cluster, running, timeout)
                    break
        except KeyboardInterrupt:
            stop = presses.stop = begin_stop(cluster, running)
        while stop is not None and not running.done.done():
            stop.tick()
            wait_futures([running.done], TICK_SECONDS)
    return outcome(running, stop)


def wait_for(running: Running, timeout: float | None = None) -> Results:
    """Wait for a detached cell. An interrupt or the timeout (seconds) ends the waiting, never the cell.

    Raises what the cell raised, TimeoutError, or CellStopped after an interrupt.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        while not running.done.done():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{running.describe()} still runs after {timeout:g} s; handle.stop() ends it")
            wait_futures([running.done], TICK_SECONDS)
    except KeyboardInterrupt:
        raise CellStopped(f"stopped waiting; {running.describe()} goes on. → handle.stop() ends it") from None
    return running.done.result()


async def wait_async(cluster: Cluster, running: Running, timeout: float | None = None) -> Results:
    """`wait_here`, leaving the kernel's event loop free; the kernel tells an interrupt by cancelling."""
    deadline = None if timeout is None else time.monotonic() + timeout
    over = asyncio.wrap_future(running.done)
    over.add_done_callback(lambda future: future.cancelled() or future.exception())  # read below
    stop: Stop | None = None
    try:
        while not over.done():
            await asyncio.wait({over}, timeout=TICK_SECONDS)
            if deadline is not None and time.monotonic() > deadline and not over.done():
                stop = begin_stop(cluster, running, timeout)
                break
    except asyncio.CancelledError:
        stop = begin_stop(cluster, running)
    if stop is not None:
        with Presses(stop):
            while not running.done.done():
                stop.tick()
                await asyncio.sleep(TICK_SECONDS / 2)
    return outcome(running, stop)


def until_training(cluster: Cluster) -> Iterator[None]:
    """Ends when all ranks are between two steps of a training; the cell that runs may still be on its way there."""
    while True:
        states = cluster.post.wire.ask(range(cluster.entry.n), "status")
        if states and all(state["training"] for state in states.values()):
            return
        if not cluster.post.busy():
            raise UsageError(
                "No training is running, so there is no step boundary.",
                hint="run it as an ordinary %%distributed cell; or start trainer.fit(...) with --detach first",
            )
        yield


def begin_stop(
    cluster: Cluster, running: Running, timeout: float | None = None, *, end_after: float | None = None
) -> Stop:
    """Ask the ranks to stop; the caller drives what follows. Of a cell that is being stopped: one press more.

    timeout: the seconds of --timeout, if that is why. end_after: see Stop.
    """
    end_after = end_after if timeout is None else END_AFTER_SECONDS
    if running.stop is None:
        reason = "stopped" if timeout is None else f"stopped after {timeout:g} s (--timeout)"
        running.stop = Stop(cluster, running, reason, end_after)
    else:
        if timeout is None:
            running.stop.press()
        if not running.stop.warned:  # what the warning says is kept to
            running.stop.end_after = running.stop.end_after or end_after
    if threading.current_thread() is threading.main_thread():  # other threads have no cell of their own
        running.stop.show_on(display.here())
    return running.stop


def outcome(running: Running, stop: Stop | None) -> Results:
    """The results, or the error that ends the cell in the notebook too, so that Run All stops."""
    results = running.done.result()
    if stop is None:
        return results
    if "--timeout" in running.reason:
        first = min(running.records, default=0)
        raise CellError(f"The cell was {stop.summary()}.", rank=first, ranks=running.request.ranks)
    raise CellStopped(stop.summary())
