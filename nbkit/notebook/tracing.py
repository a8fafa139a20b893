"""Trace the next steps of a running training: write one file for all ranks, from their records.

At a step boundary the ranks agree on the steps, as for a switch. They record these steps in detail, but do nothing else
in addition. The records are read until all ranks have written the last step.

The file is in Chrome's JSON format, which Perfetto and chrome://tracing open. Each rank is a process of the trace. Its
threads are the steps, the states of the training thread, the operations of the pipeline, and the communication of each
axis, with more lines if operations overlap. Arrows lead from sends to their receives. Times are in microseconds, on
rank 0's clock. The format: Duque and Sigelman, "Trace Event Format", Google 2016.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbkit.errors import TrainingError
from nbkit.notebook.user_files import write_file
from nbkit.quoting import user_path
from nbkit.records.record_file import START, cursor_near_end, groups_of, rank_files, read_head, read_since
from nbkit.records.records import Detail, EventRecord, Group, Header, Record, StepRecord, TimedCall

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class TraceFile:
    """A written trace of the steps `first` to `last`. It can be used as a path."""

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

    directory: returns the run's directory, or None if there is none yet. begin: makes the ranks record their next steps
    in detail, and returns the first and last step. check: raises if the ranks cannot make steps any more. Raises
    TrainingError if the training ends before the first of these steps.
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
    """The records of the steps `first` to `last`, read while they are written."""

    def __init__(self) -> None:
        self.first = self.last = 0
        self.details: dict[int, dict[int, Detail]] = {}
        self._steps: dict[tuple[int, int], StepRecord] = {}
        self._folder: Path | None = None
        self._cursors: dict[int, tuple[int, int]] = {}
        self._ended: set[int] = set()
        self._quiet: set[int] = set()  # ranks that had nothing new at the last read

    def begin_at_end(self, folder: Path) -> None:
        """Skip the existing records, to read only later ones."""
        self._folder = folder
        self._cursors = {rank: cursor_near_end(path, num_bytes=0) for rank, path in rank_files(folder).items()}

    def read(self, folder: Path) -> None:
        """Read new records."""
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
        # After the end of a training, a rank still records the steps that were in flight.
        over = self._ended & self._quiet
        return bool(self._cursors) and all(
            self.last in self.details.get(rank, ()) or rank in over for rank in self._cursors
        )

    def write(self, path: str | os.PathLike[str] | None) -> TraceFile:
        """Write the trace of the steps that were read. Raises TrainingError if there are none."""
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


_STEPS, _STATES, _PIPELINE, _LINES = 1, 2, 3, 10
_OPS = {"F": "forward", "B": "backward", "I": "backward input", "W": "backward weight"}
_DEVICE_CLOCK = "states: the device's; calls begin as the host issued them"
_ANYONE = -1

Event = dict[str, Any]


def chrome_trace(
    details: Mapping[int, Sequence[Detail]],
    headers: Mapping[int, Header],
    groups: Iterable[Group] = (),
    steps: Iterable[tuple[int, StepRecord]] = (),
) -> dict[str, Any]:
    """Return the trace. details: rank -> detailed steps. steps: (rank, record), for the figures of the steps."""
    known = {group.label: group for group in groups}
    records = {(rank, record.step): record for rank, record in steps}
    first = _first_issued(details, headers)
    begin = min(
        (headers[rank].aligned(ns) for rank, those in details.items() for one in those for ns in _moments(one)),
        default=0,
    )
    events: list[Event] = []
    sent: dict[tuple[Any, ...], Event] = {}
    taken: dict[tuple[Any, ...], Event] = {}
    for rank, those in sorted(details.items()):
        track = _Track(rank, headers[rank], begin)
        for detail in those:
            track.add_step(detail, records.get((rank, detail.step)))
        for call in sorted((call for one in those for call in one.calls), key=lambda call: call.issued):
            event = track.add_call(call, known.get(call.group), first)
            if call.op == "send":
                sent[call.group, rank, call.peer, call.place] = event
            elif call.op == "recv" and call.peer != _ANYONE:
                taken[call.group, call.peer, rank, call.place] = event
        events += track.named() + track.events
    return {
        "traceEvents": events + _arrows(sent, taken),
        "displayTimeUnit": "ms",
        "otherData": {"made by": "nbkit", "clock": _clock(headers)},
    }


def _clock(headers: Mapping[int, Header]) -> str:
    on_host = not headers or headers[min(headers)].clock == "host"
    return "the host's" if on_host else _DEVICE_CLOCK


def compressed(trace: dict[str, Any]) -> bytes:
    """Return the contents of a compressed trace file. Both viewers can open it."""
    return gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), mtime=0)


class _Track:
    """The events of one rank."""

    def __init__(self, rank: int, header: Header, begin: int) -> None:
        self.rank, self._header, self._begin = rank, header, begin
        self.events: list[Event] = []
        self._threads: dict[int, str] = {}
        self._lines: dict[tuple[str, int], int] = {}  # (axis, index of the axis's line) -> thread
        self._free: dict[int, int] = {}  # thread -> when its last event ends

    def named(self) -> list[Event]:
        """Return the events that name and sort the lines in the viewer."""
        host = f" on {self._header.host}" if self._header.host else ""
        named = [self._name("process_name", name=f"rank {self.rank}{host}")]
        named.append(self._name("process_sort_index", sort_index=self.rank))
        for thread, name in sorted(self._threads.items()):
            named.append(self._name("thread_name", thread, name=name))
            named.append(self._name("thread_sort_index", thread, sort_index=thread))
        return named

    def add_step(self, detail: Detail, record: StepRecord | None) -> None:
        """Add the step, its states and its pipeline operations."""
        if detail.laps:
            args: dict[str, Any] = {}
            if record is not None:
                args = {key: value for key, value in record.numbers.items() if isinstance(value, int | float | str)}
                every = round(sum(row.calls for row in record.traffic))
                if every > len(detail.calls):
                    args["calls that are not shown"] = every - len(detail.calls)
            self._span(_STEPS, "steps", f"step {detail.step}", detail.laps[0][1], detail.laps[-1][2], args)
        for state, start, stop in detail.laps:
            self._span(_STATES, "what the training thread does", state, start, stop, {"step": detail.step})
        for op in detail.pipeline:
            name, where = f"{_OPS.get(op.op, op.op)} {op.micro}", {"stage": op.stage, "micro-batch": op.micro}
            self._span(_PIPELINE, "pipeline", name, op.start_ns, op.stop_ns, where)

    def add_call(self, call: TimedCall, group: Group | None, first: Mapping[tuple[str, str, int], int]) -> Event:
        """Add a collective or message, from its issue to its end. Without a time it has no length, but a note."""
        axis = group.axis if group is not None else call.group
        stop = call.done if call.done is not None else call.issued
        args: dict[str, Any] = {"bytes": call.bytes, "group": call.group, "number": call.place}
        if group is not None:
            args["ranks"] = list(group.members)
        if call.peer is not None:
            args["peer"] = call.peer if call.peer != _ANYONE else "anyone"
        if call.done is None:
            args["duration"] = "not known"
        args["stood still, us"] = call.blocked / 1e3
        if (earliest := first.get((call.op, call.group, call.place))) is not None:
            args["issued after the first rank, us"] = (self._header.aligned(call.issued) - earliest) / 1e3
        whom = "" if call.peer is None or call.peer == _ANYONE else f" {'to' if call.op == 'send' else 'from'} "
        name = f"{call.op.replace('_', ' ')}{whom}{call.peer if whom else ''}"
        line = self._line(axis, call.issued, stop)
        return self._span(line, self._threads[line], name, call.issued, stop, args)

    def _line(self, axis: str, start: int, stop: int) -> int:
        """Return the first free line of the axis, because events of one thread must not overlap."""
        above = 0
        while True:
            thread = self._lines.setdefault((axis, above), _LINES + len(self._lines))
            self._threads.setdefault(thread, f"{axis} communication" + f" ({above + 1})" * (above > 0))
            if self._free.get(thread, 0) <= start:
                self._free[thread] = max(stop, start)
                return thread
            above += 1

    def _span(self, thread: int, line: str, name: str, start: int, stop: int, args: dict[str, Any]) -> Event:
        self._threads.setdefault(thread, line)
        at = (self._header.aligned(start) - self._begin) / 1e3
        event = {
            "name": name, "cat": line, "ph": "X", "ts": at, "dur": max(stop - start, 0) / 1e3,
            "pid": self.rank, "tid": thread, "args": args,
        }  # fmt: skip
        self.events.append(event)
        return event

    def _name(self, kind: str, thread: int = 0, **args: Any) -> Event:
        return {"name": kind, "ph": "M", "pid": self.rank, "tid": thread, "args": args}


def _moments(detail: Detail) -> Iterator[int]:
    yield from (lap[1] for lap in detail.laps)
    yield from (op.start_ns for op in detail.pipeline)
    yield from (call.issued for call in detail.calls)  # on CUDA the host is ahead of the device


def _first_issued(
    details: Mapping[int, Sequence[Detail]], headers: Mapping[int, Header]
) -> dict[tuple[str, str, int], int]:
    """Return the time at which the first rank issued each collective. The delays of the others show who is late."""
    first: dict[tuple[str, str, int], int] = {}
    for rank, those in details.items():
        for call in (call for one in those for call in one.calls if call.peer is None):
            key, at = (call.op, call.group, call.place), headers[rank].aligned(call.issued)
            first[key] = min(first.get(key, at), at)
    return first


def _arrows(sent: Mapping[tuple[Any, ...], Event], taken: Mapping[tuple[Any, ...], Event]) -> list[Event]:
    """Return an arrow from send to receive for each message. A viewer attaches each end to the event at that time."""
    arrows: list[Event] = []
    for number, key in enumerate(sorted(sent.keys() & taken.keys(), key=str)):
        send, recv = sent[key], taken[key]
        common = {"name": "message", "cat": "message", "id": number}
        arrows.append({**common, "ph": "s", "ts": send["ts"], "pid": send["pid"], "tid": send["tid"]})
        # The arrow ends a nanosecond before the end, when the event is still there.
        end = max(recv["ts"], round(recv["ts"] + recv["dur"] - 0.001, 3))
        arrows.append({**common, "ph": "f", "bp": "e", "ts": end, "pid": recv["pid"], "tid": recv["tid"]})
    return arrows
