"""A link between ranks on one machine that has a given latency and rate. Each rank has its own link, which sleeps.

A rank's operations leave it one after the other. An operation is handed to its process group only when its bytes would
have left, so that it ends when the bytes of the last rank have left. Ranks that wait for it sleep, so that load of
the machine delays it little. `tc tbf` on the loopback interface would make all ranks share one rate.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.pipeline.sleeping_rank import until
from nbkit.rank.comm.delegating_group import COLLECTIVES, DelegatingGroup, num_bytes

_PARTED = ("alltoall_base", "all_to_all_single")
"""Operations whose arguments say how much each rank gets: (output, input, sizes received, sizes sent)."""


@dataclass(frozen=True)
class Rate:
    """The speed of a link. latency: seconds of an operation. speed: bytes per second that leave a rank."""

    latency: float
    speed: float


class _Later:
    """The work of an operation that is handed to its process group later."""

    def __init__(self) -> None:
        self.given = threading.Event()
        self.inner: Any = None
        self.error: Exception | None = None

    def wait(self, *args: Any) -> bool:
        self.given.wait()
        if self.error is not None:
            raise self.error
        return self.inner.wait(*args) if self.inner is not None else True

    def is_completed(self) -> bool:
        return self.given.is_set() and (self.inner is None or self.inner.is_completed())

    def get_future(self) -> Any:
        self.given.wait()
        return self.inner.get_future()


class SleptLink:
    """The link of this process. rate: None hands operations on at once. carried: bytes that have left at a rate."""

    def __init__(self) -> None:
        self.rate: Rate | None = None
        self.carried = 0.0
        self._free = 0.0
        self._queue: queue.SimpleQueue[tuple[float, _Later, Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._carry, daemon=True).start()
        for name in COLLECTIVES:
            if hasattr(DelegatingGroup, name):
                setattr(DelegatingGroup, name, self._slow(name, getattr(DelegatingGroup, name)))
        transfer = DelegatingGroup._transfer

        def later(group: Any, operation: str, tensors: Any, peer: Any, counts: Any, own: Any, how: Any) -> Any:
            if operation == "send":
                issue = own
                own = lambda *args: self._send(num_bytes(tensors), lambda: issue(*args))  # noqa: E731
            return transfer(group, operation, tensors, peer, counts, own, how)

        DelegatingGroup._transfer = later  # type: ignore[method-assign]

    def _slow(self, name: str, issue: Callable[..., Any]) -> Callable[..., Any]:
        def later(group: Any, *args: Any, **kwargs: Any) -> Any:
            return self._send(_leaving(name, group, args), lambda: issue(group, *args, **kwargs))

        return later

    def _send(self, leaving: float, issue: Callable[[], Any]) -> Any:
        if self.rate is None:
            return issue()
        now = time.perf_counter()
        self.carried += leaving
        self._free = max(now, self._free) + leaving / self.rate.speed
        work = _Later()
        self._queue.put((self._free + self.rate.latency, work, issue))
        return work

    def _carry(self) -> None:
        while True:
            due, work, issue = self._queue.get()
            until(due)
            try:
                work.inner = issue()
            except Exception as error:  # `wait` raises it
                work.error = error
            work.given.set()
            # Free the sent tensors. Otherwise this thread would keep them while it waits for the next operation.
            del work, issue


def _leaving(name: str, group: Any, args: tuple[Any, ...]) -> float:
    """Return the bytes that leave this rank in an operation."""
    spoken, payload = COLLECTIVES[name]
    size, ranks = num_bytes(args[payload]) if payload is not None else 0, group.size()
    if name in _PARTED and (parts := args[3]):
        return size * (1 - parts[group.rank()] / max(sum(parts), 1))
    return size * {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": ranks - 1.0}.get(spoken, (ranks - 1) / ranks)
