"""Progress of a cluster's start on several hosts: its coordinator writes it, the notebook reads and shows it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from nbkit.errors import ClusterError
from nbkit.wire.messages import HostJoined


@dataclass(frozen=True)
class LauncherView:
    """State of what a launcher has started, as the launcher sees it.

    state "ending": it is being ended now. words then say what ends it, unless this side does.
    words: a description for people. error: the error of a host that cannot be started.
    save_at: when a training has to be saved because its hosts will soon be taken away, as time.time() gives it; inf if
    no end is known. why: the reason they are taken away. again: a batch system takes or took them away and nobody asked
    for that, so other hosts may be requested.
    """

    state: Literal["pending", "running", "ending", "over"]
    words: str
    save_at: float = float("inf")
    why: str = ""
    error: ClusterError | None = None
    again: bool = False


@dataclass(frozen=True)
class StartProgress:
    """Progress of a start.

    phase: "over" means that the cluster has ended or never came up. words: how far it is, or how it ended. what,
    numbers, hint: of the error, if there is one. labels, reasons: of the ranks, once all hosts have answered. spares:
    the devices in reserve there.
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
    """Return `state` with labels, reasons and spares. hosts: what the agents reported."""
    return replace(
        progress,
        labels=tuple(f"{one.host}: {label}" for one in hosts for label in one.labels),
        reasons=tuple(f"{one.host}, {why}" for one in hosts for why in one.reasons),
        spares=tuple(f"{one.host}: {label}" for one in hosts for label in one.spares),
    )


def write(folder: Path, progress: StartProgress) -> None:
    """Write it atomically. folder: the cluster's folder."""
    scratch = folder / "progress.tmp"
    scratch.write_text(json.dumps(asdict(progress)))
    scratch.replace(folder / "progress.json")


def read(folder: Path) -> StartProgress | None:
    """Return the last progress that was written, or None."""
    try:
        saved = json.loads((folder / "progress.json").read_text())
    except (OSError, ValueError):
        return None
    known = {field.name for field in fields(StartProgress)}  # another release may have written more
    found: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in saved.items() if name in known
    }
    return StartProgress(**found)


def how_ended(folder: Path) -> str:
    """Return why a cluster on several hosts has ended; "" if that is not known."""
    state = read(folder)
    return state.words if state and state.phase == "over" else ""


class LiveLine:
    """A line of output that is overwritten during a start."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, words: str) -> None:
        """Replace the line."""
        if words != self._shown:
            sys.stdout.write(f"\r{words.ljust(len(self._shown))}")
            sys.stdout.flush()
            self._shown = words

    def close(self) -> None:
        """End the line, so that the next output begins a new one."""
        if self._shown:
            sys.stdout.write("\n")
            self._shown = ""
