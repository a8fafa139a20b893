"""The devices of a running cluster's ranks, as its parent has them now: a rank may have gone to a spare one."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from nbkit.notebook.cluster.hosts import progress
from nbkit.notebook.cluster.launch.device_pinning import Pin, Pinning
from nbkit.notebook.cluster.registry import Entry


def pinning_of(entry: Entry) -> Pinning:
    """The pinning of a running cluster's ranks, so that a restart puts them on the same devices."""
    spec = json.loads((entry.folder / "spec.json").read_text())
    kind: Literal["gpu", "cpu"] = "gpu" if spec["device"] == "cuda" else "cpu"

    def pins(saved: list[dict[str, Any]], first: int = 0) -> tuple[Pin, ...]:
        return tuple(
            Pin(first + i, kind, p["env"], tuple(p["cores"]), p["threads"], p["label"], p["why"])
            for i, p in enumerate(saved)
        )

    ranks = pins(spec["pins"])
    backend: Literal["nccl", "gloo"] = "nccl" if spec["backend"] == "nccl" else "gloo"
    spares, retired = pins(spec["spares"], len(ranks)), pins(spec["retired"])
    return Pinning(ranks, backend, spares=spares, retired=retired)


def repinned(entry: Entry) -> Entry:
    """The entry with the devices that its ranks are on now; of other hosts' the coordinator has written them."""
    if entry.is_spread:
        told = progress.read(entry.folder)
        if told is None or told.phase != "forked":
            return entry
        entry = replace(entry, labels=told.labels, reasons=told.reasons)
        return replace(entry, spares=told.spares, spare_hosts=told.spare_hosts)
    with suppress(OSError, ValueError):
        now = pinning_of(entry)
        labels, reasons = tuple(pin.label for pin in now.pins), tuple(pin.why for pin in now.pins)
        return replace(entry, labels=labels, reasons=reasons, spares=tuple(pin.label for pin in now.spares))
    return entry
