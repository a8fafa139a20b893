"""The telemetry of a job on this rank: takes measurements as they come, and writes them in a separate thread.

    session = Session(run_dir, rank=..., world_size=..., device=..., offset_ns=clock_offset())
    bus.add(session)                            # runs, steps' numbers, events
    clock.step(number)                          # at the end of each step: see phases.py

Steps do not wait for the writing. The end of a run waits until everything is on disk. Until then the files lag by at
most a quarter of a second.

`RecordThread` makes records of marks, numbers and calls: the parts of a step's time, and the bytes sent along each
axis. It works one step behind, when the calls of a step have ended.
"""

from __future__ import annotations

import resource
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns as now
from typing import Any

import torch

from nbkit.rank.background_threads import examined_ns
from nbkit.rank.device import accelerator
from nbkit.rank.telemetry.collectives import CollectiveCall, own_ns, ring
from nbkit.rank.telemetry.health import Health, bytes_held
from nbkit.rank.telemetry.phases import OTHER, OUTSIDE, StepPhases, clock
from nbkit.rank.telemetry.sinks import IDLE, Background
from nbkit.records.events import RunStarted, RunStopped, StepDone, Switched
from nbkit.records.record_file import Overview, RecordFile
from nbkit.records.records import (
    LISTEN_EVERY,
    Detail,
    EventRecord,
    Group,
    Header,
    MemoryRecord,
    Outside,
    PipelineOp,
    Record,
    StepRecord,
    TimedCall,
    Traffic,
)
from nbkit.wire.processes import node_name

PARTS = ("compute", "exposed", "bubble", "data", "optimizer", OTHER)
_COMPUTE = ("forward", "backward")


# Count only the training thread's page faults if the system can: another thread may read a mapped file for a loader.
_WHOSE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


def _faults() -> int:
    """Return the number of pages of memory that this thread has waited for because they were read from disk."""
    return resource.getrusage(_WHOSE).ru_majflt


def part_of(state: str) -> str:
    """Return the part of the step that a state of the training thread belongs to. A word of the user is "other"."""
    if state in _COMPUTE:
        return "compute"
    if state.startswith("wait "):
        return "exposed"
    return state if state in PARTS else OTHER


def parts_of(intervals: Iterable[tuple[str, int, int]]) -> dict[str, float]:
    """Return the seconds of each part of a step, from (state, start, stop) in ns, without the state "outside"."""
    sums = dict.fromkeys(PARTS, 0)
    for state, start, stop in intervals:
        if state != OUTSIDE:
            sums[part_of(state)] += stop - start
    return {part: ns / 1e9 for part, ns in sums.items()}


def seconds_of(step: StepPhases) -> tuple[float, dict[str, float], list[tuple[str, int, int]]]:
    """Return (seconds of a step, seconds of its parts, its intervals). Parts are {} if some laps were not kept."""
    intervals = step.intervals()
    parts = parts_of(intervals)
    return sum(parts.values()), parts if step.complete else {}, intervals


def traffic_of(calls: Iterable[CollectiveCall]) -> tuple[Traffic, ...]:
    """Return the traffic of these calls, by operation, group and peer.

    If the end of some calls in a row is not reliable (see CollectiveCall.heard), none of the row counts as timed. The
    other calls were waited for at once, so they do not represent the row.
    """
    sums: dict[tuple[str, str, int | None], list[float]] = {}
    axes: dict[str, str] = {}
    unheard = set()
    for call in calls:
        key = (call.op, call.group.label, call.peer)
        if (into := sums.get(key)) is None:
            into = sums[key] = [0, 0, 0, 0.0, 0.0]
            axes[call.group.label] = call.group.axis
        seconds = call.seconds
        into[0] += 1
        into[1] += call.bytes
        if seconds is not None:
            into[2] += 1
            into[3] += seconds
        into[4] += call.blocked_seconds or 0.0
        if not call.heard:
            unheard.add(key)
    for key in unheard:
        sums[key][2] = sums[key][3] = 0.0
    return tuple(
        Traffic(op, axes[group], group, peer, int(n), int(size), int(timed), seconds, blocked)
        for (op, group, peer), (n, size, timed, seconds, blocked) in sums.items()
    )


def timed_calls(calls: Sequence[CollectiveCall]) -> tuple[TimedCall, ...]:
    """Return the calls one by one, as they are written for a step that is recorded in detail."""
    return tuple(
        TimedCall(
            call.op,
            call.group.label,
            call.peer,
            call.place,
            call.bytes,
            call.issued,
            call.waited,
            call.done if call.seconds is None or call.done else call.issued + round(call.seconds * 1e9),
            round((call.blocked_seconds or 0.0) * 1e9),
        )
        for call in calls
    )


_CALLS_IN_DETAIL = 4096
_RECENT = 64
_PASSING_S = 60.0  # how long to wait for a device to finish a step; after this, it is written without its parts


@dataclass
class StepMark:
    """A mark that the training thread makes at the end of a step, or at the beginning of steps (then step is None).

    All numbers are sums up to this mark. calls: the number of issued calls. cpu, own, examined: the ns of CPU time of
    this process, of recording calls, and of examining strategies. faults: the number of pages of memory that were read
    from disk. in_detail: True if the step is recorded in detail.
    """

    step: StepPhases | None
    calls: int
    cpu: int
    own: int
    in_detail: bool = False
    examined: int = 0
    faults: int = 0


@dataclass
class _Made:
    mark: StepMark
    before: StepMark
    numbers: dict[str, Any] | None = None


_newest: weakref.ref[RecordThread] | None = None
"""The writer of the newest job in this process. Only this writer records the traffic of cells."""


def _be_newest(writer: RecordThread) -> None:
    global _newest
    _newest = weakref.ref(writer)


class RecordThread:
    """Writes records. It takes marks, (step, numbers), records, and a threading.Event to flush: see Background."""

    def __init__(self, *, since: int) -> None:
        self._file: RecordFile | None = None
        self._overview: Overview | None = None
        self._made: dict[int, _Made] = {}
        self._early: list[tuple[int, dict[str, Any]]] = []  # numbers that came before the mark of their step
        self._last: StepMark | None = None
        self._read = since  # the number of calls that have been read from the ring
        self._spent = 0  # ns of this thread that step records already contain
        self.groups: list[Group] = []
        self.recent: deque[StepRecord] = deque(maxlen=_RECENT)

    def open(self, file: RecordFile) -> None:
        """Write to `file`."""
        self._file, self._overview = file, Overview(file.path)
        _be_newest(self)

    def close(self) -> None:
        """Close the files. Nothing more is written."""
        for file in (self._file, self._overview):
            if file is not None:
                file.close()

    def take(self, item: Any) -> None:
        """Write the item, or keep it until the rest of its step is known."""
        if isinstance(item, StepMark):
            if item.step is not None and self._last is not None:
                self._made[item.step.number] = _Made(item, self._last)
                # The loop reports no numbers for these steps.
                self._write_steps([number for number in self._made if number <= item.step.number - 2])
            elif item.step is None:
                self._write_outside(item.calls)
                _be_newest(self)
            self._last = item
            self._take_early()
        elif isinstance(item, Record):
            self._write([item])
        elif isinstance(item, threading.Event):
            self._take_early()
            self._write_steps(list(self._made))
            self._last = None
            self._write_outside(ring.end)
        elif item is not IDLE:
            number, numbers = item
            if self._last is None or number in self._made:
                self._take_numbers(number, numbers)
            else:
                self._early.append(item)  # a save at the end of a step asks for the step's numbers before its mark
        elif self._last is None:
            self._write_outside(ring.end)

    def _take_early(self) -> None:
        early, self._early = self._early, []
        for number, numbers in early:
            self._take_numbers(number, numbers)

    def _take_numbers(self, number: int, numbers: dict[str, Any]) -> None:
        if number in self._made:
            self._made[number].numbers = numbers
            self._write_steps([one for one in self._made if one <= number])
        else:
            self._write([StepRecord(number, seconds=numbers.get("seconds", 0.0), numbers=numbers)])

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
        spent, routed = time.thread_time_ns(), Counter[int]()
        for layer in step.routed:
            routed.update(layer)
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
            examining=(mark.examined - before.examined) / 1e9,
            faults=mark.faults - before.faults,
            experts={str(number): float(tokens) for number, tokens in routed.items()},
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

    def _calls(self, stop: int) -> tuple[list[CollectiveCall], int]:
        calls, lost = ring.between(self._read, stop)
        self._read = max(self._read, stop)
        new = {call.group.label: call.group for call in calls}
        known = {group.label for group in self.groups}
        groups = [Group(seen.label, seen.axis, seen.members) for label, seen in new.items() if label not in known]
        self.groups += groups
        self._write(groups)
        for call in calls:
            if call.on_device is not None:
                call.on_device.resolve()
        return calls, lost

    def _pass(self, step: StepPhases) -> bool:
        """Wait until the device has reached the end of the step. Returns False if that takes too long."""
        until = time.monotonic() + _PASSING_S
        while not step.over():
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def _write(self, records: list[Any]) -> list[str]:
        return self._file.write(records) if records and self._file is not None else []


FIRST_IN_DETAIL = 3  # the number of steps recorded in detail at the start of a run and after a switch
_IDLE_S = 2.0  # without steps, the traffic of cells is written this often
_PACE_S = 0.25  # items of this period are written together, because waking up for each step slows the training


def record_path(run_dir: Path, rank: int) -> Path:
    """Return the path of the file where `rank` of a run writes its records."""
    return run_dir / "telemetry" / f"rank{rank}.jsonl"


class Session:
    """The telemetry of a rank in a run. It is a sink, and a listener of the clock while a training runs.

    offset_ns: the offset of this rank's clock (see clock_offset.py). detail_every: record one of this many steps in
    detail, that is, moment by moment. The first three steps and three steps after a switch are recorded in detail too.
    In such steps, and in every LISTEN_EVERY-th step, asynchronous collectives report their ends. base_bytes: the memory
    that this process held before the job; by default, the memory it holds now. first_of_host: see health.py.

    An error while writing gives one warning, at the next step. It never ends a training.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        world_size: int,
        device: torch.device | None = None,
        strategy: str = "",
        offset_ns: int = 0,
        detail_every: int = 50,
        base_bytes: int | None = None,
        first_of_host: bool = True,
    ) -> None:
        self.path = record_path(run_dir, rank)
        self._on_device = on_device = accelerator().holds(device)
        self._detail_every, self._until = detail_every, FIRST_IN_DETAIL
        self._made_steps, self._next = 0, 1
        begun, unix = now(), time.time()
        base = 0 if on_device else bytes_held(device)[0] if base_bytes is None else base_bytes

        def head(part: int) -> Sequence[Record]:  # the thread keeps this function, so it must not refer to `self`
            header = Header(
                rank,
                world_size,
                part,
                host=node_name(),
                clock=accelerator().kind if on_device else "host",
                strategy=strategy,
                clock_ns=begun,
                offset_ns=offset_ns,
                unix_s=unix,
                base_bytes=base,
            )
            return [header, *writer.groups]

        self._writer = writer = RecordThread(since=ring.end)
        writer.open(RecordFile(self.path, head))
        what = f"recorded in {self.path}"
        self._writing = Background(
            writer.take, writer.close, name="nbkit-records", what=what, idle_s=_IDLE_S, pace_s=_PACE_S
        )
        # The thread refers only to the writer, so this object can be deleted, which ends the thread.
        weakref.finalize(self, self._writing.end)
        self._health = Health(
            self._writing.put, gpu="" if device is None else accelerator().uuid(device), first=first_of_host
        )
        weakref.finalize(self, self._health.end)

    def write(self, event: dict[str, Any]) -> None:
        """Take an event of the job."""
        kind, step = event["kind"], event["step"]
        if kind == StepDone.kind:
            del event["kind"]
            self._writing.put((step, event))
            return
        self.note(EventRecord(step, ns=now(), event=event))
        if kind == RunStarted.kind:
            self._next = step + 1
            self.begin()
        elif kind == RunStopped.kind:
            self.end()
        elif kind == Switched.kind:
            self.detail(FIRST_IN_DETAIL)

    def begin(self) -> None:
        """Record the steps that this thread makes from now on. Call it in a loop of your own, which emits no events."""
        if self._made not in clock.listeners:
            clock.listeners.append(self._made)
        self._writing.put(
            StepMark(None, ring.end, time.process_time_ns(), own_ns(), examined=examined_ns(), faults=_faults())
        )
        clock.begin(on_device=self._on_device)
        self._look()
        self._health.run(True)

    def end(self) -> None:
        """Stop recording until `begin`. Returns when everything is on disk."""
        clock.end()
        self._health.run(False)
        if self._made in clock.listeners:
            clock.listeners.remove(self._made)
        self.flush()

    @property
    def recent(self) -> list[StepRecord]:
        """Return the newest steps of this rank, oldest first."""
        return list(self._writer.recent)

    def flush(self) -> None:
        """Wait until everything is on disk, including steps without numbers. Does nothing after `close`."""
        self._writing.flush()

    def note(self, record: Record) -> None:
        """Write a record as it is, in the writing thread."""
        self._writing.put(record)

    def detail(self, steps: int) -> None:
        """Record `steps` steps in detail, beginning with the current one. Any thread may call it."""
        self._until = max(self._until, self._made_steps + steps)
        self._look()

    def memory(self, measured: MemoryRecord) -> None:
        """Write the result of health.memory_of, called after a backward pass and before gradients are dropped."""
        self._writing.put(measured)

    def close(self) -> None:
        """Write everything, and end the threads."""
        self.end()
        self._health.end()
        self._writing.end()

    def _made(self, step: StepPhases) -> None:
        self._health.step = step.number
        mark = StepMark(step, ring.end, time.process_time_ns(), own_ns(), self._in_detail, examined_ns(), _faults())
        self._writing.put(mark)
        self._made_steps, self._next = self._made_steps + 1, step.number + 1
        self._look()

    @property
    def _in_detail(self) -> bool:
        return self._made_steps < self._until or self._next % self._detail_every == 0

    def _look(self) -> None:
        """Choose whether collectives report their ends in the step that begins."""
        clock.listening = self._in_detail or self._next % LISTEN_EVERY == 0
