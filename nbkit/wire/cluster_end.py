"""The report of a cluster that ends without its user: a file in its folder, which the notebook reads.

The ranks write it if they are on the notebook's host. Otherwise they tell the coordinator, which writes it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

END_SIGNALS = "NBKIT_END_SIGNALS"
"""The variable in which a batch script names the signals that announce the end of its job: USR2,TERM."""
SAVED = "saved to "
HINT = "%cluster restart   then build the Trainer again, and trainer.load(path)"


@dataclass(frozen=True)
class ClusterEnd:
    """The end of a cluster.

    why: the cluster ends. step: the last step of the training in it, -1 while it goes on. saved: what was saved of it,
    or why nothing was. again: a batch system takes the hosts away, and may give others.
    """

    why: str
    step: int = -1
    saved: str = ""
    again: bool = False

    @property
    def words(self) -> str:
        """The end in words, for people."""
        return f"{self.why}; the training has ended after step {self.step}, {self.saved}"


def write(folder: Path, end: ClusterEnd) -> None:
    """Write the end atomically. It replaces an earlier one."""
    if not folder.is_dir():  # the cluster's folder is on another host
        return
    scratch = folder / f"end.{os.getpid()}.{threading.get_ident()}.tmp"
    scratch.write_text(json.dumps(asdict(end)))
    scratch.replace(folder / "end.json")


def take_back(folder: Path) -> None:
    """Remove the report, because the cluster does not end after all."""
    (folder / "end.json").unlink(missing_ok=True)


def read(folder: Path) -> ClusterEnd | None:
    """Return the report, or None if no training has been told to end."""
    try:
        return ClusterEnd(**json.loads((folder / "end.json").read_text()))
    except (OSError, ValueError):
        return None


def end_signals() -> list[signal.Signals]:
    """Return the signals that announce the end of this process's job; none outside of such a job."""
    names = os.environ.get(END_SIGNALS, "").split(",")
    return [signal.Signals[f"SIG{name}"] for name in names if f"SIG{name}" in signal.Signals.__members__]
