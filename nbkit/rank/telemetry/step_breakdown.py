"""From what one step left behind to its records: where its time went, and what went over which axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nbkit.rank.telemetry.collectives import Call
from nbkit.rank.telemetry.phases import OTHER, OUTSIDE, Step
from nbkit.records.records import TimedCall, Traffic

PARTS = ("compute", "exposed", "bubble", "data", "optimizer", OTHER)
_COMPUTE = ("forward", "backward")


def part_of(state: str) -> str:
    """The part of the step that a state of the training thread belongs to; a word of the user's is "other"."""
    if state in _COMPUTE:
        return "compute"
    if state.startswith("wait "):
        return "exposed"
    return state if state in PARTS else OTHER


def parts_of(intervals: Iterable[tuple[str, int, int]]) -> dict[str, float]:
    """Seconds of each part, from (state, start, stop) in ns; what lies outside the step is left out."""
    sums = dict.fromkeys(PARTS, 0)
    for state, start, stop in intervals:
        if state != OUTSIDE:
            sums[part_of(state)] += stop - start
    return {part: ns / 1e9 for part, ns in sums.items()}


def seconds_of(step: Step) -> tuple[float, dict[str, float], list[tuple[str, int, int]]]:
    """(seconds that a step took, its parts, its intervals). Parts are empty where some of it was not marked."""
    intervals = step.intervals()
    parts = parts_of(intervals)
    return sum(parts.values()), parts if step.complete else {}, intervals


def traffic_of(calls: Iterable[Call]) -> tuple[Traffic, ...]:
    """What these calls come to, by operation, group and peer. Where some were not listened to, none counts as timed:
    the rest, those that were waited for at once, are not like them."""
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


def timed_calls(calls: Sequence[Call]) -> tuple[TimedCall, ...]:
    """The calls one by one, as they are written for a step whose every moment is kept."""
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
