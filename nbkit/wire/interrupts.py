"""Interrupts a rank from outside: with SIGINT, and a file that names the cell.

A rank whose code holds the interpreter (a C call, a regular expression) receives no request, because no other thread
runs. A signal still reaches it. Code that sometimes checks for signals, like `re`, ends with KeyboardInterrupt, as in a
plain kernel. A signal cannot name a cell, so the rank reads the cell from the file. So an interrupt that comes after
its cell has ended does not stop another cell.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def send(folder: Path, rank: int, cell: str, deliver: Callable[[int], object]) -> None:
    """Interrupt `rank` in `cell`. folder: where its output is kept. deliver: a function that sends it a signal."""
    with suppress(OSError):  # without the file, the interrupt is for whatever cell runs
        _named(folder, rank).write_text(cell)
    deliver(signal.SIGINT)


def meant_for(folder: Path, rank: int) -> str | None:
    """Return the cell that a SIGINT is for, only once; None if `send` has not sent the signal. Called on the rank."""
    path = _named(folder, rank)
    try:
        cell = path.read_text()
        path.unlink()
    except OSError:
        return None
    return cell


def _named(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.interrupt"
