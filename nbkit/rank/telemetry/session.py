"""Telemetry of a job on this rank: takes what was measured as it comes, and has it written off the step.

    session = Session(run_dir, rank=..., world_size=..., device=..., offset_ns=clock_offset())
    bus.add(session)                            # runs, steps' numbers, events
    clock.step(number)                          # at the end of each step: see phases.py

Nothing here waits but the end of a run, when all is on disk. Until then the files are at most a quarter of a second
behind.

`RecordThread` turns marks, numbers and calls into records: where a step's time went, and what went over which axis. It
works one step behind, when the calls of a step have ended.
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


# Of the training thread alone, where the system knows: a loader may read a mapped file beside it.
_WHOSE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


def _faults() -> int:
    """Return how many pages of memory this thread has waited for so far because they were read from disk."""
    return resource.getrusage(_WHOSE).ru_majflt


def part_of(state: str) -> str:
    """Return the part of the step that a state of the training thread belongs to. A word of the user's is "other"."""
    if state in _COMPUTE:
        return "compute"
    if state.startswith("wait "):
        return "exposed"
    return state if state in PARTS else OTHER


def parts_of(intervals: Iterable[tuple[str, int, int]]) -> dict[str, float]:
    """Return the seconds of each part, from (state, start, stop) in ns. What lies outside the step is left out."""
    sums = dict.fromkeys(PARTS, 0)
    for state, start, stop in intervals:
        if state != OUTSIDE:
            sums[part_of(state)] += stop - start
    return {part: ns / 1e9 for part, ns in sums.items()}


def seconds_of(step: StepPhases) -> tuple[float, dict[str, float], list[tuple[str, int, int]]]:
    """Return (seconds that a step took, its parts, its intervals). Parts are empty if some of it was not marked."""
    intervals = step.intervals()
    parts = parts_of(intervals)
    return sum(parts.values()), parts if step.complete else {}, intervals


def traffic_of(calls: Iterable[CollectiveCall]) -> tuple[Traffic, ...]:
    """Return the traffic of these calls, by operation, group and peer.

    If some calls of a row were not listened to, none counts as timed: the others, which were waited for at once, are
    not like them.
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
    """Return the calls one by one, as they are written for a step whose every moment is kept."""
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
_PASSING_S = 60.0  # how long to wait for a device's step before it is written without its parts


@dataclass
class StepMark:
    """The end of a step (None: the beginning of steps) as the training thread saw it.

    calls: how many had been issued. cpu, own, examined: ns of this process, of noting, and of examining strategies, so
    far. in_detail: every moment of it is kept. faults: pages of memory that were read from disk, so far.
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
"""The writer of the job that began last in this process. It alone notes what cells send."""


def _be_newest(writer: RecordThread) -> None:
    global _newest
    _newest = weakref.ref(writer)


class RecordThread:
    """Takes marks, (step, numbers), records, and a threading.Event that asks for all that is known: see Background."""

    def __init__(self, *, since: int) -> None:
        self._file: RecordFile | None = None
        self._overview: Overview | None = None
        self._made: dict[int, _Made] = {}
        self._early: list[tuple[int, dict[str, Any]]] = []  # numbers of a step that has not ended
        self._last: StepMark | None = None
        self._read = since  # calls that have been read from the ring
        self._spent = 0  # ns of this thread that a step record has named
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
        """Write the item now, or when the rest of its step is known."""
        if isinstance(item, StepMark):
            if item.step is not None and self._last is not None:
                self._made[item.step.number] = _Made(item, self._last)
                # These are of a loop that reports no numbers.
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
                self._early.append(item)  # a save reads the numbers of the step at whose end it is made
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
        """Wait until the device has come to the end of the step. Return False if that takes too long."""
        until = time.monotonic() + _PASSING_S
        while not step.over():
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def _write(self, records: list[Any]) -> list[str]:
        return self._file.write(records) if records and self._file is not None else []


FIRST_IN_DETAIL = 3  # steps of a run, and after a switch
_IDLE_S = 2.0  # without steps, what cells sent is written this often
_PACE_S = 0.25  # what comes meanwhile is written together: waking up for each step costs the training


def record_path(run_dir: Path, rank: int) -> Path:
    """Return where rank `rank` of a run writes its records."""
    return run_dir / "telemetry" / f"rank{rank}.jsonl"


class Session:
    """Telemetry of a rank in a run.

    It is a sink, and hears of steps from the clock while a training runs. offset_ns: of this rank's
    clock, see clock_offset.py. detail_every: every so many steps are kept moment by moment (the first three too, and
    three after a switch); in those, and every LISTEN_EVERY steps, asynchronous collectives tell when they end.
    base_bytes: what this process held before the job; default: what it holds now. first_of_host: see health.py. A
    failure in writing is warned of once, at the next step. It never ends a training.
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

        def head(part: int) -> Sequence[Record]:  # kept by the thread: it must not hold this object
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
        # The thread refers only to the writer, so that it ends with this object.
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
        """Record the steps that this thread makes from here on. For a loop of your own, without events."""
        if self._made not in clock.listeners:
            clock.listeners.append(self._made)
        self._writing.put(
            StepMark(None, ring.end, time.process_time_ns(), own_ns(), examined=examined_ns(), faults=_faults())
        )
        clock.begin(on_device=self._on_device)
        self._look()
        self._health.run(True)

    def end(self) -> None:
        """Stop for now. Returns when everything is on disk."""
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
        """Wait until everything that is known is on disk, steps whose numbers have not come included.

        After `close` nothing more gets there.
        """
        self._writing.flush()

    def note(self, record: Record) -> None:
        """Have a record written as it is."""
        self._writing.put(record)

    def detail(self, steps: int) -> None:
        """Keep the next `steps` steps moment by moment, the one that is being made included. From any thread."""
        self._until = max(self._until, self._made_steps + steps)
        self._look()

    def memory(self, measured: MemoryRecord) -> None:
        """Take what health.memory_of counted, after a backward pass and before the gradients are dropped."""
        self._writing.put(measured)

    def close(self) -> None:
        """Write what there is, and end."""
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
        """Look as closely as the step that begins deserves."""
        clock.listening = self._in_detail or self._next % LISTEN_EVERY == 0
