"""The process of a rank that does not answer: see what it does, interrupt it, end it."""

from __future__ import annotations

import signal

import psutil

from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.registry import Entry
from nbkit.wire import interrupts

_ALONE = "in code that lets no other Python of its process run (a C call)"
_DOES = {
    psutil.STATUS_RUNNING: f"it computes {_ALONE}",
    psutil.STATUS_SLEEPING: f"it waits {_ALONE}",
    psutil.STATUS_DISK_SLEEP: "it waits for a disk or a driver",
    psutil.STATUS_STOPPED: "it is suspended (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "a debugger holds it",
}


def interrupt(entry: Entry, client: Client, rank: int, cell: str, through: int | None) -> bool:
    """Send SIGINT to a rank, for this cell. Returns False if there is no way to it.

    through: a rank that answers and passes it on, where the rank may be on another host.
    """
    if _is_beside(entry):
        interrupts.send(entry.folder / "output", rank, cell, entry.ranks[rank].end)
        return True
    if through is not None:
        client.request([through], "interrupt", rank=rank, cell=cell)
    return through is not None


def end(entry: Entry, client: Client, rank: int) -> None:
    """End one rank's process at once."""
    if _is_beside(entry):
        entry.ranks[rank].end(signal.SIGKILL, group=True)
        return
    others = [other for other in range(entry.n) if other != rank]
    client.request(others, "end", rank=rank)  # one that answers is enough


def activity(entry: Entry, rank: int) -> str:
    """The state of a rank's process in words: "it is suspended (SIGSTOP)"; "" where the system does not say."""
    process = entry.ranks[rank]
    if not _is_beside(entry) or not process.is_alive():
        return ""
    try:
        return _DOES.get(psutil.Process(process.pid).status(), "")
    except psutil.Error:
        return ""


def _is_beside(entry: Entry) -> bool:
    """Whether the ranks are processes of this host."""
    return entry.is_here and not entry.is_spread
