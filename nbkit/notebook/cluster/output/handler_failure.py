"""What becomes of a cell when nbkit's own handling of a rank's message fails: it ends, with the reason.

Messages are handled on the wire's thread, where an error that is raised reaches nobody: whoever waits for the cell
would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbkit.errors import CellError
from nbkit.wire.cells import CellRequest

if TYPE_CHECKING:
    from nbkit.notebook.cluster.cells.execution import Running


def guard(running: Running, what: str, rank: int | None, act: Callable[..., object], *args: Any) -> None:
    """Call act(*args); what it raises ends the cell. what: the message that is handled, or what is done without one."""
    try:
        act(*args)
    except Exception as error:
        running.on_fault(what, rank, error)


def fault(request: CellRequest, what: str, rank: int | None, error: BaseException) -> CellError:
    """The error that such a cell ends with."""
    whose = f" of rank {rank}" if rank is not None else ""
    made = CellError(
        f"nbkit could not handle {what}{whose}: {type(error).__name__}: {_said(error)}",
        rank=min(request.ranks) if rank is None else rank,
        numbers="variables live on; what was printed is in the cluster's output folder",
        hint="%cluster status   (names the folder)",
    )
    made.__cause__ = error
    return made


def _said(error: BaseException) -> str:
    try:
        return str(error).strip().partition("\n")[0][:300]
    except Exception:
        return "its text cannot be made"
