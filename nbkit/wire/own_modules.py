"""Keeps modules in the user's folder, such as one called queue or random, from hiding modules of Python's own.

`python -m` looks in the working directory first, so one such module could break a process at its start. A notebook
looks there after the standard library, and so do ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

OWN_MODULES = ("-P", "-m")
"""Options of Python with which nbkit starts its own modules."""


def look_in(folder: str) -> None:
    """Import from `folder` too, after the standard library and before installed packages. "": the working directory."""
    if folder and folder in sys.path:
        return
    sys.path[:] = [path for path in sys.path if path != folder]  # "" was in front of all
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
