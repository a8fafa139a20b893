"""What happened in a training, in words. Every view of a run takes its sentences from here.

The dashboard, TensorBoard's tab, the report, the text in a terminal and the picture in a saved notebook show the same
marks. A page gets the words with each event.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from nbkit.figures import figure, seconds, size

Told = Mapping[str, Any]
"""An event as sinks get it: kind, step, and the fields of its class in nbkit.records.events."""


def brief(strategy: str) -> str:
    """Return a strategy without the numbers of its experts, which may take more room than all else."""
    return re.sub(r"(?<= experts=)\S+", "…", strategy)


@lru_cache(maxsize=64)  # each step asks for that of the same strategy
def recorded(strategy: str) -> str:
    """Return a strategy as the record of a step has it: "dp=2 ep=2 experts=6-moved-1f0c2a9b".

    The places of the experts of a large model take tens of KB. In place of them, the record has the number of experts
    that are away from their own places, and a digest of the places. So records of different strategies differ. The
    events run_started, switch and resized have the whole strategy. A strategy in this form stays as it is.
    """
    return re.sub(r"(?<= experts=)\d+:\S+", lambda places: _moved(places[0]), strategy)


def _moved(places: str) -> str:
    """Return "6-moved-1f0c2a9b" for "0:1-5,2-7+3:0-4"."""
    experts = len(re.findall(r"\d+", places)) - places.count(":")  # the number before a colon is that of a layer
    return f"{experts}-moved-{hashlib.sha256(places.encode()).hexdigest()[:8]}"


def without_experts(strategy: str) -> str:
    """Return a strategy with every expert at its own place."""
    return re.sub(r" experts=\S+", "", strategy)


def _switch(event: Told) -> tuple[str, str]:
    same = event.get("identical") is True
    old, new = (brief(str(event.get(side, ""))) for side in ("old", "new"))
    return new, (
        f"switch {_after(event)}: {old} → {new}, "
        f"{size(event.get('moved_bytes', 0))} moved, {seconds(event.get('pause_s', 0.0))} without a step"
        + ("; weights and optimizer state are identical, bit for bit" if same else "")
    )


def failure(event: Told) -> str:
    """Return the rank that failed, its error, and what happened."""
    whose = f"rank {event['rank']}" if event.get("rank") is not None else ""
    return ": ".join(word for word in (whose, event.get("error", ""), event.get("what", "")) if word)


def _failure(event: Told) -> tuple[str, str]:
    whose = f"rank {event['rank']}: " if event.get("rank") is not None else ""
    return f"{whose}{event.get('error') or 'failed'}", f"failure {_after(event)}: {failure(event)}"


def _replaced(event: Told) -> tuple[str, str]:
    lost = f"{event.get('steps_lost', 0)} steps and {seconds(event.get('seconds', 0.0))} lost"
    device = f"; {event['devices']}" if event.get("devices") else ""
    return f"rank {event.get('ranks', '')} replaced", (
        f"{event.get('why', '')}, replaced {_after(event)}: {lost}{device}"
    )


def resized(event: Told) -> str:
    """Return the numbers of ranks, the strategy in force now, and what the change took."""
    return (
        f"{event.get('old_ranks', '')} → {event.get('ranks', '')} ranks {_after(event)}, "
        f"now {brief(str(event.get('new', '')))}: "
        f"{size(event.get('moved_bytes', 0))} moved, {seconds(event.get('pause_s', 0.0))} without a step"
    )


def _resized(event: Told) -> tuple[str, str]:
    return f"{event.get('ranks', '')} ranks", resized(event)


def _rebalanced(event: Told) -> tuple[str, str]:
    gain = f"{event.get('gain', 0.0):.0%} less computing"
    if experts := event.get("experts"):
        return "experts moved", f"{experts} experts moved to other ranks {_after(event)}: {gain}"
    return "rebalanced", f"work divided anew {_after(event)}: speeds {event.get('speeds', '')}, {gain}"


def _out_of_memory(event: Told) -> tuple[str, str]:
    what = f": {event['what']}" if event.get("what") else ""
    if event.get("changes"):
        return f"rescued: {event['changes']}", f"rescued {_after(event)}, goes on with {event['changes']}{what}"
    where = f", on rank {event['rank']}" if event.get("rank") is not None else ""
    return "out of memory", f"out of memory {_after(event)}{where}{what}"


def _lr_changed(event: Told) -> tuple[str, str]:
    new = figure(event.get("new", 0.0))
    return f"lr {new}", f"learning rate {_after(event)}: {figure(event.get('old', 0.0))} → {new}"


def _live_cell(event: Told) -> tuple[str, str]:
    what = f": {event['what']}" if event.get("what") else ""
    return "live cell", f"live cell {_after(event)}, {seconds(event.get('seconds', 0.0))}{what}"


def _checkpoint(event: Told) -> tuple[str, str]:
    action = event.get("action") or "saved"
    return action, f"{action} {_after(event)}: {event.get('path', '')}"


def _after(event: Told) -> str:
    return f"after step {event.get('step', 0):,}"


# In the order of weight: where room is short, the first ones are named.
_MARKS: dict[str, tuple[str, Callable[[Told], tuple[str, str]]]] = {
    "failure": ("✕", _failure),
    "replaced": ("✚", _replaced),
    "out_of_memory": ("▤", _out_of_memory),
    "resized": ("⤢", _resized),
    "switch": ("⇄", _switch),
    "rebalanced": ("÷", _rebalanced),
    "lr_changed": ("η", _lr_changed),
    "live_cell": ("›", _live_cell),
    "checkpoint": ("▾", _checkpoint),
}
GREAT = tuple(_MARKS)[:6]
"""Kinds that have a line through the curve, and words above it. The others have a small sign."""


def mark_of(event: Told) -> dict[str, str]:
    """Return {"sign", "name", "text"} of an event: for the curve, for above it, and a sentence. {} for other kinds."""
    found = _MARKS.get(event.get("kind", ""))
    if found is None:
        return {}
    name, text = found[1](event)
    return {"sign": found[0], "name": name, "text": text}
