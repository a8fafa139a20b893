"""Write the record file of a rank to disk: two parts of limited size, and an overview of the whole run.

At the default sizes about the newest 70 000 steps are there one by one, and all of them as an overview of at most 1024
lines. When those are full, every two neighbours become their mean, and each line stands for twice as many steps.

`Background` is the thread that writes, so that measuring and training wait for nothing but the end of a run. A failure
in writing is warned of once, at the next item. It never ends a training.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from nbkit.records.record_file import old_part, overview_of, read_head
from nbkit.records.records import Header, Record, StepRecord, Traffic, to_line

PART_BYTES = 16 << 20
OVERVIEW_LINES = 1024


class RecordFile:
    """Appends records to `path`. For one thread. head(part): returns what each part begins with."""

    def __init__(self, path: Path, head: Callable[[int], Sequence[Record]], *, part_bytes: int = PART_BYTES) -> None:
        self.path, self._head, self._part_bytes = path, head, part_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        # A process that takes a rank over begins a new part. It never writes into the file of the one before it.
        self._part = next((one.part for one in read_head(path) if isinstance(one, Header)), -1)
        self._file: IO[str] | None = None
        self._begin_part()

    def write(self, records: Sequence[Record]) -> list[str]:
        """Append records, and hand them to the operating system, so that readers and crashes find whole lines.

        Return the lines.
        """
        lines = [to_line(record) for record in records]
        if self._file is None:
            return lines
        self._file.write("".join(lines))
        self._file.flush()
        if self._file.tell() > self._part_bytes:
            self._begin_part()
        return lines

    def close(self) -> None:
        """Close the file. Nothing more is written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin_part(self) -> None:
        self.close()
        self._part += 1
        young = self.path.with_suffix(".new")
        young.write_text("".join(to_line(record) for record in self._head(self._part)))
        # Each of the two is atomic; between them a reader finds no newest part, and waits.
        if self.path.exists():
            os.replace(self.path, old_part(self.path))
        os.replace(young, self.path)
        self._file = self.path.open("a")


class Overview:
    """All steps of a run as at most `lines` means. The file is rewritten only when they are halved."""

    def __init__(self, path: Path, *, lines: int = OVERVIEW_LINES) -> None:
        self._path, self._lines = overview_of(path), lines
        self._file: IO[str] | None = None
        self._full: list[StepRecord] = []
        self._open: list[StepRecord] = []
        self.span = 1

    def add(self, step: StepRecord, line: str = "") -> None:
        """Add a finished step. line: the same in JSON, if that is known."""
        self._open.append(step)
        if len(self._open) < self.span:
            return
        self._full.append(mean_of(self._open))
        self._open = []
        if len(self._full) < self._lines:
            self._append(line if line and self.span == 1 else to_line(self._full[-1]))
            return
        self._full = [mean_of(self._full[i : i + 2]) for i in range(0, len(self._full), 2)]
        self.span *= 2
        self.close()
        young = self._path.with_suffix(".new")
        young.write_text("".join(to_line(step) for step in self._full))
        os.replace(young, self._path)

    def close(self) -> None:
        """Close the file for now."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, line: str) -> None:
        if self._file is None:
            self._file = self._path.open("a" if len(self._full) > 1 else "w")
        self._file.write(line)
        self._file.flush()


def mean_of(steps: Sequence[StepRecord]) -> StepRecord:
    """Return one record of neighbouring steps.

    Numbers are means weighed by their spans. A number that some steps lack is the mean of those that have it. Words
    (the strategy) and the step number are the newest's; the start is the oldest's.
    """
    if len(steps) == 1:
        return steps[0]
    total = sum(step.span for step in steps)

    def mean(read: Callable[[StepRecord], float]) -> float:
        return sum(read(step) * step.span for step in steps) / total

    last = steps[-1]
    parts = {name: mean(lambda step, name=name: step.parts.get(name, 0.0)) for step in steps for name in step.parts}  # type: ignore[misc]
    numbers: dict[str, object] = {}
    for name in {name: None for step in steps for name in step.numbers}:
        those = [(step.numbers[name], step.span) for step in steps if name in step.numbers]
        if all(isinstance(value, (int, float)) for value, _ in those):
            numbers[name] = sum(value * span for value, span in those) / sum(span for _, span in those)
        else:
            numbers[name] = those[-1][0]
    numbers["step"] = last.step
    return StepRecord(
        last.step,
        start_ns=steps[0].start_ns,
        seconds=mean(lambda step: step.seconds),
        parts=parts,
        traffic=_mean_traffic(steps, total),
        numbers=numbers,
        cpu_seconds=mean(lambda step: step.cpu_seconds),
        own_seconds=mean(lambda step: step.own_seconds),
        lost=sum(step.lost for step in steps),
        span=total,
    )


def _mean_traffic(steps: Sequence[StepRecord], total: int) -> tuple[Traffic, ...]:
    sums: dict[tuple[str, str, str, int | None], list[float]] = {}
    for step in steps:
        for row in step.traffic:
            into = sums.setdefault((row.op, row.axis, row.group, row.peer), [0.0] * 5)
            for i, value in enumerate((row.calls, row.bytes, row.timed, row.seconds, row.blocked)):
                into[i] += value * step.span / total
    return tuple(Traffic(*key, *values) for key, values in sums.items())


IDLE = ()
"""The item that is taken when none has come for a while."""


class Background:
    """Calls `take` with each item that is put, in a thread of its own.

    After a failure it takes none; `end` calls `close`. An item that is an Event asks for all that was put before it to
    be on disk. idle_s: take IDLE if nothing has come for so long. pace_s: after an item, sleep for so long, because
    waking up for each costs the training. what: what becomes of the items, for the warning: "recorded in runs/a".
    """

    def __init__(
        self,
        take: Callable[[Any], None],
        close: Callable[[], None],
        *,
        name: str,
        what: str,
        idle_s: float | None = None,
        pace_s: float = 0.0,
    ) -> None:
        self._take, self._close, self._what, self._idle_s, self._pace_s = take, close, what, idle_s, pace_s
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._failure: Exception | None = None
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Put an item. From any thread."""
        self.tell()
        self._items.put(item)

    def tell(self) -> None:
        """Warn, once, if the writing has failed. Only on the main thread, whose output is the cell's."""
        if self._failure is None or self._warned or threading.current_thread() is not threading.main_thread():
            return
        self._warned = True
        text = f"nothing more is {self._what}: {type(self._failure).__name__}: {self._failure}"
        warnings.warn(text, stacklevel=3)

    def end(self, *, seconds: float = 0.0) -> None:
        """Take what is there, and no more. seconds: how long to wait for the thread to end."""
        self._items.put(None)
        self._hurry.set()
        if seconds and threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def flush(self, seconds: float = math.inf) -> None:
        """Wait, at most `seconds`, until all that was put is on disk. After `end` nothing more gets there."""
        written, until = threading.Event(), time.monotonic() + seconds
        self._items.put(written)
        self._hurry.set()
        while self._thread.is_alive() and not written.wait(min(1.0, max(until - time.monotonic(), 0.0))):
            if time.monotonic() >= until:
                warnings.warn(f"not yet {self._what}: what it takes longer than {seconds:.0f} s for", stacklevel=3)
                break
        self.tell()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                if self._failure is None:
                    self._take(item)
            except Exception as error:
                self._failure = error
            finally:
                if isinstance(item, threading.Event):
                    item.set()
        self._close()

    def _next(self) -> Any:
        try:
            item = self._items.get(timeout=self._idle_s)
        except queue.Empty:
            return IDLE
        if self._pace_s and item is not None and not isinstance(item, threading.Event) and self._items.empty():
            self._hurry.wait(self._pace_s)
            self._hurry.clear()
        return item
