"""Bytes that two ranks swap over gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import perf_counter_ns as now
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.rank.comm.gloo.interruptible_wait import future, wait


def options(timeout: timedelta) -> dist.AllToAllOptions:
    """Of an exchange that is waited for so long."""
    found = dist.AllToAllOptions()
    found.timeout = timeout
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor, flat: what gloo carries does not depend on what it can add."""
    return tensor.view(-1).view(torch.uint8)


def swap(inner: Any, received: Tensor, sent: Tensor, timeout: timedelta) -> Any:
    """Start to send `sent` to the other rank of a group of two, and to receive as much. Returns gloo's handle."""
    splits = [0, 0]
    splits[1 - inner.rank()] = sent.nbytes
    return inner.alltoall_base(as_bytes(received), as_bytes(sent), splits, splits, options(timeout))


class Exchange(dist.Work):
    """Messages under way; `finish` uses what they brought, once, called by whoever first sees that they are done."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], object], outputs: list[Tensor]) -> None:
        super().__init__()
        self._works, self._outputs, self._issued = works, outputs, now()
        self._finish: Callable[[], object] | None = finish
        self._lock = threading.Lock()

    def _end(self) -> None:
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            wait(work, self._issued, timeout)
        self._end()
        return True

    def is_completed(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            return False
        if self.is_success():
            self._end()
        return True

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        try:
            return next((error for work in self._works if (error := work.exception()) is not None), None)
        except TypeError:  # torch 2.11 cannot hand an exception, nor None in its place, to Python
            return None if self.is_success() else RuntimeError("a message of this operation has failed")

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        def ended(done: torch.futures.Future[Any]) -> list[Tensor]:
            for one in done.value():
                one.value()  # raises what the exchange raised
            self._end()
            return self._outputs

        return torch.futures.collect_all([future(work, self._issued) for work in self._works]).then(ended)
