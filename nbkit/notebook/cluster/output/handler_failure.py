"""The error of a cell that ends because nbkit could not handle a rank's message."""

from __future__ import annotations

from nbkit.errors import CellError
from nbkit.wire.cells import CellRequest


def fault(request: CellRequest, what: str, rank: int | None, error: BaseException) -> CellError:
    """The error. what: the message that was being handled, of `rank` where one sent it."""
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
