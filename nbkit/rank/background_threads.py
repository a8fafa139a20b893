"""Functions for threads that run beside a training: threads that compute in Python, and threads that may never end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SWITCH_SECONDS = 1e-4
_lock = threading.Lock()
_inside = 0
_before = 0.0
_examining = 0
_since = _examined = 0  # ns


@contextmanager
def giving_way() -> Iterator[None]:
    """Shorten the interpreter's switch interval from 5 ms to 0.1 ms inside this context.

    Torch releases the interpreter in every operation. If another thread computes in Python, a training waits for a
    whole switch interval after each operation. Steps then took 2 to 5 times as long. Several threads may enter this
    context at the same time.
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


@contextmanager
def examining() -> Iterator[None]:
    """Give way to the training inside this context, which examines strategies. `examined_ns` counts the time."""
    global _examining, _since, _examined
    with giving_way():
        with _lock:
            if _examining == 0:
                _since = time.perf_counter_ns()
            _examining += 1
        try:
            yield
        finally:
            with _lock:
                _examining -= 1
                if _examining == 0:
                    _examined += time.perf_counter_ns() - _since


def examined_ns() -> int:
    """Return for how many ns this process has examined strategies so far."""
    with _lock:
        return _examined + (time.perf_counter_ns() - _since if _examining else 0)


def started(work: Callable[[], object], name: str, *, after_s: float = 0.0) -> threading.Thread | None:
    """Start a daemon thread that runs `work`, and return it; None if the interpreter is shutting down.

    Python 3.12 and later start no threads during shutdown or in `atexit`.
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
