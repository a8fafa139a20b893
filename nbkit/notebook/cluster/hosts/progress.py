"""How far the start of a cluster on several hosts is: what its coordinator writes and the notebook reads and shows."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nbkit.errors import ClusterError


@dataclass(frozen=True)
class LauncherView:
    """What a launcher sees of what it has started. words: for people. error: of a host that cannot be started.

    state "ending": it is ended now, and words say by what, unless it is ended from here.
    save_at: when a training has to be saved because its hosts are taken away soon, as time.time() says it; inf where
    nothing is known of an end. why: they are taken away. again: a batch system does or did that, and nobody has wanted
    it: others may be asked for.
    """

    state: Literal["pending", "running", "ending", "over"]
    words: str
    save_at: float = float("inf")
    why: str = ""
    error: ClusterError | None = None
    again: bool = False


@dataclass(frozen=True)
class StartProgress:
    """phase: "over" says that the cluster has ended or never came up; words: how far it is, or how it ended.

    what, numbers, hint: of the error, where there is one. labels, reasons: of the ranks, once all hosts have answered;
    spares, spare_hosts: the devices in reserve there, and the hosts.
    """

    phase: Literal["waiting", "starting", "forked", "over"]
    words: str = ""
    what: str = ""
    numbers: str = ""
    hint: str = ""
    labels: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    spare_hosts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    backend: str = ""

    def check(self) -> None:
        """Raise ClusterError if the start has failed."""
        if self.phase == "over":
            raise ClusterError(self.what or self.words, numbers=self.numbers, hint=self.hint)


def with_devices(progress: StartProgress, hosts: Sequence[dict[str, Any]], spare_hosts: Sequence[str]) -> StartProgress:
    """With labels, reasons and spares. hosts: what the agents of those with ranks have said of theirs."""
    return replace(
        progress,
        labels=tuple(f"{one['host']}: {label}" for one in hosts for label in one["labels"]),
        reasons=tuple(f"{one['host']}, {why}" for one in hosts for why in one["reasons"]),
        spares=tuple(f"{one['host']}: {label}" for one in hosts for label in one["spares"]),
        spare_hosts=tuple(spare_hosts),
    )


def write(folder: Path, progress: StartProgress) -> None:
    """Write it in one step. folder: of the cluster."""
    scratch = folder / "progress.tmp"
    scratch.write_text(json.dumps(asdict(progress)))
    scratch.replace(folder / "progress.json")


def read(folder: Path) -> StartProgress | None:
    """None before the first one was written."""
    try:
        fields = json.loads((folder / "progress.json").read_text())
    except (OSError, ValueError):
        return None
    lists: dict[str, Any] = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return StartProgress(**(fields | lists))


def how_ended(folder: Path) -> str:
    """Why a cluster on several hosts has ended; "" if that is not known."""
    state = read(folder)
    return state.words if state and state.phase == "over" else ""


class LiveLine:
    """One line of output that is written over while a start goes on."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, words: str) -> None:
        """Replace the line."""
        if words != self._shown:
            sys.stdout.write(f"\r{words.ljust(len(self._shown))}")
            sys.stdout.flush()
            self._shown = words

    def close(self) -> None:
        """What is printed next begins a new line."""
        if self._shown:
            sys.stdout.write("\n")
            self._shown = ""
