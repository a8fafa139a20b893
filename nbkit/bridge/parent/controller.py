"""The controller of ipyparallel's, as the parent of the ranks sees it: a process that the notebook started."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from nbkit.wire.processes import Process, followers


def controller_of(folder: Path) -> Process | None:
    """The controller of the cluster in `folder`; None until the notebook has started it and said so."""
    try:
        return Process(**json.loads((folder / "controller.json").read_text()))
    except (OSError, json.JSONDecodeError):
        return None


def end_schedulers(folder: Path, controller: Process | None) -> None:
    """End what a controller that was killed has left. One that lives ends its schedulers itself."""
    if controller and not controller.is_alive():
        for scheduler in followers(controller.pid, folder):
            scheduler.end(signal.SIGKILL)
