"""Implement `hang_timeout=`: end a rank that all others wait for, so that another process takes its place.

Each rank watches itself in a thread, and reports when it has waited for others for this time. A rank that hangs reports
nothing: the system may have stopped it, or it may block the interpreter. The process that has started the ranks
receives the reports, and ends the ranks that do not wait. If all ranks wait, the program has an error, and no rank is
ended. Then `%nbkit why` says which rank waits for what.

In a script, as under torchrun, there is no such process. After a network failure the ranks would wait for ever, because
nbkit disables torch's timeouts. So a rank that has waited for this time prints the operation, and ends its process.
torchrun then ends the others.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

from nbkit.rank.comm import delegating_group
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.replace import resume_fit
from nbkit.rank.world.activity import activity
from nbkit.wire.activity import Activity

SCRIPT_SECONDS = 600.0
"""The default limit in a script. It is torch's default for NCCL groups."""

_LOOKS = 10  # number of checks within the limit
_LEAST_SECONDS = 0.05


@contextmanager
def hang_watch(
    seconds: float | None, rank: int, *, ranks: int, replaceable: bool, say: Callable[[str], None] | None
) -> Iterator[None]:
    """Watch whether this rank waits for others, while steps are made inside.

    seconds: the limit; None if the user has set none. ranks: the size of the world. replaceable: a rank that dies is
    replaced. say: shows the limit to the user; None if the user knows it.
    """
    watch = _watch
    if resume_fit.host is None:
        watch, seconds = _watch_script, SCRIPT_SECONDS if seconds is None else seconds
        if say is not None and ranks > 1 and seconds < inf:
            say(f"A rank that waits {seconds:g} s for the others ends this run (hang_timeout= of nbkit.Recovery).")
    elif not replaceable:
        seconds = None
    if seconds is None or seconds == inf or ranks == 1:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=watch, args=(seconds, rank, over), name="nbkit-hang-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(seconds: float, rank: int, over: threading.Event) -> None:
    host = resume_fit.host
    assert host is not None
    last, since, told = _moved(), time.monotonic(), 0.0
    while not over.wait(max(seconds / _LOOKS, _LEAST_SECONDS)):
        if (moved := _moved()) != last:
            last, since = moved, time.monotonic()
            if told:
                told = 0.0
                host.waits(0.0)
            continue
        stood = time.monotonic() - since
        # If all ranks wait for each other, their reports do not arrive at the same time. So ranks report after half of
        # the time, and the host acts after the whole time.
        due = seconds / 2 if not told else seconds
        if told < seconds and stood >= due and (told or host.asks() or activity(rank, {}).waits is not None):
            told = stood
            host.waits(stood, due=stood >= seconds)
    if told:
        host.waits(0.0)


def _watch_script(seconds: float, rank: int, over: threading.Event) -> None:
    last, since = _moved(), time.monotonic()
    while not over.wait(max(seconds / _LOOKS, _LEAST_SECONDS)):
        if (moved := _moved()) != last:
            last, since = moved, time.monotonic()
        elif time.monotonic() - since >= seconds:
            found = activity(rank, {}, stacks=True)
            if found.waits is not None:  # otherwise the others wait for this rank
                _end(rank, seconds, found)


def _end(rank: int, seconds: float, found: Activity) -> None:
    """Print what this rank waits for, and end its process."""
    assert found.waits is not None
    line = f" ({found.waits.line})" if found.waits.line is not None else ""
    text = [
        f"nbkit: rank {rank} has waited {seconds:g} s in {found.waits.name}{line}, and ends this run.",
        "The rank that the others wait for has not reported why. Its own output, or its host, may tell more.",
        *(f"flight recorder: {entry}" for entry in found.unfinished),
        "→ recovery=nbkit.Recovery(hang_timeout=3600) waits longer; float('inf') waits forever",
        found.stacks,
    ]
    print("\n".join(text), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)  # the main thread waits in C++, where no exception reaches it


def _moved() -> tuple[int, int]:
    """Return a value that changes when this rank issues an operation or makes a step."""
    return delegating_group.num_issued(), step_boundary.progress().get("step", 0)
