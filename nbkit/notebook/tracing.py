"""The next steps of a running training as one trace of all ranks, made of what they record.

The ranks agree on the steps at a boundary, as they do for a switch, and keep them moment by moment; nothing is added to
the steps themselves. The files of the run are followed until all ranks have written the last of them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nbkit.errors import TrainingError
from nbkit.notebook.board.plugin.record_lookup import groups_of
from nbkit.notebook.cluster import presence
from nbkit.notebook.widgets.dashboard.record_source import ClusterRun
from nbkit.records.chrome_trace import chrome_trace, write_trace
from nbkit.records.record_file import START, cursor_near_end, rank_files, read_head, read_since
from nbkit.records.records import Detail, EventRecord, Header, Record, StepRecord

if TYPE_CHECKING:
    from nbkit.notebook.cluster.cluster import Cluster

__all__ = ["Kept", "Traced", "trace"]

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Traced:
    """A trace that was written: steps first to last of so many ranks. Stands for its path wherever a path is wanted."""

    path: Path
    first: int
    last: int
    ranks: int

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{steps} of {self.ranks} rank{'s' * (self.ranks > 1)}: {self.path}"

    def __repr__(self) -> str:
        return f"{self}   (open it in ui.perfetto.dev or chrome://tracing)"


def trace(cluster: Cluster, steps: int = 3, path: str | os.PathLike[str] | None = None) -> Traced:
    """Wait for the next `steps` steps of the training and write them to `path`.

    path: default trace-RUN-FIRST-LAST.json.gz where the notebook is. Returns when the file is written. Raises
    UsageError where nothing makes steps or nothing is recorded, TrainingError when the training ends before a step of
    them is made, ClusterError when a rank has died.
    """
    where = ClusterRun(cluster)
    kept = Kept()
    if (before := where()) is not None:
        kept.begin_at_end(before)
    told = cluster.training.ask("trace", steps=steps).result
    kept.first, kept.last = told["first"], told["last"]
    while not kept.complete:
        if (folder := where()) is not None:
            kept.read(folder)
        if not kept.complete:
            presence.must_be_here(cluster)
            cluster.post.check_alive(range(cluster.entry.n))
            time.sleep(_POLL_SECONDS)
    return kept.write(path)


class Kept:
    """What the files of a run tell of steps first to last, read as they are written."""

    def __init__(self) -> None:
        self.first = self.last = 0
        self.details: dict[int, dict[int, Detail]] = {}
        self._steps: dict[tuple[int, int], StepRecord] = {}
        self._folder: Path | None = None
        self._cursors: dict[int, tuple[int, int]] = {}
        self._ended: set[int] = set()
        self._quiet: set[int] = set()  # ranks of which the last look found nothing new

    def begin_at_end(self, folder: Path) -> None:
        """Only what is written from now on is of interest."""
        self._folder = folder
        self._cursors = {rank: cursor_near_end(path, num_bytes=0) for rank, path in rank_files(folder).items()}

    def read(self, folder: Path) -> None:
        """Take what is new."""
        if folder != self._folder:
            self._folder, self._cursors = folder, {}
        for rank, path in rank_files(folder).items():
            records, self._cursors[rank] = read_since(path, self._cursors.get(rank, START))
            (self._quiet.discard if records else self._quiet.add)(rank)
            for record in records:
                self._take(rank, record)

    @property
    def complete(self) -> bool:
        """Whether every rank has told of the last step, or has ended its training."""
        # The end is told first, then the steps that were under way.
        over = self._ended & self._quiet
        return bool(self._cursors) and all(
            self.last in self.details.get(rank, ()) or rank in over for rank in self._cursors
        )

    def write(self, path: str | os.PathLike[str] | None) -> Traced:
        """Write the trace of what has come. Raises TrainingError when nothing has."""
        found = sorted({step for those in self.details.values() for step in those})
        if not found or self._folder is None:
            raise TrainingError(
                "The training ended before it made a step that could be traced.",
                numbers=f"asked for steps {self.first} to {self.last}",
                hint="again while it trains",
            )
        name = f"trace-{self._folder.name}-{found[0]}-{found[-1]}.json.gz"
        to = Path(path if path is not None else name).expanduser().absolute()
        files = rank_files(self._folder)
        heads = {rank: next(one for one in read_head(files[rank]) if isinstance(one, Header)) for rank in self.details}
        groups = [group for rank in self.details for group in groups_of(files[rank])]
        details = {rank: [one for _, one in sorted(those.items())] for rank, those in self.details.items()}
        steps = [(rank, record) for (rank, _), record in self._steps.items()]
        write_trace(to, chrome_trace(details, heads, groups, steps))
        return Traced(to, found[0], found[-1], len(details))

    def _take(self, rank: int, record: Record) -> None:
        if isinstance(record, Detail | StepRecord) and not self.first <= record.step <= self.last:
            return
        if isinstance(record, Detail):
            self.details.setdefault(rank, {})[record.step] = record
        elif isinstance(record, StepRecord):
            self._steps[rank, record.step] = record
        elif isinstance(record, EventRecord) and record.step >= self.first - 1:
            if record.event.get("kind") == "run_stopped":
                self._ended.add(rank)
