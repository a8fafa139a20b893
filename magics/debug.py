"""IPython's `%debug` and `%pdb` after a cell that failed on a rank. The frames are on the rank, not in the notebook."""

from __future__ import annotations

import sys
from typing import Any

from nbkit.errors import CellError, RankDied


def point_to_ranks(shell: Any) -> None:
    """Make `%debug` and `%pdb` name the rank and `%nbkit debug`, instead of opening nbkit's own frames.

    A second call changes nothing.
    """
    opens = shell.debugger
    if getattr(opens, "__module__", "") == __name__:
        return

    def debugger(force: bool = False) -> None:
        error = getattr(sys, "last_value", None)
        if not isinstance(error, CellError):
            opens(force)
        elif force or shell.call_pdb:
            print(_said(error))

    shell.debugger = debugger


def _said(error: CellError) -> str:
    if isinstance(error, RankDied):
        return f"Rank {error.rank} died, and the frames of its cell with it.\n→ {error.hint}"
    return f"The frames of this error are on rank {error.rank}, until the next cell.\n→ %nbkit debug {error.rank}"
