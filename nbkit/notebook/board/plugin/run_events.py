"""The events of a run as all its ranks tell them: each once."""

from __future__ import annotations

from typing import Any

__all__ = ["put"]


def put(events: list[dict[str, Any]], event: dict[str, Any]) -> bool:
    """Add what happened; whether it took the place of an earlier entry, so that readers have to begin anew.

    A failure is told by the rank that it began on, and by those that were released because of it, who know less.
    """
    if event["kind"] == "failure":
        for at in range(len(events) - 1, -1, -1):
            other = events[at]
            if other["kind"] == "run_started":
                break
            if other["kind"] == "failure" and other.get("rank") == event.get("rank") and _one_story(other, event):
                better = bool(event.get("error")) and not other.get("error")
                if better:
                    events[at] = event
                return better
    events.append(event)
    return False


def _one_story(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Two refused switches are two stories; what is known only by hearsay is the one that its rank tells."""
    return not one.get("error") or not other.get("error") or one.get("what") == other.get("what")
