"""Make the request for a cell, or refuse a cell that cannot run. Cells and training controls both pass through here.

A cell's source is checked before it is sent: a syntax error is reported once, and nothing has run.
"""

from __future__ import annotations

import ast
import uuid
from collections.abc import Sequence

from IPython.core.inputtransformer2 import TransformerManager

from nbkit.errors import UsageError
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.registry import chosen_ranks, notebook_number
from nbkit.wire.cells import CellRequest


class CellSyntaxError(UsageError):
    """The cell is not Python."""


def check(source: str, number: int) -> None:
    """Raise CellSyntaxError if `source` cannot be compiled as a notebook cell (magics and await are fine)."""
    try:
        transformed = TransformerManager().transform_cell(source)
        compile(transformed, f"Cell In[{number}]", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").rstrip("\n")
        caret = " " * max(0, (error.offset or 1) - 1) + "^"
        raise CellSyntaxError(
            f"{type(error).__name__}: {error.msg} (line {error.lineno})",
            numbers=f"{line}\n  {caret}" if line else "",
            hint="nothing has run on any rank",
        ) from None


def request_for(
    connection: Connection,
    cell: str,
    ranks: Sequence[int] | str | None = None,
    *,
    at_step: bool = False,
    detached: bool = False,
) -> CellRequest:
    """Return the request for `Connection.send`. Raises UsageError, CellRunning or ClusterError if the cell cannot run.

    ranks: see naming.chosen_ranks. at_step: for a live cell, which runs at the next step boundary of a training.
    """
    chosen = chosen_ranks(ranks, connection.entry.n)
    number = notebook_number() or next(connection.numbers)
    check(cell, number)
    if at_step and ranks is not None:
        raise UsageError("A live cell runs on all ranks.", numbers=f"--ranks {ranks}", hint="leave --ranks out")
    connection.check_open()
    if not at_step:
        connection.check_idle("cell")
    connection.check_alive(chosen)
    return CellRequest(uuid.uuid4().hex[:12], cell, number, chosen, connection.request_number, detached)
