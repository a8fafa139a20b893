"""The thread that turns marks, numbers and calls into records, one step behind, so that its calls have ended."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from nbkit.rank.telemetry.collectives import Call, ring
from nbkit.rank.telemetry.disk_thread import IDLE
from nbkit.rank.telemetry.phases import Step
from nbkit.rank.telemetry.record_writer import Overview, RecordFile
from nbkit.rank.telemetry.step_breakdown import seconds_of, timed_calls, traffic_of
from nbkit.records.records import Detail, Group, Outside, PipelineOp, Record, StepRecord

_CALLS_IN_DETAIL = 4096
_RECENT = 64
_PASSING_S = 60.0  # for how long a device's step is waited for before it is written without its parts


@dataclass
class Mark:
    """The end of a step (None: the beginning of steps) as the training thread saw it.

    calls: how many had been issued. cpu, own: ns of this process, and of noting, so far. in_detail: every moment of it
    is kept.
    """

    step: Step | None
    calls: int
    cpu: int
    own: int
    in_detail: bool = False


@dataclass
class _Made:
    mark: Mark
    before: Mark
    numbers: dict[str, Any] | None = None


_newest: weakref.ref[Writer] | None = None
"""Of several jobs in one process, the writer of the one that began last: what cells send is noted by it alone."""


def _be_newest(writer: Writer) -> None:
    global _newest
    _newest = weakref.ref(writer)


class Writer:
    """Takes marks, (step, numbers), records, and threading.Event for all that is known: see Background."""

    def __init__(self, *, since: int) -> None:
        self._file: RecordFile | None = None
        self._overview: Overview | None = None
        self._made: dict[int, _Made] = {}
        self._last: Mark | None = None
        self._read = since  # calls that have been read from the ring
        self._spent = 0  # ns of this thread that a step record has named
        self.groups: list[Group] = []
        self.recent: deque[StepRecord] = deque(maxlen=_RECENT)

    def open(self, file: RecordFile) -> None:
        """Write to `file`."""
        self._file, self._overview = file, Overview(file.path)
        _be_newest(self)

    def close(self) -> None:
        """Nothing more is written."""
        for file in (self._file, self._overview):
            if file is not None:
                file.close()

    def take(self, item: Any) -> None:
        """What it is, is written now, or when the rest of its step is known."""
        if isinstance(item, Mark):
            if item.step is not None and self._last is not None:
                self._made[item.step.number] = _Made(item, self._last)
                # A loop that reports no numbers.
                self._write_steps([number for number in self._made if number <= item.step.number - 2])
            elif item.step is None:
                self._write_outside(item.calls)
                _be_newest(self)
            self._last = item
        elif isinstance(item, Record):
            self._write([item])
        elif isinstance(item, threading.Event):
            self._write_steps(list(self._made))
            self._last = None
            self._write_outside(ring.end)
        elif item is not IDLE:
            number, numbers = item
            if number in self._made:
                self._made[number].numbers = numbers
                self._write_steps([one for one in self._made if one <= number])
            else:
                self._write([StepRecord(number, seconds=numbers.get("seconds", 0.0), numbers=numbers)])
        elif self._last is None:
            self._write_outside(ring.end)

    def _write_steps(self, numbers: list[int]) -> None:
        for number in numbers:
            self._write_step(self._made.pop(number))

    def _write_step(self, made: _Made) -> None:
        step, mark, before = made.mark.step, made.mark, made.before
        assert step is not None
        known = self._pass(step)
        calls, lost = self._calls(mark.calls)
        inside = [call for call in calls if not call.outside]
        outside = [call for call in calls if call.outside]
        if known:
            seconds, parts, laps = seconds_of(step)
        else:
            seconds, parts, laps = 0.0, {}, []
        spent = time.thread_time_ns()
        record = StepRecord(
            step.number,
            start_ns=laps[0][1] if laps else step.base,
            seconds=seconds,
            parts=parts,
            traffic=traffic_of(inside),
            numbers=made.numbers or {},
            cpu_seconds=(mark.cpu - before.cpu) / 1e9,
            own_seconds=(mark.own - before.own + spent - self._spent) / 1e9,
            lost=lost,
        )
        self._spent = spent
        self.recent.append(record)
        records: list[Record] = [record]
        if outside:
            records.append(Outside(step.number, traffic_of(outside)))
        if laps and mark.in_detail:
            ops = tuple(PipelineOp(*op) for op in step.operations())
            records.append(Detail(step.number, tuple(laps), timed_calls(inside[:_CALLS_IN_DETAIL]), ops))
        lines = self._write(records)
        if self._overview is not None:
            self._overview.add(record, *lines[:1])

    def _write_outside(self, stop: int) -> None:
        calls, _ = self._calls(stop)
        if calls and _newest is not None and _newest() is self:
            self._write([Outside(self._last.step.number if self._last and self._last.step else 0, traffic_of(calls))])

    def _calls(self, stop: int) -> tuple[list[Call], int]:
        calls, lost = ring.between(self._read, stop)
        self._read = max(self._read, stop)
        new = {call.group.label: call.group for call in calls}
        known = {group.label for group in self.groups}
        groups = [Group(seen.label, seen.axis, seen.members) for label, seen in new.items() if label not in known]
        self.groups += groups
        self._write(groups)
        for call in calls:
            if call.cuda is not None:
                call.cuda.resolve()
        return calls, lost

    def _pass(self, step: Step) -> bool:
        """Wait, here where nobody else waits, until the device has come to the end of the step."""
        until = time.monotonic() + _PASSING_S
        while not step.over():
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def _write(self, records: list[Any]) -> list[str]:
        return self._file.write(records) if records and self._file is not None else []
