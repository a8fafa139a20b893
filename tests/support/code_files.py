"""Real documents of real lengths that every machine has: the standard library's source files."""

from __future__ import annotations

import sysconfig
from pathlib import Path


def code_files() -> list[Path]:
    """Those that hold something, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts and path.stat().st_size]


def lengths(cut: int = 2048) -> list[int]:
    """Bytes of each, at most `cut`."""
    return [min(path.stat().st_size, cut) for path in code_files()]
