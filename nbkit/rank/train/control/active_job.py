"""The training that was made last on this rank: what a request means when none is making steps.

A flag: the cell that runs on this rank is detached, and nobody may be there when it ends. The bridge sets it.

Remembers whether the weights of this rank are whole, and whether a step was broken off, for after an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_newest: weakref.ref[Any] | None = None


def note(owner: Any) -> None:
    """`owner` (a Trainer or a Job) has just been made."""
    global _newest
    _newest = weakref.ref(owner)


def newest() -> Any:
    """The Trainer or Job made last, if it still lives; else None. From any thread."""
    return _newest() if _newest is not None else None


DETACHED: ContextVar[bool] = ContextVar("detached", default=False)


class Integrity:
    """broken_off: a step was begun and not finished, so that ranks may differ by a step. half_way: the weights are
    partly those of before a change and partly those of after it.
    """

    def __init__(self) -> None:
        self.broken_off = self.half_way = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The weights change inside. Left by an error, they stay half-way."""
        self.half_way = True
        yield
        self.half_way = False

    def restored(self, *, ranks_agree: bool) -> None:
        """The weights are whole again; ranks_agree: and every rank stands at the same step."""
        self.half_way = False
        self.broken_off &= not ranks_agree
