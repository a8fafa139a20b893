"""Devices in reserve, as the parent of the ranks sees them: a rank whose own device may be bad goes on on one of them.

It may be where the rank itself has said that its device does not compute any more, and where the rank has died twice on
it in one cell. One death alone is not the device's: mostly it is a kill, memory that ran out, or the program. A device
that was left is never taken again. Each host of a cluster has its own, and the parent there gives them out.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from nbkit.bridge.parent.child_processes import log
from nbkit.bridge.parent.other_hosts import CoordinatorLine
from nbkit.bridge.parent.spec import EngineSpec, write_pins
from nbkit.wire.processes import node_name

DEATHS = 2  # of one rank on one device in one cell, which may be the device's


class Parent(Protocol):
    """nbkit.bridge.parent.parent's, which imports this file: what is used of it."""

    spec: EngineSpec
    folder: Path
    coordinator: CoordinatorLine | None


class Spares:
    """One per parent, for the ranks of its host."""

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self._pids: defaultdict[tuple[str, int, str], set[int]] = defaultdict(set)  # (cell, rank, device) -> who died

    def place(self, cell: str, death: dict[str, Any]) -> str:
        """Another process is to take the place of a rank that died: choose its device. What is told of it, or "".

        death: as for Replacer.takes; also once more, for a further process in its place. On several hosts it is told
        to the coordinator too, for the first host's parent and for the notebook.
        """
        said = self._placed(cell, death)
        line, spec = self.parent.coordinator, self.parent.spec
        if said:
            log(said)
        if said and line:
            pin, left = spec.pin(death["rank"]), [spare.label for spare in spec.spares]
            line.link.send(event="placed", rank=death["rank"], said=said, label=pin.label, reason=pin.why, spares=left)
        return said

    def _placed(self, cell: str, death: dict[str, Any]) -> str:
        spec, rank = self.parent.spec, death["rank"]
        if not spec.spares and not spec.retired:
            return ""
        old = spec.pin(rank)
        died = self._pids[cell, rank, old.label]
        died.add(death["pid"])
        if not death["failed"] and len(died) < DEATHS:
            return ""
        why = f"{old.label} failed" if death["failed"] else f"it died {_times(len(died))} on {old.label}"
        if not spec.spares:
            return f"rank {rank} stays on {old.label}, though {why}: no spare is left{self._where()}"
        new, *left = spec.spares
        said = f"rank {rank} is on the spare {new.label} now, since {why}; {_counted(len(left))} left{self._where()}"
        new = replace(new, why=f"{new.why}; since {time.strftime('%H:%M:%S')}, for {why}")
        pins = list(spec.pins)
        pins[rank - spec.base] = new
        self.parent.spec = replace(spec, pins=tuple(pins), spares=tuple(left), retired=(*spec.retired, old))
        write_pins(self.parent.spec, self.parent.folder / "spec.json")
        return said

    def _where(self) -> str:
        return f" on {node_name()}" if self.parent.coordinator else ""


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _counted(count: int) -> str:
    return "no spare is" if not count else "1 spare is" if count == 1 else f"{count} spares are"
