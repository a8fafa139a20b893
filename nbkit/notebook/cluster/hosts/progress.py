"""The progress of a cluster's start on several hosts. The coordinator writes it, and the notebook reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from nbkit.errors import ClusterError
from nbkit.wire.messages import HostJoined


@dataclass(frozen=True)
class StartProgress:
    """The progress of a start.

    phase: "over" means that the cluster has ended, or that the start failed. words: a description. what, numbers, hint:
    of the error, if there is one. labels, reasons: of the ranks, when all hosts have answered. spares: spare devices.
    """

    phase: Literal["waiting", "starting", "forked", "over"]
    words: str = ""
    what: str = ""
    numbers: str = ""
    hint: str = ""
    labels: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    backend: str = ""

    def check(self) -> None:
        """Raise ClusterError if the start has failed."""
        if self.phase == "over":
            raise ClusterError(self.what or self.words, numbers=self.numbers, hint=self.hint)


def with_devices(progress: StartProgress, hosts: Sequence[HostJoined]) -> StartProgress:
    """Return `progress` with labels, reasons and spares. hosts: what the agents reported."""
    return replace(
        progress,
        labels=tuple(f"{one.host}: {label}" for one in hosts for label in one.labels),
        reasons=tuple(f"{one.host}, {why}" for one in hosts for why in one.reasons),
        spares=tuple(f"{one.host}: {label}" for one in hosts for label in one.spares),
    )


def write(folder: Path, progress: StartProgress) -> None:
    """Write the progress atomically. folder: the cluster's folder."""
    scratch = folder / "progress.tmp"
    scratch.write_text(json.dumps(asdict(progress)))
    scratch.replace(folder / "progress.json")


def read(folder: Path) -> StartProgress | None:
    """Return the last progress that was written, or None."""
    try:
        saved = json.loads((folder / "progress.json").read_text())
    except (OSError, ValueError):
        return None
    known = {field.name for field in fields(StartProgress)}  # another release may have written other fields
    found: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in saved.items() if name in known
    }
    return StartProgress(**found)


def how_ended(folder: Path) -> str:
    """Return why a cluster on several hosts has ended, or "" if it is not known."""
    state = read(folder)
    return state.words if state and state.phase == "over" else ""
