"""A thread that writes to disk, for who measures or trains: it waits for nothing but the end of a run.

What goes wrong in writing is warned of once, at the next item, while the training goes on; it never ends one.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable
from typing import Any

IDLE = ()
"""The item that is taken when none has come for a while."""


class Background:
    """Calls `take` with each item that is put, in a thread of its own, after a failure with none; at `end`, `close`.

    An item that is an Event asks for all that was put before it to be on disk. idle_s: take IDLE when nothing has come
    for so long. pace_s: after an item, sleep for so long, since to be woken for each costs the training. what: becomes
    of the items, for the warning: "recorded in runs/a".
    """

    def __init__(
        self,
        take: Callable[[Any], None],
        close: Callable[[], None],
        *,
        name: str,
        what: str,
        idle_s: float | None = None,
        pace_s: float = 0.0,
    ) -> None:
        self._take, self._close, self._what, self._idle_s, self._pace_s = take, close, what, idle_s, pace_s
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._failure: Exception | None = None
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """One more item; from any thread."""
        self.tell()
        self._items.put(item)

    def tell(self) -> None:
        """Warn, once, if the writing has failed. Only on the main thread, whose output is the cell's."""
        if self._failure is None or self._warned or threading.current_thread() is not threading.main_thread():
            return
        self._warned = True
        text = f"nothing more is {self._what}: {type(self._failure).__name__}: {self._failure}"
        warnings.warn(text, stacklevel=3)

    def end(self) -> None:
        """Take what is there, and no more."""
        self._items.put(None)

    def flush(self) -> None:
        """Wait until all that was put is on disk; after `end` nothing more gets there."""
        written = threading.Event()
        self._items.put(written)
        self._hurry.set()
        while self._thread.is_alive() and not written.wait(1.0):
            pass
        self.tell()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                if self._failure is None:
                    self._take(item)
            except Exception as error:
                self._failure = error
            finally:
                if isinstance(item, threading.Event):
                    item.set()
        self._close()

    def _next(self) -> Any:
        try:
            item = self._items.get(timeout=self._idle_s)
        except queue.Empty:
            return IDLE
        if self._pace_s and item is not None and not isinstance(item, threading.Event) and self._items.empty():
            self._hurry.wait(self._pace_s)
            self._hurry.clear()
        return item
