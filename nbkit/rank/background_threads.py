"""Threads beside a training: those that compute in Python on the same interpreter, and those that may never end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SWITCH_SECONDS = 1e-4
_lock = threading.Lock()
_inside = 0
_before = 0.0


@contextmanager
def giving_way() -> Iterator[None]:
    """Within it, a thread that wants the interpreter gets it after 0.1 ms instead of 5 ms.

    Torch lets go of the interpreter in every operation. Beside a thread that computes in Python, a training waits for a
    whole switch interval after each of them: its steps took 2 to 5 times as long. May be entered from several threads.
    """
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, SWITCH_SECONDS))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                sys.setswitchinterval(_before)


def started(work: Callable[[], object], name: str, *, after_s: float = 0.0) -> threading.Thread | None:
    """A thread that does `work`, which ends with the process; None when the interpreter ends.

    Python 3.12 and later makes no thread then, in `atexit` either.
    """
    thread: threading.Thread = threading.Timer(after_s, work) if after_s else threading.Thread(target=work)
    thread.name, thread.daemon = name, True
    try:
        thread.start()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise
        return None
    return thread
