"""TensorBoard's scalars of one rank: where its step goes, what it sends, its memory; read from its own record file.

    job.ledger.listeners += [Session(run_dir, rank=rank, ...), ScalarWriter(run_dir, rank)]     # in this order

Once a second the mean of the steps since the last time, so that the cost does not grow with the pace of the steps, in
a thread that nothing waits for but the end of a run.
"""

from __future__ import annotations

import importlib.util
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from nbkit.rank.telemetry.record_writer import mean_of
from nbkit.rank.telemetry.tensorboard import add_values
from nbkit.records import tags
from nbkit.records.events import Event, RunStarted, RunStopped
from nbkit.records.readings import members_of, table
from nbkit.records.record_file import START, read_since
from nbkit.records.records import Group, MemoryRecord, Record, StepRecord

__all__ = ["ScalarWriter", "scalars_of"]

_ROW = {"bytes": "bytes", "calls": "calls", "seconds": "call_seconds", "algbw": "algbw", "busbw": "busbw"}
_MEMORY = ("parameters", "gradients", "optimizer", "buffers", "now", "peak")


def scalars_of(rank: int, step: StepRecord, groups: Iterable[Group]) -> dict[str, float]:
    """tag -> value of a step of this rank; what was not timed is left out."""
    found: dict[str, float] = {}
    if step.seconds > 0:
        found[tags.RANK_SECONDS] = step.seconds
        found[tags.MEASURING] = step.own_seconds / step.seconds
        found |= {tags.part(name): seconds for name, seconds in step.parts.items()}
        if step.parts.get("bubble"):
            found[tags.BUBBLE] = step.parts["bubble"] / step.seconds
    for row in table({rank: step}, members_of(groups)):
        values = {what: getattr(row, name) for name, what in _ROW.items()} | {"overlap": row.overlap}
        found |= {tags.moved(row.op, row.axis, what): value for what, value in values.items() if value is not None}
    return found


class ScalarWriter:
    """A listener; writes into <run_dir>/rank<rank>, while runs are under way. Complete on disk when one has stopped.

    What goes wrong in writing is warned of once, at the end of the run; it never ends a training.
    """

    def __init__(self, run_dir: Path, rank: int, *, every_s: float = 1.0) -> None:
        self.path = run_dir / f"rank{rank}"
        self._follower: _Follower | None = None
        if importlib.util.find_spec("tensorboard") is None:
            return  # rank 0's BoardWriter says so
        self._follower = follower = _Follower(run_dir / "telemetry" / f"rank{rank}.jsonl", self.path, rank, every_s)
        # The thread knows the follower alone, so that it ends with this object.
        weakref.finalize(self, follower.end)
        threading.Thread(target=follower.run, name="nbkit-scalars", daemon=True).start()

    def __call__(self, event: Event) -> None:
        """Take an event; the run's last one waits until all is on disk."""
        if self._follower is None:
            return
        if isinstance(event, RunStarted):
            self._follower.running.set()
        elif isinstance(event, RunStopped):
            self._follower.running.clear()
            failure = self._follower.write_now()
            if failure is not None:
                self._follower = None
                warnings.warn(
                    f"nothing more is written for TensorBoard to {self.path}: {type(failure).__name__}: {failure}",
                    stacklevel=2,
                )


class _Follower:
    """The thread's side."""

    def __init__(self, records: Path, folder: Path, rank: int, every_s: float) -> None:
        self._records, self._folder, self._rank, self._every_s = records, folder, rank, every_s
        self.running = threading.Event()
        self._asked, self._written = threading.Event(), threading.Event()
        self._ended = False
        self._failure: Exception | None = None
        self._cursor = START
        self._groups: list[Group] = []
        self._writer: Any = None

    def write_now(self) -> Exception | None:
        """Have everything written that is in the records; returns what went wrong, ever."""
        self._written.clear()
        self._asked.set()
        self._written.wait()
        return self._failure

    def end(self) -> None:
        """Nothing more is written."""
        self._ended = True
        self._asked.set()

    def run(self) -> None:
        """The thread."""
        while not self._ended:
            asked = self._asked.wait(self._every_s)
            if asked:
                self._asked.clear()
            try:
                if self._failure is None and (asked or self.running.is_set()):
                    self._write(*self._read())
            except Exception as error:
                self._failure = error
            finally:
                if asked:
                    self._written.set()
        if self._writer is not None:
            self._writer.close()

    def _read(self) -> tuple[list[StepRecord], list[MemoryRecord]]:
        found: Sequence[Record]
        found, self._cursor = read_since(self._records, self._cursor)
        known = {group.label for group in self._groups}
        self._groups += [one for one in found if isinstance(one, Group) and one.label not in known]
        steps = [one for one in found if isinstance(one, StepRecord)]
        return steps, [one for one in found if isinstance(one, MemoryRecord)]

    def _write(self, steps: list[StepRecord], memories: list[MemoryRecord]) -> None:
        if not steps and not memories:
            return
        if self._writer is None:
            # Imported here, in the thread: it takes half a second that the first step need not wait for.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        # Steps of two strategies are never mixed.
        for _, those in groupby(steps, key=lambda step: step.numbers.get("strategy")):
            step = mean_of(list(those))
            add_values(self._writer, scalars_of(self._rank, step, self._groups), step.step)
        for memory in memories:
            add_values(self._writer, {tags.memory(name): getattr(memory, name) for name in _MEMORY}, memory.step)
        self._writer.flush()
