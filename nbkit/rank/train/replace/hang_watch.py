"""`hang_timeout=`: end a rank that all others wait for, so that another process takes its place.

Each rank watches itself from a thread, and reports when it has waited for others for that long. A rank that hangs
reports nothing: the system may have stopped it, or it may block the interpreter. The process that has started the ranks
hears which ranks wait, and ends those that do not. If all wait, the program is at fault and nobody is ended: `%nbkit
why` says who waits for what.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nbkit.rank.comm import delegating_group
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.replace import resume_fit
from nbkit.rank.world.activity import activity

_LOOKS = 10  # checks within the time after which a rank counts as waiting
_LEAST_SECONDS = 0.05


@contextmanager
def hang_watch(seconds: float | None, rank: int) -> Iterator[None]:
    """Tell the host whether this rank waits, while steps are made inside. seconds: None if nobody asked for it."""
    if seconds is None or resume_fit.host is None:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(seconds, rank, over), name="nbkit-hang-watch", daemon=True)
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
        # If all wait for each other, they say so one after the other. So they report at half of the time, and the host
        # acts at the whole time.
        due = seconds / 2 if not told else seconds
        if told < seconds and stood >= due and (told or host.asks() or activity(rank, {}).waits is not None):
            told = stood
            host.waits(stood, due=stood >= seconds)
    if told:
        host.waits(0.0)


def _moved() -> tuple[int, int]:
    """Return a value that changes when this rank issues an operation or makes a step."""
    return delegating_group.num_issued(), step_boundary.progress().get("step", 0)
