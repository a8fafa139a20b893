"""One line on the screen that says what is being done while it takes long; it is gone when that is done."""

from __future__ import annotations

import sys
import threading
import time
from contextvars import copy_context
from typing import Self

from nbkit.durations import text_of
from nbkit.notebook.cluster.naming import notebook_shell

_AFTER, _EVERY = 1.5, 1.0
"""Seconds before the line is first shown, and between two of it."""


class ProgressLine:
    """Within it, what was said last, and how long it all takes so far. In a notebook or on a terminal; elsewhere none.

    By a thread: what takes long may say nothing for long.
    """

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what, self._width = name, what, 0
        self._out, self._done = sys.stdout, threading.Event()
        self._shown = notebook_shell() is not None or self._out.isatty()
        # A copy of the context: by it a kernel knows which cell a thread writes for.
        self._thread = threading.Thread(target=copy_context().run, args=(self._draw,), daemon=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._shown:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._shown:
            self._thread.join()
        if self._width:
            self._write("")
            self._out.write("\r")

    def say(self, what: str) -> None:
        """From now on this is being done."""
        self._what = what

    def _draw(self) -> None:
        wait = _AFTER
        while not self._done.wait(wait):
            self._write(f"{self._name}: {self._what} ({text_of(time.monotonic() - self._began)})")
            wait = _EVERY

    def _write(self, line: str) -> None:
        self._out.write(f"\r{line:<{self._width}}")
        self._out.flush()
        self._width = len(line)
