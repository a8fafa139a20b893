"""Real documents of real lengths that every machine has: the standard library's source files."""

from __future__ import annotations

import os
import sysconfig
from functools import cache
from pathlib import Path


@cache
def code_files() -> list[Path]:
    """Return the source files that are not empty, sorted."""
    found = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name != "site-packages"]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return [path for path in sorted(found) if path.stat().st_size]


def lengths(cut: int = 2048) -> list[int]:
    """Return the bytes of each file, at most `cut`."""
    return [min(path.stat().st_size, cut) for path in code_files()]
