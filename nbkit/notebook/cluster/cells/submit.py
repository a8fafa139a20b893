"""A cell before it is on its way: looked at, refused if it cannot run, and sent."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbkit.errors import UsageError
from nbkit.notebook.cluster import presence
from nbkit.notebook.cluster.cells import source_check
from nbkit.notebook.cluster.cells.execution import Running
from nbkit.notebook.cluster.naming import chosen_ranks, names_of_notebook, notebook_number
from nbkit.notebook.cluster.output import display
from nbkit.notebook.widgets import card
from nbkit.wire.cells import CellRequest

if TYPE_CHECKING:
    from nbkit.notebook.cluster.cluster import Cluster


def request_for(cluster: Cluster, cell: str, ranks: Sequence[int] | str | None, *, at_step: bool) -> CellRequest:
    """The cell as it will be sent. Raises UsageError, CellRunning or ClusterError if it cannot be; nothing has run."""
    chosen = chosen_ranks(ranks, cluster.entry.n)
    number = notebook_number() or next(cluster.numbers)
    source_check.check(cell, number)
    if at_step and ranks is not None:
        raise UsageError("A live cell runs on all ranks.", numbers=f"--ranks {ranks}", hint="leave --ranks out")
    presence.must_be_here(cluster)
    if not at_step:
        cluster.post.check_idle("cell")
    cluster.post.check_alive(chosen)
    return CellRequest(uuid.uuid4().hex[:12], cell, number, chosen, cluster.post.request_number)


def send(cluster: Cluster, request: CellRequest, note: str, *, live: bool) -> Running:
    """Send it, after `note` in its output; a live cell waits on the ranks for their step boundary."""
    running = Running(request, display.here(), cluster.post.wire.later, names_of_notebook, live=live)
    if live:
        cluster.post.send_live(running)
        return running
    if note:
        cluster.post.wire.soon(running.say, note)
    running.before_done = lambda: cluster.generation.learn_from(running)
    cluster.post.send(running)
    card.follow(cluster, running)
    return running
