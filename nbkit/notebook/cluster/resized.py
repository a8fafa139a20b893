"""Take over what the parent of the ranks wrote when their number changed."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.registry import ClusterEntry
from nbkit.wire.processes import Process


def read(folder: Path, *, since: float) -> dict[str, Any] | None:
    """Return what was written after `since` (time.time()), or None."""
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((folder / "resized.json").read_text())
        return found if found["when"] > since else None
    return None


def entry_of(entry: ClusterEntry, read: dict[str, Any]) -> ClusterEntry:
    """Return the entry of the cluster as it is now, and register it."""
    with suppress(ProcessLookupError):
        ranks = tuple(map(Process.of, read["pids"]))
        pins, labels, reasons = read["pins"], entry.labels[: read["n"]], entry.reasons[: read["n"]]
        if all("label" in pin for pin in pins):  # planned by a notebook; else every rank has kept its own
            labels, reasons = (tuple(pin[key] for pin in pins) for key in ("label", "why"))
        entry = replace(entry, n=read["n"], ranks=ranks, labels=labels, reasons=reasons)
        registry.save(entry)
    return entry
