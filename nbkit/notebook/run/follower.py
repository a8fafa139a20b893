"""Read the record files of a run while they are written, each one once, in bounded memory however long the run is.

`Curve` holds the loss of a run from its first to its newest step in a bounded number of points, and its events.
`RunTimeline` holds the steps themselves as a bounded number of points, and returns what was added since a cursor. Both
read no files.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from nbkit.figures import unit_of
from nbkit.records import record_file
from nbkit.records.event_words import brief, mark_of
from nbkit.records.readings import (
    MEDIAN_OF,
    STANDS,
    Bar,
    Late,
    adding_up,
    bars,
    clock,
    late_rank,
    usual_bars,
    usual_steps,
)
from nbkit.records.record_file import START, cursor_near_end, rank_files, read_head, read_overview, read_since
from nbkit.records.records import Detail, EventRecord, Group, Header, HealthRecord, MemoryRecord, Record, StepRecord

COLUMNS = ("step", "span", "time", "tokens", "loss", "rate", "strategy")
POINTS = 4000
_EVENTS = 1000
_IMBALANCES = 200  # even, so that all are pairs

Point = tuple[float, ...]  # of COLUMNS; strategy: which of Curve.strategies. NaN: not known
_UNKNOWN = float("nan")

P = TypeVar("P", bound=Sequence[Any])


@dataclass(frozen=True)
class Grown:
    """The changes that a reader has not seen.

    They are the number of its points that still hold and the new points; the same for events.
    """

    epoch: int
    keep: int
    points: list[Point]
    events_keep: int
    events: list[dict[str, Any]]


class Curve:
    """Points in order of their steps, with the time in seconds and the tokens since the run began.

    unit: what is counted as tokens, "tokens" or "rows". imbalance: (step, most tokens of a rank's experts in each
    layer / mean), the mean of several steps in a long run. epoch: changes whenever existing points have changed; a
    reader then begins anew.
    """

    def __init__(self, at_most: int = POINTS) -> None:
        self.points: list[Point] = []
        self.events: list[dict[str, Any]] = []
        self.strategies: list[str] = []
        self.unit = unit_of({})
        self.imbalance: list[tuple[float, float]] = []
        self.epoch = 0
        self._at_most = at_most
        self._header: Header | None = None
        self._zero: float | None = None

    def take(self, record: Record) -> None:
        """Add a record of the rank whose file the curve is read from. Other kinds of records are ignored."""
        if isinstance(record, Header):
            self._header = record
        elif isinstance(record, StepRecord):
            self._take_step(record)
        elif isinstance(record, EventRecord):
            self._take_event(record)

    def take_failure(self, record: EventRecord) -> None:
        """Add a failure that another rank recorded.

        The rank that fails records most about it; a rank that died records nothing.
        """
        event = {"step": record.step, **record.event}
        if event.get("kind") == "failure" and not any(event.items() <= known.items() for known in self.events):
            self._take_event(EventRecord(record.step, event=record.event))

    def _take_step(self, record: StepRecord) -> None:
        if self.points and record.step <= self.points[-1][0]:
            self._go_back(record.step)
        last = self.points[-1] if self.points else None
        seconds = _number(record.numbers.get("seconds"), record.seconds)
        began = self._since_start(record.start_ns) if record.start_ns else (last[2] if last else 0.0)
        tokens = _number(record.numbers.get("tokens"), _UNKNOWN)
        known = tokens if tokens == tokens else 0.0
        self.unit = unit_of(record.numbers) if tokens == tokens else self.unit
        self.points.append(
            (
                float(record.step),
                float(record.span),
                # A line of the overview has only the beginning; its steps follow each other.
                began + record.span * (record.seconds or seconds),
                (last[3] if last else 0.0) + record.span * known,
                _number(record.numbers.get("loss"), _UNKNOWN),
                tokens / seconds if seconds > 0 else _UNKNOWN,
                float(self._name(str(record.numbers.get("strategy", "")))),
            )
        )
        if len(self.points) > self._at_most:
            self._fold()
        if (uneven := _number(record.numbers.get("imbalance"), 0.0)) > 0:
            self.imbalance.append((float(record.step), uneven))
            if len(self.imbalance) >= 2 * _IMBALANCES:
                pairs = zip(self.imbalance[::2], self.imbalance[1::2], strict=True)
                self.imbalance = [(later, (one + other) / 2) for (_, one), (later, other) in pairs]

    def _take_event(self, record: EventRecord) -> None:
        happened = self._since_start(record.ns) if record.ns else (self.points[-1][2] if self.points else 0.0)
        event = {"step": record.step, "time": round(happened, 6), **record.event}
        self.epoch += _put(self.events, event | mark_of(event))
        if len(self.events) > _EVENTS:
            del self.events[: _EVENTS // 4]
            self.epoch += 1

    def since(self, epoch: int, points: int, events: int) -> Grown:
        """Return the difference for a reader that has this many points and events of that epoch."""
        same = epoch == self.epoch
        keep = min(points, len(self.points)) if same else 0
        kept = min(events, len(self.events)) if same else 0
        return Grown(self.epoch, keep, self.points[keep:], kept, self.events[kept:])

    def _since_start(self, ns: int) -> float:
        unix = self._header.unix(ns) if self._header is not None else ns / 1e9
        if self._zero is None:
            self._zero = unix
        return max(0.0, unix - self._zero)

    def _name(self, strategy: str) -> int:
        if (name := brief(strategy)) not in self.strategies:
            self.strategies.append(name)
        return self.strategies.index(name)

    def _go_back(self, step: int) -> None:
        """Drop the points from a step on. Those steps are made again after a loaded checkpoint or an undone trial."""
        self.points = [point for point in self.points if point[0] < step]
        self.imbalance = [point for point in self.imbalance if point[0] < step]
        self.epoch += 1

    def _fold(self) -> None:
        """Merge neighbours into means, so that every point stands for about as many steps and there is room again."""
        room = self._at_most * 3 // 4
        width = 2 * (self.points[-1][0] - self.points[0][0] + self.points[0][1]) / self._at_most
        fewer = folded(self.points, max(width, 2), _mean)
        while len(fewer) > room and width < self.points[-1][0]:
            width *= 1.5
            fewer = folded(self.points, width, _mean)
        # If strategies change all the time, nothing can be folded, and the oldest points are dropped.
        self.points = fewer[-room:]
        self.epoch += 1


def packed(points: list[Point]) -> bytes:
    """Return rows of COLUMNS as little-endian doubles."""
    return array("d", (value for point in points for value in point)).tobytes()


def folded(points: list[P], width: float, mean: Callable[[P, P], P]) -> list[P]:
    """Return neighbouring points merged into means of at most `width` steps.

    A point has its span second, its strategy last.
    """
    made = points[:1]
    for point in points[1:]:
        last = made[-1]
        # Steps of two strategies are never mixed.
        if last[1] + point[1] <= width and last[-1] == point[-1]:
            made[-1] = mean(last, point)
        else:
            made.append(point)
    return made


def _mean(a: Point, b: Point) -> Point:
    span = a[1] + b[1]

    def mean(i: int) -> float:
        if a[i] != a[i]:
            return b[i]
        return a[i] if b[i] != b[i] else (a[i] * a[1] + b[i] * b[1]) / span

    return b[0], span, b[2], b[3], mean(4), mean(5), b[6]


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


def _put(events: list[dict[str, Any]], event: dict[str, Any]) -> bool:
    """Add an event. Return True if it replaced an earlier entry, so that readers have to begin anew.

    A failure is recorded by the rank where it began, and by the ranks that were released because of it, which know
    less.
    """
    if event["kind"] == "failure":
        for at in range(len(events) - 1, -1, -1):
            other = events[at]
            if other["kind"] == "run_started":
                break
            if other["kind"] == "failure" and other.get("rank") == event.get("rank") and _same_failure(other, event):
                better = bool(event.get("error")) and not other.get("error")
                if better:
                    events[at] = event
                return better
    events.append(event)
    return False


def _same_failure(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if both entries are about one failure.

    Two refused switches are two failures. An entry without an error is another rank's view of the same failure.
    """
    return not one.get("error") or not other.get("error") or one.get("what") == other.get("what")


PARTS = ("compute", "exposed", "waiting", "bubble", "data", "optimizer", "other")
TIMELINE_POINTS = 480
RECENT = 200  # steps that the page can show alone, and that stay what they are

TimelinePoint = list[Any]  # last step, span, seconds, each of PARTS, tokens/s or None, loss or None, strategy
_MEANS = range(2, 5 + len(PARTS))


def point_of(steps: Mapping[int, StepRecord], bars: Sequence[Bar]) -> TimelinePoint:
    """Return the mean over ranks of one step: number, steps it stands for, seconds, parts, numbers, strategy.

    Seconds are those of the clock, as in `usual_bars`: what ranks do between two steps is in "other".
    """
    first, by_clock = steps[min(steps)], clock(steps) or None
    seconds = by_clock or sum(one.seconds for one in steps.values()) / len(steps)
    bars = [adding_up(bar, by_clock) for bar in bars]
    parts = [short(sum(getattr(bar, part) for bar in bars) / len(bars)) if bars else 0.0 for part in PARTS]
    numbers, rate = first.numbers, rate_of(first)
    loss = numbers.get("loss")
    return [
        first.step,
        first.span,
        short(seconds),
        *parts,
        short(rate),
        short(loss) if isinstance(loss, (int, float)) else None,
        str(numbers.get("strategy", "")),
    ]


def rate_of(step: StepRecord) -> float | None:
    """Return tokens per second of a step, by the clock; None if they were not recorded."""
    tokens, wall = step.numbers.get("tokens"), step.numbers.get("seconds") or step.seconds
    return tokens / wall if isinstance(tokens, (int, float)) and isinstance(wall, (int, float)) and wall else None


class RunTimeline:
    """Points in order of their steps. epoch: changes whenever existing points have changed."""

    def __init__(self, points: int = TIMELINE_POINTS) -> None:
        self.points: list[TimelinePoint] = []
        self.epoch = 0
        self._at_most = points
        self._recent = points * RECENT // TIMELINE_POINTS

    def add(self, point: TimelinePoint) -> None:
        """Add a point. If the training went back to an earlier step, drop the points from that step on."""
        if self.points and point[0] <= self.points[-1][0]:
            self.points = [one for one in self.points if one[0] < point[0]]
            self.epoch += 1
        self.points.append(point)
        if len(self.points) > self._at_most:
            self._fold()

    def since(self, epoch: int, count: int) -> tuple[int, list[TimelinePoint]]:
        """Return how many of the reader's `count` points still hold, and the points that follow them."""
        keep = min(count, len(self.points)) if epoch == self.epoch else 0
        return keep, self.points[keep:]

    def _fold(self) -> None:
        """Merge neighbours except the newest into means. Each point then stands for about as many steps."""
        old, new = self.points[: -self._recent], self.points[-self._recent :]
        total = old[-1][0] - old[0][0] + old[0][1]
        width = 3 * total / (self._at_most - self._recent)
        self.points = [*folded(old, max(width, 2), _timeline_mean), *new][-self._at_most :]
        self.epoch += 1


def _timeline_mean(a: TimelinePoint, b: TimelinePoint) -> TimelinePoint:
    span = a[1] + b[1]
    means = []
    for i in _MEANS:
        known = [(one[i], one[1]) for one in (a, b) if one[i] is not None]
        weight = sum(n for _, n in known)
        means.append(short(sum(value * n for value, n in known) / weight) if known else None)
    return [b[0], span, *means, b[-1]]


def short(value: Any) -> Any:
    """Return the value with seven digits. Views show three, and with five here, 0.0899496 s would become 90 ms."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


_STEPS = 64
_DETAILS = 4
_MEMORIES = 64
_LATE_OVER = 50
_LATE_BY = 5  # steps whose medians say who is late: one alone may be late by chance
_PATIENCE = 8  # a step is complete when all ranks have recorded it, or when there are this many newer ones
_MORE_PATIENCE = _STEPS - _PATIENCE  # while the file of a missing rank grows: ranks write at different moments
_GROWS_S = 2.0
_SAMPLES = 240
_LOOK_FOR_RANKS_S = 2.0


class Run:
    """A run directory. `refresh` and `look` read what is new; the other methods only look it up. lock: for both.

    curve: loss and tokens of every step, and the events, from the file of the lowest rank. steps, details, memory,
    health: the newest records of all ranks. newest_only: for pictures of the newest step only. If there are many new
    steps, only the last few are parsed on the other ranks, and `timeline` and `late` stay empty.
    """

    def __init__(self, folder: Path, *, newest_only: bool = False) -> None:
        self.folder, self._newest_only = folder, newest_only
        self.lock = threading.RLock()
        self.curve = Curve()
        self.headers: dict[int, Header] = {}
        self.members: dict[str, tuple[int, ...]] = {}
        self.steps: dict[int, dict[int, StepRecord]] = {}
        self.details: dict[int, dict[int, Detail]] = {}
        self.memory: dict[int, deque[MemoryRecord]] = {}
        self.health: dict[int, HealthRecord] = {}  # of each rank the newest
        self.timeline = RunTimeline()
        self.late: deque[Late | None] = deque(maxlen=_LATE_OVER)
        self._late_under = ""
        self._told: tuple[str, tuple[int, ...], int] | None = None
        self._newest_late: Late | None = None
        self.files: dict[int, Path] = {}
        self.first = -1  # the rank that the curve is read from
        self._cursors: dict[int, tuple[int, int]] = {}
        self._last: dict[int, int] = {}
        self._size = -1  # of that rank's file
        self.newest = 0  # step that all ranks have recorded
        self._looked = 0.0

    @property
    def world_size(self) -> int:
        """Return the current number of ranks of the job. The records of ranks that have left are kept."""
        if (first := self.headers.get(self.first)) is not None:
            return first.world_size
        known = max((header.world_size for header in self.headers.values()), default=0)
        return max(known, 1 + max(self.files, default=-1))

    def look(self) -> bool:
        """Read what is new in the file of the lowest rank only. Return True if anything is."""
        with self.lock:
            if not self.files:
                self._find_ranks()
            try:
                size = self.files[self.first].stat().st_size
            except (KeyError, FileNotFoundError):
                return False  # there is no record yet, or a new part is being begun
            if size == self._size:
                return False
            self._size = size
            return self._read(self.first)

    def refresh(self) -> None:
        """Read what is new in the files of all ranks."""
        with self.lock:
            self._find_ranks()
            self.look()
            for rank in self.files:
                if rank != self.first:
                    self._read(rank)
            self._close_steps()

    def picture_of(self, step: int) -> dict[int, StepRecord]:
        """Return rank -> its record of a step: from memory, from the files, or the overview's mean around it."""
        found = dict(self.steps.get(step, {}))
        for rank in self.files.keys() - found.keys():
            if (record := record_file.step_at(self.files[rank], step)) is not None:
                found[rank] = record
        # Means of different spans do not belong beside each other.
        span = max((record.span for record in found.values()), default=1)
        return {rank: record for rank, record in sorted(found.items()) if record.span == span}

    def detail_of(self, rank: int, step: int) -> Detail | None:
        """Return a rank's detailed record of the step nearest to `step`, of those that were kept."""
        if rank in self.details.get(step, {}):
            return self.details[step][rank]
        kept = [those[rank] for number, those in self.details.items() if rank in those and number <= step]
        newest_kept = max(self.details, default=0)
        if kept and step >= newest_kept:
            return max(kept, key=lambda one: one.step)
        return record_file.detail_near(self.files[rank], step) if rank in self.files else None

    def usual_detail(self, step: int) -> int:
        """Return the step, of those kept in detail since the last switch, whose time is nearest to the recent median.

        Only steps up to `step` count. Return `step` if there is none. A single step may be long by chance.
        """
        here = [one for one in sorted(self.steps) if one <= step][-MEDIAN_OF:]
        seconds = [self.steps[one][self.first].seconds for one in here if self.first in self.steps[one]]
        changed = (one["step"] for one in self.curve.events if one["kind"] in ("switch", "resized"))
        since = max((one for one in changed if one < step), default=0)
        spans = {
            number: those[self.first].span
            for number, those in self.details.items()
            if since < number <= step and self.first in those
        }
        if not spans or not seconds:
            return step
        usual = median(seconds)
        return min(sorted(spans, reverse=True), key=lambda number: abs(spans[number] - usual))

    def details_near(self, ranks: Iterable[int], step: int) -> dict[int, Detail]:
        """Return `detail_of` for each of these ranks that has one."""
        return {rank: one for rank in ranks if (one := self.detail_of(rank, step)) is not None}

    def memory_of(self, rank: int, step: int) -> MemoryRecord | None:
        """Return the memory of a rank as it was last measured up to `step`, or first after it."""
        those = self.memory.get(rank)
        if not those:
            return None
        return next((one for one in reversed(those) if one.step <= step), those[0])

    def near(self, step: int, of: int = MEDIAN_OF) -> list[dict[int, StepRecord]]:
        """Return up to `of` steps ending at `step`, the oldest first, whose medians describe it; see `usual_steps`.

        Only steps in memory count. They have the same strategy and ranks as `step`.
        """
        if step not in self.steps:
            return []
        here = self.steps[step]
        numbers = usual_steps(step, self.since(step))
        those = [self.steps[one] for one in numbers if one in self.steps]
        return [one for one in those if one.keys() >= here.keys()][-of:]

    def since(self, step: int) -> int:
        """Return the first step under the strategy of `step`, as far as steps are in memory."""
        first, strategy = step, strategy_of(self.steps[step])
        while first - 1 in self.steps and strategy_of(self.steps[first - 1]) == strategy:
            first -= 1
        return first

    def _read(self, rank: int) -> bool:
        """Read the new records of a rank. Return True if there are any."""
        few = self._newest_only and rank != self.first
        path, cursor = self.files[rank], self._cursors[rank]
        records, self._cursors[rank] = read_since(path, cursor, steps=MEDIAN_OF + STANDS if few else None)
        self._take_all(rank, records)
        return bool(records)

    def _take_all(self, rank: int, records: Sequence[Record]) -> None:
        old = 0  # how many of the steps are for the curve only
        if rank == self.first:
            for record in records:
                self.curve.take(record)
            if self._newest_only:
                old = sum(isinstance(record, StepRecord) for record in records) - MEDIAN_OF - STANDS
                _drop_oldest(self.steps, _STEPS)
        for record in records:
            if isinstance(record, StepRecord) and old > 0:
                old -= 1
            else:
                self._take(rank, record)

    def _find_ranks(self) -> None:
        if self.files and time.monotonic() - self._looked < _LOOK_FOR_RANKS_S:
            return
        self._looked = time.monotonic()
        new = {rank: path for rank, path in rank_files(self.folder).items() if rank not in self.files}
        if not new:
            return
        opened = not self.files
        self.files = dict(sorted({**self.files, **new}.items()))
        if opened:
            self.first = min(self.files)
        for rank, path in new.items():
            self._cursors[rank] = cursor_near_end(path)
            self._take_all(rank, read_head(path))
            if self._cursors[rank] != START:  # groups that were made since the part began lie before it
                self._take_all(rank, record_file.groups_of(path))
        if opened:
            self._read_history()

    def _read_history(self) -> None:
        """Read the overview, the events and the memory records that lie before the cursors."""
        if all(cursor == START for cursor in self._cursors.values()):
            return
        past: dict[int, dict[int, StepRecord]] = {}
        for rank, path in self.files.items():
            for record in read_overview(path, about=_SAMPLES):
                past.setdefault(record.step, {})[rank] = record
            if (memory := record_file.newest_memory(path)) is not None:
                self._take(rank, memory)
        for step, steps in sorted(past.items()):
            if not self._newest_only:
                point = point_of(steps, bars(steps, self.members))
                point[1] = step - self.newest  # it stands for those that were passed over too
                self.timeline.add(point)
            self.newest = step
        if self._cursors[self.first] != START:
            self._read_curve(self.files[self.first])

    def _read_curve(self, path: Path) -> None:
        """Feed the curve with the overview and old events up to the cursor, then with the records from there."""
        recent, self._cursors[self.first] = read_since(path, self._cursors[self.first])
        overview = read_overview(path)
        end = max((one.step for one in overview), default=0) + 1
        end = next((one.step for one in recent if isinstance(one, StepRecord)), end)
        past: list[StepRecord | EventRecord] = [*overview, *record_file.events_of(path)]
        for record in past:
            if record.step < end and not (isinstance(record, EventRecord) and record in recent):
                self.curve.take(record)
        self._take_all(self.first, recent)

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
        elif isinstance(record, EventRecord) and rank != self.first:
            self.curve.take_failure(record)

    def _take_step(self, rank: int, record: StepRecord) -> None:
        if record.step <= self._last.get(rank, 0):  # a checkpoint was loaded, and the job makes these steps again
            self.newest = min(self.newest, record.step - 1)
            for step in [step for step in self.steps if step > record.step]:
                self.steps[step].pop(rank, None)
                if not self.steps[step]:
                    del self.steps[step]
        self._last[rank] = record.step
        self.steps.setdefault(record.step, {})[rank] = record

    def _close_steps(self) -> None:
        reached = max(self._last.values(), default=0)
        growing = {rank for rank, path in self.files.items() if time.time() - record_file.changed(path) < _GROWS_S}
        for step in sorted(step for step in self.steps if step > self.newest):
            here = self.steps[step]
            if len(here) < min(len(self.files), self.world_size):
                later = any(rank not in here and self._last.get(rank, 0) < step for rank in growing)
                if step + (_MORE_PATIENCE if later else _PATIENCE) > reached:
                    break
            self.newest = step
            if not self._newest_only:
                self._note_late(step)
                self.timeline.add(point_of(here, bars(here, self.members)))
        _drop_oldest(self.steps, _STEPS)

    def _note_late(self, step: int) -> None:
        """Record which rank is late in this step.

        After a change of strategy, earlier records are dropped, because the ranks then do different work.
        """
        strategy, few = strategy_of(self.steps[step]), self.near(step, _LATE_BY)
        if strategy != self._late_under:
            self.late.clear()
            self._late_under = strategy
        # Several steps share the same steps for their medians.
        told = strategy, tuple(one[min(one)].step for one in few), len(few[-1]) if few else 0
        if told != self._told:
            self._told, self._newest_late = told, late_rank(usual_bars(few, self.members))
        self.late.append(self._newest_late)


def strategy_of(steps: Mapping[int, StepRecord]) -> str:
    """Return the strategy that a step was made under; "" if it is not recorded."""
    return str(steps[min(steps)].numbers.get("strategy") or "") if steps else ""


def _drop_oldest(of: dict[int, Any], at_most: int) -> None:
    while len(of) > at_most:
        del of[min(of)]
