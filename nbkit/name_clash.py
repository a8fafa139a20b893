"""Find the other project that is called nbkit.

That project is called nbkit on PyPI, and this one nbkit-train. Both have the import name nbkit, so pip writes both into
one folder. The one that was installed last owns `nbkit/__init__.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

REMEDY = "pip uninstall -y nbkit; pip install --force-reinstall --no-deps nbkit-train"
"""The commands to type. The first one also removes files of this project, so the second one installs them again."""


def other_nbkit(folder: Path) -> str:
    """Return a sentence about the other project if it is installed in `folder`, else ""."""
    try:
        names = os.listdir(folder)
    except OSError:  # nbkit is imported from a zip file
        return ""
    found = next((name for name in names if name.startswith("nbkit-") and name.endswith(("-info", ".egg"))), "")
    if not found:
        return ""
    version = found.split("-")[1].removesuffix(".dist").removesuffix(".egg")
    return f"nbkit {version} in {folder} is another project. It has the same import name as nbkit-train."
