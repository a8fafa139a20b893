"""Distinguish the user's own source files (cells, scripts, modules) from those of Python, packages and nbkit.

It also keeps a module in the user's folder, such as one called queue or random, from hiding a module of the standard
library. `python -m` looks in the working directory first, so such a module could break a process at its start. A
notebook looks there after the standard library, and so do ranks.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path

_OWN = Path(__file__).parents[1]
_STDLIB = Path(sysconfig.get_path("stdlib"))
_PACKAGES = frozenset({"site-packages", "dist-packages"})


@functools.lru_cache(4096)
def is_users(file: str) -> bool:
    """Return True if `file`, the file name of a frame, is the user's own code."""
    path = Path(file)
    return not (
        file.startswith(("<frozen", "<string>"))
        or _PACKAGES.intersection(path.parts)
        or path.is_relative_to(_OWN)
        or path.is_relative_to(_STDLIB)
    )


OWN_MODULES = ("-P", "-m")
"""Options of Python with which nbkit starts its own modules."""


def look_in(folder: str) -> None:
    """Import from `folder` too, after the standard library and before installed packages. "": the working directory."""
    if folder and folder in sys.path:
        return
    sys.path[:] = [path for path in sys.path if path != folder]  # remove "" from the front
    packages = (number for number, path in enumerate(sys.path) if path.endswith(("site-packages", "dist-packages")))
    sys.path.insert(next(packages, len(sys.path)), folder)


def hiding(folder: str | Path) -> list[str]:
    """Return the files and packages in `folder` that have the name of a module of the standard library."""
    try:
        there = sorted(os.scandir(folder), key=lambda each: each.name)
    except OSError:
        return []
    return [
        each.name
        for each in there
        if each.name.removesuffix(".py") in sys.stdlib_module_names
        and (each.name.endswith(".py") or os.path.exists(Path(each.path, "__init__.py")))
    ]
