"""The newest training of this rank, and the state of its weights after an error.

`newest` returns the training that was made last: requests refer to it when none is making steps. DETACHED is set by
the bridge when the cell that runs on this rank is detached, so that nobody may be there when it ends. Integrity
remembers whether the weights of this rank are whole and whether a step was broken off.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_newest: weakref.ref[Any] | None = None


def note(owner: Any) -> None:
    """Note that `owner` (a Trainer or a Job) has just been made."""
    global _newest
    _newest = weakref.ref(owner)


def newest() -> Any:
    """Return the Trainer or Job made last, or None if it no longer exists. From any thread."""
    return _newest() if _newest is not None else None


DETACHED: ContextVar[bool] = ContextVar("detached", default=False)


class Integrity:
    """State of this rank's weights after an error.

    broken_off: a step was begun and not finished, so that ranks may differ by a step. half_way: some weights are from
    before a change and some from after it.
    """

    def __init__(self) -> None:
        self.broken_off = self.half_way = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the weights inside. If an error leaves the block, they stay marked as half-way."""
        self.half_way = True
        yield
        self.half_way = False

    def restored(self, *, ranks_agree: bool) -> None:
        """Note that the weights are whole again. ranks_agree: every rank is also at the same step."""
        self.half_way = False
        self.broken_off &= not ranks_agree
