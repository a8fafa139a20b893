"""`%nbkit debug`: a prompt for a cell that is at a breakpoint, or in the frames of a cell that failed."""

from __future__ import annotations

import uuid
from typing import Any

from nbkit.errors import CellStopped, UsageError
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.cells.handle import stopped, wait_here
from nbkit.notebook.cluster.debugging.prompt import PromptTalk
from nbkit.notebook.cluster.output import display
from nbkit.notebook.cluster.registry import notebook_number
from nbkit.wire.cells import CellRequest, ranks_text
from nbkit.wire.messages import GetStatus


def debug(connection: Connection, rank: int | None = None) -> None:
    """See Cluster.debug."""
    asking = [cell for cell in connection.cells.values() if cell.prompts and rank in (None, *cell.prompts)]
    if asking:
        talk = PromptTalk(connection.client, asking[-1], rank)
        if talk.answer_all():
            stopped(connection, asking[-1])
            raise CellStopped(f"{asking[-1].describe(age=False)} was stopped at its breakpoint")
        _check_answered(asking[-1].unanswered)
        return
    if (busy := connection.busy()) is not None:
        raise UsageError(
            f"{'No rank' if rank is None else f'Rank {rank}'} is at a breakpoint of {busy.describe()}.",
            numbers="frames of a cell are looked at when it has failed",
            hint="%nbkit why",
        )
    failed = _failed(connection)
    if not failed:
        raise UsageError(
            "No rank keeps the frames of a failed cell.",
            numbers="nbkit keeps them until the next cell, but not for live cells, and not if memory ran out",
            hint="run the cell that fails again, then %nbkit debug",
        )
    if rank is None:
        rank = min(failed, key=lambda each: failed[each]["moment"])
    if rank not in failed:
        raise UsageError(
            f"Rank {rank} keeps no frames: it did not fail by itself.",
            numbers=f"failed: rank {ranks_text(list(failed))}",
            hint=f"%nbkit debug {min(failed)}",
        )
    number = notebook_number() or next(connection.numbers)
    request = CellRequest(
        uuid.uuid4().hex[:12], "%nbkit debug", number, (rank,), connection.request_number, post_mortem=True
    )
    execution = connection.send(request, display.here())
    wait_here(connection, execution)
    _check_answered(execution.unanswered)


def _failed(connection: Connection) -> dict[int, Any]:
    """Return {rank: (number of the cell, error, time of the error)} of ranks that keep the frames of a failed cell."""
    states = connection.client.ask(range(connection.entry.n), GetStatus())
    return {rank: state["failed"] for rank, state in states.items() if state["failed"]}


def _check_answered(why_not: str) -> None:
    if why_not:
        raise UsageError("No prompt is possible here.", numbers=why_not, hint="run the notebook in Jupyter")
