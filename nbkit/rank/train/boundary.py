"""The step boundary: the one place where a request from outside (stop, live cell) acts on a training.

Requests reach each rank at its own time, from another thread, numbered 1, 2, 3, ... by their sender. A rank says in the
reduction of a step whether it holds the next number; when all do, all act after the same step. So no rank
ever acts alone, and no collective is added for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nbkit.errors import Stopped

__all__ = ["Inbox", "handlers", "inbox", "progress", "training"]


class Inbox:
    """Requests that have arrived at this rank, by number. Safe between threads."""

    def __init__(self) -> None:
        self.acted = 0
        self._waiting: dict[int, tuple[str, Any]] = {}
        self._lock = threading.Lock()

    def post(self, number: int, kind: str, payload: Any = None) -> None:
        """A request arrived. A number that was acted on already is ignored."""
        with self._lock:
            if number > self.acted:
                self._waiting[number] = (kind, payload)

    def holds(self, number: int) -> bool:
        """Whether request `number` has arrived here."""
        return number in self._waiting

    def highest(self) -> int:
        """The highest number that arrived, or was acted on."""
        with self._lock:
            return max(self._waiting, default=self.acted)

    def take(self, number: int) -> tuple[str, Any]:
        """Request `number`, which counts as acted on from now."""
        with self._lock:
            self.acted = number
            return self._waiting.pop(number)

    def drop(self, upto: int) -> list[tuple[int, str, Any]]:
        """Forget the requests up to `upto`, which now count as acted on; returns them."""
        with self._lock:
            self.acted = max(self.acted, upto)
            numbers = sorted(number for number in self._waiting if number <= self.acted)
            return [(number, *self._waiting.pop(number)) for number in numbers]


inbox = Inbox()

# kind -> what to do with the payload, on every rank at the same boundary. "unserved" gets (number, kind, payload) of a
# request that no boundary will serve any more, because the training ended first.
handlers: dict[str, Callable[[Any], None]] = {}

_training: Any = None
_progress: dict[str, Any] = {}


def training() -> Any:
    """The Trainer or Job that is between its first and its last step right now, else None. From any thread."""
    return _training


def progress() -> dict[str, Any]:
    """step, total (0: not known), loss, tokens_per_s, eta_s of the running or last training. From any thread."""
    return dict(_progress)


def report(**numbers: Any) -> None:
    """Set what `progress` answers."""
    _progress.update(numbers)


def enter(job: Any, device: torch.device) -> None:
    """`job` starts to make steps: requests posted before now, to whatever was running then, are out of date.

    Collective: ranks agree on the numbers, so that a stop which came too late for one training on some ranks
    does not stop the next one.
    """
    global _training
    highest = torch.tensor([inbox.highest()], dtype=torch.int64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    _tell_unserved(inbox.drop(int(highest)))
    _progress.clear()
    _training = job


def leave() -> None:
    """No more boundaries. What no boundary has served is handed to handlers["unserved"]."""
    global _training
    _training = None
    _tell_unserved(inbox.drop(inbox.highest()))


def act(number: int) -> None:
    """All ranks hold request `number`: serve it. Raises Stopped for a stop."""
    kind, payload = inbox.take(number)
    if kind == "stop":
        raise Stopped("stopped at a step boundary")
    if kind in handlers:
        handlers[kind](payload)
    else:
        _tell_unserved([(number, kind, payload)])


def _tell_unserved(requests: list[tuple[int, str, Any]]) -> None:
    for request in requests:
        if "unserved" in handlers:
            handlers["unserved"](request)
