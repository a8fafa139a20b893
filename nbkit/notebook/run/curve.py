"""The loss of a run from its first step to its newest in a bounded number of points, and its events. Reads no file."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nbkit.figures import unit_of
from nbkit.records.records import EventRecord, Header, Record, StepRecord

COLUMNS = ("step", "span", "time", "tokens", "loss", "rate", "strategy")
POINTS = 4000
_EVENTS = 1000

Point = tuple[float, ...]  # of COLUMNS; strategy: which of Curve.strategies. NaN: not known
_UNKNOWN = float("nan")

P = TypeVar("P", bound=Sequence[Any])


@dataclass(frozen=True)
class Grown:
    """What a reader lacks: how many of its points still hold, and the points that follow; the same for events."""

    epoch: int
    keep: int
    points: list[Point]
    events_keep: int
    events: list[dict[str, Any]]


class Curve:
    """Points in order of their steps; time in seconds since the run began, tokens since then too.

    unit: what is counted as tokens, "tokens" or "rows".
    epoch: changes whenever points that were there have changed: then a reader begins anew.
    """

    def __init__(self, at_most: int = POINTS) -> None:
        self.points: list[Point] = []
        self.events: list[dict[str, Any]] = []
        self.strategies: list[str] = []
        self.unit = unit_of({})
        self.epoch = 0
        self._at_most = at_most
        self._header: Header | None = None
        self._zero: float | None = None

    def take(self, record: Record) -> None:
        """Add a record of the rank whose file the curve is read from; other kinds of records are ignored."""
        if isinstance(record, Header):
            self._header = record
        elif isinstance(record, StepRecord):
            self._take_step(record)
        elif isinstance(record, EventRecord):
            self._take_event(record)

    def take_failure(self, record: EventRecord) -> None:
        """Add a failure that another rank recorded: the rank that fails says most of it, and one that died nothing."""
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

    def _take_event(self, record: EventRecord) -> None:
        happened = self._since_start(record.ns) if record.ns else (self.points[-1][2] if self.points else 0.0)
        self.epoch += _put(self.events, {"step": record.step, "time": round(happened, 6), **record.event})
        if len(self.events) > _EVENTS:
            del self.events[: _EVENTS // 4]
            self.epoch += 1

    def since(self, epoch: int, points: int, events: int) -> Grown:
        """The difference for a reader that has so many points and events of that epoch."""
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
        if strategy not in self.strategies:
            self.strategies.append(strategy)
        return self.strategies.index(strategy)

    def _go_back(self, step: int) -> None:
        """A checkpoint was loaded, or a trial undone: what came after it is made again."""
        self.points = [point for point in self.points if point[0] < step]
        self.epoch += 1

    def _fold(self) -> None:
        """Neighbours become means, so that every point stands for about as many steps, and there is room again."""
        room = self._at_most * 3 // 4
        width = 2 * (self.points[-1][0] - self.points[0][0] + self.points[0][1]) / self._at_most
        fewer = folded(self.points, max(width, 2), _mean)
        while len(fewer) > room and width < self.points[-1][0]:
            width *= 1.5
            fewer = folded(self.points, width, _mean)
        # Where strategies change all the time nothing can be folded: then the oldest go.
        self.points = fewer[-room:]
        self.epoch += 1


def packed(points: list[Point]) -> bytes:
    """Rows of COLUMNS as little-endian doubles."""
    return array("d", (value for point in points for value in point)).tobytes()


def folded(points: list[P], width: float, mean: Callable[[P, P], P]) -> list[P]:
    """Neighbouring points as means of at most `width` steps. A point: its span comes second, its strategy last."""
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
    """Add an event; whether it replaced an earlier entry, so that readers have to begin anew.

    A failure is recorded by the rank where it began, and by those that were released because of it, who know less.
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
    """Two refused switches are two failures; one without an error is the other rank's view of the same failure."""
    return not one.get("error") or not other.get("error") or one.get("what") == other.get("what")
