"""Where events of a rank go: to everyone who listens. Listeners return at once; they must not wait or communicate."""

from __future__ import annotations

from collections.abc import Callable

from nbkit.records.events import Event

__all__ = ["emit", "listeners"]

listeners: list[Callable[[Event], None]] = []
"""Called on this rank, in the training thread, with every event of every job."""


def emit(event: Event) -> None:
    """Tell all listeners."""
    for listener in listeners:
        listener(event)
