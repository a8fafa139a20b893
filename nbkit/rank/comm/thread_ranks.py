"""Ranks that are threads of one process, one of which runs at a time: a strategy runs whole, and sends nothing.

A rank runs until it waits for another one. So what a model keeps in its modules or in torch is used by one thread at a
time, and ranks that all wait for each other are found out at once. On the CPU alone: there a backward pass runs in the
thread that asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ThreadRanks(Generic[T]):
    """`size` ranks, for one `run`. Groups of them are in thread_group.py."""

    def __init__(
        self,
        size: int,
        *,
        leave: Callable[[], Any] = lambda: None,
        enter: Callable[[Any], None] = lambda left: None,
    ) -> None:
        """leave, enter: called where a rank stops to run and where it goes on, with what it left."""
        self.size, self._leave, self._enter = size, leave, enter
        self._turn = threading.Condition()  # held by the rank that runs
        self._awaited: list[Callable[[], bool]] = []
        self._running = 0
        self._error: BaseException | None = None

    def run(self, of_rank: Callable[[int], T]) -> list[T]:
        """of_rank(rank) of every rank, by rank. Raises what the first of them raised that failed."""
        results: dict[int, T] = {}

        def body(rank: int) -> None:
            with self._turn:
                try:
                    if self._error is None:
                        results[rank] = of_rank(rank)
                except BaseException as error:
                    self._error = self._error or error
                finally:
                    self._running -= 1
                    self._turn.notify_all()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.size)]
        self._running = self.size
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # Stop: who waits goes, and who runs goes where it would wait
            self._error = error
            raise
        if self._error is not None:
            raise self._error
        return [results[rank] for rank in range(self.size)]

    def wait(self, ready: Callable[[], bool]) -> None:
        """Of a rank: let the others run until ready(), which what another rank does makes true.

        Raises RuntimeError where another has failed, and where all that still run wait.
        """
        left = self._leave()
        self._awaited.append(ready)
        try:
            while not ready():
                if len(self._awaited) == self._running and not any(each() for each in self._awaited):
                    self._error = self._error or RuntimeError("the ranks wait for each other")
                if self._error is not None:
                    self._turn.notify_all()
                    raise RuntimeError("another rank has failed")
                self._turn.wait()
        finally:
            self._awaited.remove(ready)
            self._enter(left)

    def tell(self) -> None:
        """Of a rank: something was done that another one may wait for."""
        self._turn.notify_all()
