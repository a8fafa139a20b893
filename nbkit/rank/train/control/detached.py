"""Whether the cell that runs on this rank is detached, so that nobody may be there when it ends: the bridge says so."""

from __future__ import annotations

from contextvars import ContextVar

DETACHED: ContextVar[bool] = ContextVar("detached", default=False)
