"""Progress bars of ranks are text where the program leaves the choice: `tqdm.auto`, and all that is built on it.

A widget for each rank would be a bar for each rank, move only where a page shows widgets, and be lost with the page.
Text is one line for all ranks, moves wherever output does, and stays in the notebook. `tqdm.notebook` is a widget.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _Autonotebook(types.ModuleType):
    """`tqdm.autonotebook`, by which tqdm.auto chooses, without its choice; imports tqdm when somebody asks for it."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("tqdm", "trange"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("tqdm.std"), name)


def draw_as_text() -> None:
    """From now on, in this process; a program that has imported tqdm.auto already keeps what it has."""
    sys.modules.setdefault("tqdm.autonotebook", _Autonotebook("tqdm.autonotebook", __doc__))
