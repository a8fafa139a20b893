"""An interrupt of a rank from outside: SIGINT, and beside it, in a file, the cell that it is meant for.

A rank in code that keeps the interpreter to itself (a C call, a regular expression) hears no request, because none of
its threads runs. A signal reaches it all the same: code that looks for signals now and then, as `re` does, ends with
KeyboardInterrupt, as it would in a plain kernel. A signal names no cell, so the rank reads the name from the file: an
interrupt that comes when its cell has ended hits nobody else.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def send(folder: Path, rank: int, cell: str, deliver: Callable[[int], object]) -> None:
    """Interrupt `rank` in `cell`. folder: where its output is kept. deliver: sends its process a signal."""
    with suppress(OSError):  # without the file it is still an interrupt, only one that names no cell
        _named(folder, rank).write_text(cell)
    deliver(signal.SIGINT)


def meant_for(folder: Path, rank: int) -> str | None:
    """On the rank, when SIGINT has come: the cell it is meant for, once; None if nobody sent it from outside."""
    path = _named(folder, rank)
    try:
        cell = path.read_text()
        path.unlink()
    except OSError:
        return None
    return cell


def _named(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.interrupt"
