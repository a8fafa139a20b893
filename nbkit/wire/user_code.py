"""Tell the user's own source files (cells, scripts, modules) from those of Python, packages and nbkit."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

_OWN = Path(__file__).parents[1]
_STDLIB = Path(sysconfig.get_path("stdlib"))
_PACKAGES = frozenset({"site-packages", "dist-packages"})


@functools.lru_cache(4096)
def is_users(file: str) -> bool:
    """Return True if `file`, as a frame names it, is the user's own code."""
    path = Path(file)
    return not (
        file.startswith(("<frozen", "<string>"))
        or _PACKAGES.intersection(path.parts)
        or path.is_relative_to(_OWN)
        or path.is_relative_to(_STDLIB)
    )
