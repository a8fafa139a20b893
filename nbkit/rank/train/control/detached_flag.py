"""A flag: the cell that runs on this rank is detached, and nobody may be there when it ends. The bridge sets it."""

from __future__ import annotations

from contextvars import ContextVar

DETACHED: ContextVar[bool] = ContextVar("detached", default=False)
