"""An interrupt of a rank from outside: SIGINT, and a file with the cell that it is meant for.

A rank in code that holds the interpreter (a C call, a regular expression) hears no request, because none of its threads
runs. A signal still reaches it. Code that checks for signals now and then, like `re`, ends with KeyboardInterrupt, as
in a plain kernel. A signal names no cell, so the rank reads the cell from the file. An interrupt that comes after its
cell has ended hits no other cell.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def send(folder: Path, rank: int, cell: str, deliver: Callable[[int], object]) -> None:
    """Interrupt `rank` in `cell`. folder: where its output is kept. deliver: sends its process a signal."""
    with suppress(OSError):  # without the file it is an interrupt that names no cell
        _named(folder, rank).write_text(cell)
    deliver(signal.SIGINT)


def meant_for(folder: Path, rank: int) -> str | None:
    """Return the cell that a SIGINT is meant for, once; None if it did not come from `send`. Called on the rank."""
    path = _named(folder, rank)
    try:
        cell = path.read_text()
        path.unlink()
    except OSError:
        return None
    return cell


def _named(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.interrupt"
