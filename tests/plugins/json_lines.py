"""A sink from outside of nbkit: each event as a line of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class JsonLines:
    """A sink that writes to a file, which it creates at the first event."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, run: dict[str, Any]) -> None:
        self._line({"kind": "open", **run})

    def write(self, event: dict[str, Any]) -> None:
        self._line(event)

    def close(self) -> None:
        self._line({"kind": "close"})

    def _line(self, item: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(item) + "\n")
