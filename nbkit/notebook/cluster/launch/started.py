"""Start a cluster, on this machine or on other hosts, and return it when it is ready."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from nbkit.jupyter_private import SYMBOLS
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.hosts.launcher import StartRequest
from nbkit.notebook.cluster.hosts.start import launch_on_hosts
from nbkit.notebook.cluster.launch.launch import launch
from nbkit.notebook.cluster.launch.pins import Pinning
from nbkit.private_symbols import LACKING, problems


@dataclass(frozen=True)
class Started:
    """A cluster that is ready.

    pinning: None if each host has pinned its own ranks. seconds: duration of the start; 0 for an attached cluster.
    """

    connection: Connection
    pinning: Pinning | None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


def launched(name: str, pinning: Pinning, ttl: float, options: dict[str, object]) -> Started:
    began = time.monotonic()
    connection = Connection(*launch(name, pinning, ttl, options))
    notes = tuple(pinning.notes)
    notes += (*_torch_notes(connection.entry.folder), *problems(SYMBOLS, imported=True))
    return Started(connection, pinning, time.monotonic() - began, notes)


def _torch_notes(folder: Path) -> list[str]:
    """Return the notes of the ranks' parent about parts that are missing in the installed torch."""
    path = folder / LACKING
    return list(json.loads(path.read_text())) if path.exists() else []


def launched_on_hosts(name: str, request: StartRequest, ttl: float, options: dict[str, object]) -> Started:
    began = time.monotonic()
    entry, client, notes = launch_on_hosts(name, request, ttl, options)
    return Started(Connection(entry, client), None, time.monotonic() - began, notes)
