"""A function on a rank, by name: how the notebook wing calls the bridge without importing it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Remote:
    """`Remote("nbkit.bridge.calls:run_cell")(...)` imports the module where it runs and calls the function there."""

    target: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)(*args, **kwargs)
