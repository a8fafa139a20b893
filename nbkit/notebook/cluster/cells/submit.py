"""Make the request for a cell, or refuse a cell that cannot run. Cells and training controls both go this way."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from nbkit.errors import UsageError
from nbkit.notebook.cluster.cells import source_check
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.naming import chosen_ranks, notebook_number
from nbkit.wire.cells import CellRequest


def request_for(
    connection: Connection,
    cell: str,
    ranks: Sequence[int] | str | None = None,
    *,
    at_step: bool = False,
    detached: bool = False,
) -> CellRequest:
    """The request for `Connection.send`. Raises UsageError, CellRunning or ClusterError if the cell cannot run.

    ranks: see naming.chosen_ranks. at_step: for a live cell, which runs at the next step boundary of a training.
    """
    chosen = chosen_ranks(ranks, connection.entry.n)
    number = notebook_number() or next(connection.numbers)
    source_check.check(cell, number)
    if at_step and ranks is not None:
        raise UsageError("A live cell runs on all ranks.", numbers=f"--ranks {ranks}", hint="leave --ranks out")
    connection.check_open()
    if not at_step:
        connection.check_idle("cell")
    connection.check_alive(chosen)
    return CellRequest(uuid.uuid4().hex[:12], cell, number, chosen, connection.request_number, detached)
