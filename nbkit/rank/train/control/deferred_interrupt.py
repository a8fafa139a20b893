"""Interrupts that wait: for the few lines that every rank does, or none."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """A SIGINT that arrives inside acts at the end of it. Only for what is short and waits for nobody."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals act in the main thread alone
        return
    arrived: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
        if arrived:
            signal.raise_signal(signal.SIGINT)
