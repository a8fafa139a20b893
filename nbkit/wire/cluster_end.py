"""How a cluster ends that was not stopped by its user: in its folder, read by the notebook.

Its ranks write it where they are on the notebook's host, else its coordinator, whom they tell.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

END_SIGNALS = "NBKIT_END_SIGNALS"
"""The variable in which a batch script names the signals that say that its job ends soon: USR2,TERM."""
SAVED = "saved to "
HINT = "%cluster restart   then build the Trainer again, and trainer.load(path)"


@dataclass(frozen=True)
class ClusterEnd:
    """why: the cluster ends. step: after which the training in it has ended, -1 while it goes on. saved: what was saved
    of it, or why nothing was. again: the hosts are taken away by a batch system, which may give others."""

    why: str
    step: int = -1
    saved: str = ""
    again: bool = False

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.why}; the training has ended after step {self.step}, {self.saved}"


def write(folder: Path, end: ClusterEnd) -> None:
    """In one step; the last one stands."""
    if not folder.is_dir():  # of another host
        return
    scratch = folder / f"end.{os.getpid()}.{threading.get_ident()}.tmp"
    scratch.write_text(json.dumps(asdict(end)))
    scratch.replace(folder / "end.json")


def take_back(folder: Path) -> None:
    """The cluster does not end after all."""
    (folder / "end.json").unlink(missing_ok=True)


def read(folder: Path) -> ClusterEnd | None:
    """None where no training has been told to end."""
    try:
        return ClusterEnd(**json.loads((folder / "end.json").read_text()))
    except (OSError, ValueError):
        return None


def end_signals() -> list[signal.Signals]:
    """Those that the job of this process uses; none outside of such a job."""
    names = os.environ.get(END_SIGNALS, "").split(",")
    return [signal.Signals[f"SIG{name}"] for name in names if f"SIG{name}" in signal.Signals.__members__]
