"""Functions on ranks by name, so that the notebook package can call the bridge without importing it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Remote:
    """A function on a rank, by name.

    `Remote("nbkit.bridge.calls:run_cell")(...)` imports the module in the process where it is called, and calls the
    function there.
    """

    target: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)(*args, **kwargs)
