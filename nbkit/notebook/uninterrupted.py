"""Clearing up that a second Ctrl-C does not leave half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """An interrupt that arrives inside is lost. Only for what follows one, or an error, and takes seconds at most."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals act in the main thread alone
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
