"""Happens-before between streams, communicators and the host, by vector clocks.

Everything that computes is an actor: the host, a stream, a communicator. An event has the clock of the actor that
recorded it, and an actor that waits for the event takes over that clock. If two actors access the same memory and one
writes, their clocks must order the accesses. Otherwise they race, whichever came first this time.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

HOST = "host"
Clock = dict[str, int]


class Race(RuntimeError):
    """Two accesses to the same memory that nothing orders."""


@dataclass(frozen=True)
class _Access:
    actor: str
    time: int
    what: str


@dataclass
class _Memory:
    written: _Access | None = None
    read: dict[str, _Access] = field(default_factory=dict)


class Order:
    """The order of accesses in one process. Safe between threads."""

    def __init__(self) -> None:
        self._clocks: dict[str, Clock] = {}
        self._memory: dict[int, _Memory] = {}
        self._lock = threading.RLock()
        self._streams = 0

    def new_stream(self) -> str:
        """Return the name of a new stream."""
        with self._lock:
            self._streams += 1
            return f"stream {self._streams}"

    def now(self, actor: str) -> Clock:
        """Return an event: all that `actor` has done so far, and all that happened before it."""
        with self._lock:
            self._tick(actor)
            return dict(self._clocks[actor])

    def follow(self, actor: str, other: str) -> None:
        """Order all that `actor` does from here on after all that `other` has done so far."""
        with self._lock:
            self._tick(other)
            self.after(actor, self._clocks[other])

    def after(self, actor: str, event: Clock) -> None:
        """Order all that `actor` does from here on after `event`."""
        with self._lock:
            clock = self._clocks.setdefault(actor, {})
            for other, time in event.items():
                clock[other] = max(clock.get(other, 0), time)

    def touch(self, actor: str, tensor: Any, what: str, *, write: bool) -> None:
        """Note that `actor` reads or writes the memory of `tensor`. Raises Race."""
        storage = tensor if isinstance(tensor, torch.UntypedStorage) else tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if (memory := self._memory.get(key)) is None:
                memory = self._memory[key] = _Memory()
                weakref.finalize(storage, self._memory.pop, key, None)
            time = self._tick(actor)
            mine = _Access(actor, time, what)
            before = [memory.written, *(memory.read.values() if write else ())]
            for one in before:
                if one is not None and one.actor != actor and self._clocks[actor].get(one.actor, 0) < one.time:
                    does = "writes" if write else "reads"
                    did = "wrote" if one is memory.written else "read"
                    raise Race(f"{what} on {actor} {does} what {one.what} on {one.actor} {did}: nothing orders the two")
            if write:
                memory.written, memory.read = mine, {}
            else:
                memory.read[actor] = mine

    def _tick(self, actor: str) -> int:
        clock = self._clocks.setdefault(actor, {})
        clock[actor] = time = clock.get(actor, 0) + 1
        return time
