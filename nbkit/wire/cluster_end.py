"""Reports in the folder of a cluster: the end of the cluster, ends of ranks, and resizes. The notebook reads them.

On the notebook's host, the ranks and their parent write them. On other hosts they tell the coordinator, which writes
them.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from nbkit.wire.messages import Death, RankEnd, SizeChange, from_plain

END_SIGNALS = "NBKIT_END_SIGNALS"
"""The variable in which a batch script names the signals that announce the end of its job, such as USR2,TERM."""
SAVED = "saved to "
HINT = "%cluster restart   then build the Trainer again, and trainer.load(path)"


@dataclass(frozen=True)
class ClusterEnd:
    """The end of a cluster.

    why: the reason. step: the last step of its training; -1 while that still runs. saved: what was saved of the
    training, or why nothing was. again: True if a batch system takes the hosts away, and may give others.
    """

    why: str
    step: int = -1
    saved: str = ""
    again: bool = False

    @property
    def words(self) -> str:
        """Return the end in words, for people."""
        return f"{self.why}; the training has ended after step {self.step}, {self.saved}"


def write(folder: Path, end: ClusterEnd) -> None:
    """Write the end atomically. It replaces an earlier one."""
    if not folder.is_dir():  # the cluster's folder is on another host
        return
    _write(folder / "end.json", end)


def _write(path: Path, report: ClusterEnd | Death | SizeChange) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")  # several ranks write a report
    scratch.write_text(json.dumps(asdict(report)))
    scratch.replace(path)


def take_back(folder: Path) -> None:
    """Remove the report, because the cluster does not end after all."""
    (folder / "end.json").unlink(missing_ok=True)


def read(folder: Path) -> ClusterEnd | None:
    """Return the report of the end, or None if there is none."""
    try:
        return ClusterEnd(**json.loads((folder / "end.json").read_text()))
    except (OSError, ValueError):
        return None


def write_rank(folder: Path, death: Death) -> None:
    """Write the report of a rank that ended, atomically. It is a RankEnd if the rank is replaced. Raises OSError."""
    _write(folder / f"rank{death.rank}.end.json", death)


def read_ranks(folder: Path) -> Iterator[RankEnd]:
    """Yield the report of each rank that ended. A report is written before any message about the end is sent."""
    for path in folder.glob("rank*.end.json"):
        with suppress(OSError, ValueError):  # the folder is gone, or the file is half written: a later call finds it
            yield from_plain(RankEnd, json.loads(path.read_text()))


def write_size(folder: Path, change: SizeChange) -> None:
    """Write the report of a resize atomically. It replaces an earlier one."""
    _write(folder / "resized.json", change)


def read_size(folder: Path) -> SizeChange | None:
    """Return the report of the last resize, or None."""
    try:
        return from_plain(SizeChange, json.loads((folder / "resized.json").read_text()))
    except (OSError, ValueError):
        return None


def end_signals() -> list[signal.Signals]:
    """Return the signals that announce the end of this process's job; none outside of such a job."""
    names = os.environ.get(END_SIGNALS, "").split(",")
    return [signal.Signals[f"SIG{name}"] for name in names if f"SIG{name}" in signal.Signals.__members__]
