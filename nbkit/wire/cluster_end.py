"""How a cluster ends that was not stopped by its user: written by its ranks in its folder, read by the notebook."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

SAVED = "saved to "
HINT = "%cluster start   then build the Trainer again, and trainer.load(path)"


@dataclass(frozen=True)
class ClusterEnd:
    """why: the cluster ends. step: after which the training in it has ended, -1 while it goes on. saved: what was saved
    of it, or why nothing was."""

    why: str
    step: int = -1
    saved: str = ""

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.why}; the training has ended after step {self.step}, {self.saved}"


def write(folder: Path, end: ClusterEnd) -> None:
    """In one step; the last one stands."""
    if not folder.is_dir():  # of another host
        return
    scratch = folder / f"end.{os.getpid()}.tmp"
    scratch.write_text(json.dumps(asdict(end)))
    scratch.replace(folder / "end.json")


def read(folder: Path) -> ClusterEnd | None:
    """None where no training has been told to end."""
    try:
        return ClusterEnd(**json.loads((folder / "end.json").read_text()))
    except (OSError, ValueError):
        return None
