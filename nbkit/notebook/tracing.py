"""Trace the next steps of a running training: one file for all ranks, made from their records.

The ranks agree on the steps at a boundary, as they do for a switch, and record them in detail; nothing is added to the
steps themselves. The files of the run are read until all ranks have written the last of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nbkit.errors import TrainingError
from nbkit.notebook.user_files import write_file
from nbkit.quoting import user_path
from nbkit.records.chrome_trace import chrome_trace, compressed
from nbkit.records.record_file import START, cursor_near_end, groups_of, rank_files, read_head, read_since
from nbkit.records.records import Detail, EventRecord, Header, Record, StepRecord

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class TraceFile:
    """A written trace: steps first to last of this many ranks. It can be used wherever a path is expected."""

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


def trace(
    directory: Callable[[], Path | None],
    begin: Callable[[], tuple[int, int]],
    check: Callable[[], object],
    path: str | os.PathLike[str] | None = None,
) -> TraceFile:
    """Begin a trace, wait for its steps and write them to `path`, by default ./trace-RUN-FIRST-LAST.json.gz.

    directory: the run's, None while there is none. begin: makes the ranks record their next steps in detail; gives the
    first and the last. check: raises when the ranks cannot make steps any more. Raises TrainingError when the training
    ends before it makes one of the steps.
    """
    kept = KeptRecords()
    if (before := directory()) is not None:
        kept.begin_at_end(before)
    kept.first, kept.last = begin()
    while not kept.complete:
        if (folder := directory()) is not None:
            kept.read(folder)
        if not kept.complete:
            check()
            time.sleep(_POLL_SECONDS)
    return kept.write(path)


class KeptRecords:
    """The records of steps first to last, read while they are written."""

    def __init__(self) -> None:
        self.first = self.last = 0
        self.details: dict[int, dict[int, Detail]] = {}
        self._steps: dict[tuple[int, int], StepRecord] = {}
        self._folder: Path | None = None
        self._cursors: dict[int, tuple[int, int]] = {}
        self._ended: set[int] = set()
        self._quiet: set[int] = set()  # ranks that had nothing new at the last read

    def begin_at_end(self, folder: Path) -> None:
        """Skip what is already written; read only later records."""
        self._folder = folder
        self._cursors = {rank: cursor_near_end(path, num_bytes=0) for rank, path in rank_files(folder).items()}

    def read(self, folder: Path) -> None:
        """Read what is new."""
        if folder != self._folder:
            self._folder, self._cursors = folder, {}
        for rank, path in rank_files(folder).items():
            records, self._cursors[rank] = read_since(path, self._cursors.get(rank, START))
            (self._quiet.discard if records else self._quiet.add)(rank)
            for record in records:
                self._take(rank, record)

    @property
    def complete(self) -> bool:
        """Return True if every rank has recorded the last step, or has ended its training."""
        # A rank records the end first, then the steps that were in flight.
        over = self._ended & self._quiet
        return bool(self._cursors) and all(
            self.last in self.details.get(rank, ()) or rank in over for rank in self._cursors
        )

    def write(self, path: str | os.PathLike[str] | None) -> TraceFile:
        """Write the trace of the steps that were read. Raises TrainingError when there is none."""
        found = sorted({step for those in self.details.values() for step in those})
        if not found or self._folder is None:
            raise TrainingError(
                "The training ended before it made a step that could be traced.",
                numbers=f"asked for steps {self.first} to {self.last}",
                hint="again while it trains",
            )
        name = f"trace-{self._folder.name}-{found[0]}-{found[-1]}.json.gz"
        to = user_path(path if path is not None else name).absolute()
        files = rank_files(self._folder)
        heads = {rank: next(one for one in read_head(files[rank]) if isinstance(one, Header)) for rank in self.details}
        groups = [group for rank in self.details for group in groups_of(files[rank])]
        details = {rank: [one for _, one in sorted(those.items())] for rank, those in self.details.items()}
        steps = [(rank, record) for (rank, _), record in self._steps.items()]
        write_file(to, compressed(chrome_trace(details, heads, groups, steps)))
        return TraceFile(to, found[0], found[-1], len(details))

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
