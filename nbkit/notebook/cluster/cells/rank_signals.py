"""Signals to the process of a rank that does not answer: what it does there, and how it is interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from nbkit.wire import interrupts

if TYPE_CHECKING:
    from nbkit.notebook.cluster.cluster import Cluster

_ALONE = "in code that lets no other Python of its process run (a C call)"
_DOES = {
    psutil.STATUS_RUNNING: f"it computes {_ALONE}",
    psutil.STATUS_SLEEPING: f"it waits {_ALONE}",
    psutil.STATUS_DISK_SLEEP: "it waits for a disk or a driver",
    psutil.STATUS_STOPPED: "it is suspended (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "a debugger holds it",
}


def interrupt(cluster: Cluster, rank: int, cell: str, through: int | None) -> bool:
    """Send SIGINT to a rank, for this cell. through: a rank that answers, for a cluster of another host.

    False: there is no way to it.
    """
    entry = cluster.entry
    if entry.is_here:
        interrupts.send(entry.folder / "output", rank, cell, entry.ranks[rank].end)
        return True
    if through is not None:
        cluster.post.wire.request([through], "interrupt", rank=rank, cell=cell)
    return through is not None


def activity(cluster: Cluster, rank: int) -> str:
    """What the system says that a rank does: "it is suspended (SIGSTOP)"; "" where it does not say."""
    process = cluster.entry.ranks[rank]
    if not cluster.entry.is_here or not process.is_alive():
        return ""
    try:
        return _DOES.get(psutil.Process(process.pid).status(), "")
    except psutil.Error:
        return ""
