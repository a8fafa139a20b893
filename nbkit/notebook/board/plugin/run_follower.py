"""A run as its files are written: read with cursors, and kept in bounded memory however long it trains."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbkit.notebook.board.plugin.run_events import put
from nbkit.notebook.board.plugin.run_timeline import Timeline, point_of
from nbkit.records import record_lookup
from nbkit.records.readings import Late, bars, late_rank, usual_bars
from nbkit.records.record_file import START, cursor_near_end, rank_files, read_head, read_since
from nbkit.records.records import Detail, EventRecord, Group, Header, HealthRecord, MemoryRecord, Record, StepRecord

__all__ = ["Run", "strategy_of"]

_STEPS = 64
_DETAILS = 4
_MEMORIES = 64
_EVENTS = 1000
_LATE_OVER = 50
_USUAL_OF = 5  # steps whose medians say who is late: one alone may be late by chance
_PATIENCE = 8  # a step is complete when all ranks have told of it, or when this many newer ones are there
_SAMPLES = 240
_LOOK_FOR_RANKS_S = 2.0


class Run:
    """What is known of one run directory. `refresh` reads what is new; everything else only looks. lock: for both.

    passing: for who shows one step after the other: of many that are new, the newest alone are read, and there is
    neither `timeline` nor `late`.
    """

    def __init__(self, folder: Path, *, passing: bool = False) -> None:
        self.folder, self._passing = folder, passing
        self.lock = threading.RLock()
        self.headers: dict[int, Header] = {}
        self.members: dict[str, tuple[int, ...]] = {}
        self.steps: dict[int, dict[int, StepRecord]] = {}
        self.details: dict[int, dict[int, Detail]] = {}
        self.memory: dict[int, deque[MemoryRecord]] = {}
        self.health: dict[int, HealthRecord] = {}  # of each rank the newest
        self.events: list[dict[str, Any]] = []
        self.timeline = Timeline()
        self.late: deque[Late | None] = deque(maxlen=_LATE_OVER)
        self.files: dict[int, Path] = {}
        self._cursors: dict[int, tuple[int, int]] = {}
        self._last: dict[int, int] = {}
        self._closed = 0
        self._looked = 0.0
        self._seen: set[str] = set()

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        known = max((header.world_size for header in self.headers.values()), default=0)
        return max(known, 1 + max(self.files, default=-1))

    @property
    def newest(self) -> int:
        """The newest step that all ranks have told of; 0 when there is none."""
        return self._closed

    def refresh(self) -> None:
        """Read what has been written since the last time."""
        with self.lock:
            self._find_ranks()
            for rank, path in self.files.items():
                steps = _PATIENCE if self._passing else None
                records, self._cursors[rank] = read_since(path, self._cursors[rank], steps=steps)
                for record in records:
                    self._take(rank, record)
            self._close_steps()

    def picture_of(self, step: int) -> dict[int, StepRecord]:
        """rank -> its record of a step: from memory, from the files, or an overview's mean around it."""
        found = dict(self.steps.get(step, {}))
        for rank in self.files.keys() - found.keys():
            if (record := record_lookup.step_at(self.files[rank], step)) is not None:
                found[rank] = record
        # Means of different spans do not belong beside each other.
        span = max((record.span for record in found.values()), default=1)
        return {rank: record for rank, record in sorted(found.items()) if record.span == span}

    def detail_of(self, rank: int, step: int) -> Detail | None:
        """The moments of a rank in the step nearest to `step` of those that were kept."""
        kept = [those[rank] for number, those in self.details.items() if rank in those and number <= step]
        newest_kept = max(self.details, default=0)
        if kept and step >= newest_kept:
            return max(kept, key=lambda one: one.step)
        return record_lookup.detail_near(self.files[rank], step) if rank in self.files else None

    def memory_of(self, rank: int, step: int) -> MemoryRecord | None:
        """What a rank's memory was for when it was last counted up to `step`, or first after it."""
        those = self.memory.get(rank)
        if not those:
            return None
        return next((one for one in reversed(those) if one.step <= step), those[0])

    def near(self, step: int) -> list[dict[int, StepRecord]]:
        """`step` and the few before it under its strategy, the oldest first, as far as they are in memory."""
        if step not in self.steps:
            return []
        those = [self.steps[one] for one in range(step - _USUAL_OF + 1, step + 1) if one in self.steps]
        return [one for one in those if strategy_of(one) == strategy_of(those[-1])]

    def _find_ranks(self) -> None:
        if time.monotonic() - self._looked < _LOOK_FOR_RANKS_S:
            return
        self._looked = time.monotonic()
        new = {rank: path for rank, path in rank_files(self.folder).items() if rank not in self.files}
        if not new:
            return
        first = not self.files
        self.files = dict(sorted({**self.files, **new}.items()))
        for rank, path in new.items():
            for record in read_head(path):
                self._take(rank, record)
            self._cursors[rank] = cursor_near_end(path)
            if self._cursors[rank] != START:  # groups that were made since the part began lie before it
                for group in record_lookup.groups_of(path):
                    self._take(rank, group)
        if first:
            self._read_history()

    def _read_history(self) -> None:
        """Of what lies before the cursors: the overview, events, and who holds what."""
        if all(cursor == START for cursor in self._cursors.values()):
            return
        past: dict[int, dict[int, StepRecord]] = {}
        for rank, path in self.files.items():
            for record in record_lookup.overview_sample(path, _SAMPLES):
                past.setdefault(record.step, {})[rank] = record
            if (memory := record_lookup.newest_memory(path)) is not None:
                self._take(rank, memory)
        for step, steps in sorted(past.items()):
            point = point_of(steps, bars(steps, self.members))
            point[1] = step - self._closed  # it stands for those that were passed over too
            self.timeline.add(point)
            self._closed = step
        for event in record_lookup.events_of(self.files[min(self.files)]):
            self._take_event(event)

    def _take(self, rank: int, record: Record) -> None:
        if isinstance(record, StepRecord):
            self._take_step(rank, record)
        elif isinstance(record, Header):
            self.headers[rank] = record
        elif isinstance(record, Group):
            self.members[record.label] = record.members
        elif isinstance(record, Detail):
            self.details.setdefault(record.step, {})[rank] = record
            _drop_oldest(self.details, _DETAILS)
        elif isinstance(record, MemoryRecord):
            self.memory.setdefault(rank, deque(maxlen=_MEMORIES)).append(record)
        elif isinstance(record, HealthRecord):
            self.health[rank] = record
        elif isinstance(record, EventRecord):
            self._take_event(record)

    def _take_step(self, rank: int, record: StepRecord) -> None:
        if record.step <= self._last.get(rank, 0):  # a checkpoint was loaded, and the job makes these steps again
            self._closed = min(self._closed, record.step - 1)
            for step in [step for step in self.steps if step > record.step]:
                self.steps[step].pop(rank, None)
                if not self.steps[step]:
                    del self.steps[step]
        self._last[rank] = record.step
        self.steps.setdefault(record.step, {})[rank] = record

    def _take_event(self, record: EventRecord) -> None:
        # Every rank tells of what they did together.
        key = f"{record.step} {record.event}"
        if key not in self._seen:
            self._seen.add(key)
            # Readers' cursors mean others where one is replaced, or the oldest go.
            self.timeline.epoch += put(self.events, {"step": record.step, **record.event})
        if len(self.events) > _EVENTS:
            del self.events[: _EVENTS // 4]
            self.timeline.epoch += 1

    def _close_steps(self) -> None:
        reached = sorted(self._last.values())
        for step in sorted(step for step in self.steps if step > self._closed):
            here = self.steps[step]
            complete = len(here) == len(self.files) or (reached and step + _PATIENCE <= reached[-1])
            if not complete:
                break
            self._closed = step
            if self._passing:
                continue
            self.timeline.add(point_of(here, bars(here, self.members)))
            self.late.append(late_rank(usual_bars(self.near(step), self.members)))
        _drop_oldest(self.steps, _STEPS)


def strategy_of(steps: Mapping[int, StepRecord]) -> str:
    """Under which one a step was made; "" where nobody has said so."""
    return str(steps[min(steps)].numbers.get("strategy") or "") if steps else ""


def _drop_oldest(of: dict[int, Any], at_most: int) -> None:
    while len(of) > at_most:
        del of[min(of)]
