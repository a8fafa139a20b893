"""The training that was made last on this rank: what a request means when none is making steps."""

from __future__ import annotations

import weakref
from typing import Any

_newest: weakref.ref[Any] | None = None


def note(owner: Any) -> None:
    """`owner` (a Trainer or a Job) has just been made."""
    global _newest
    _newest = weakref.ref(owner)


def newest() -> Any:
    """The Trainer or Job made last, if it still lives; else None. From any thread."""
    return _newest() if _newest is not None else None
