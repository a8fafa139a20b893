"""Says why a process that is spawned does not find what a cell has defined: there is no file to import it from."""

from __future__ import annotations

import io
import sys
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from typing import Any

_SAID = (
    "a spawned process imports what it runs, and cannot import what a cell has defined. Put it into a .py file and "
    'import it; or fork: multiprocessing_context="fork" of a DataLoader, mp.get_context("fork")'
)


def warn_of_cells() -> None:
    """From now on, when a process is spawned that would need something of a cell."""
    plain = reduction.dump

    def dump(item: Any, file: io.BytesIO, protocol: int | None = None) -> None:
        begun = file.tell() if isinstance(file, io.BytesIO) else 0
        plain(item, file, protocol)
        # A script under %run has a file, and is imported from there.
        if isinstance(item, BaseProcess) and isinstance(file, io.BytesIO) and not hasattr(_main(), "__file__"):
            if b"__main__" in file.getvalue()[begun:]:
                print(f"nbkit: {_SAID}", file=sys.stderr)  # in every cell: a warning is shown once

    reduction.dump = dump  # type: ignore[assignment]


def _main() -> Any:
    return sys.modules["__main__"]
