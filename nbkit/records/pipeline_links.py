"""The delay of each link between two ranks of a pipeline, from one detailed step of all its ranks.

A message is on its way from when it has been sent, and its receiver stands still for it from when it has begun to wait:
the later of the two until it is there is transfer that hides behind nothing. What the receiver waited before was
idleness in the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nbkit.records.records import Detail, TimedCall

_TIMES_THE_REST = 3.0


@dataclass(frozen=True)
class Link:
    """Messages of one step from one rank to another. seconds: that the receiver stood still for transfers."""

    source: int
    target: int
    messages: int
    bytes: int
    seconds: float


def links(details: Mapping[int, Detail], offsets: Mapping[int, int] | None = None) -> list[Link]:
    """Each direction of each pair of ranks between which messages went, the longest stood for first.

    offsets: ns to add to a rank's times to get rank 0's (Header.offset_ns); default: all share a clock.
    Messages of which one end is not in the records, or for which nobody waited, are left out.
    """
    shift = offsets or {}
    sent = {(rank, *key): call for rank, one in details.items() for key, call in _messages(one.calls, "send")}
    sums: dict[tuple[int, int], list[float]] = {}
    for target, one in details.items():
        for (source, group, place), arrived in _messages(one.calls, "recv"):
            issued = sent.get((source, target, group, place))
            if issued is None or arrived.waited is None:
                continue
            # Where nobody knows when it was there, it was when the wait was over, or before.
            done = arrived.done if arrived.done is not None else arrived.waited + arrived.blocked
            left = issued.issued + shift.get(source, 0)
            here = shift.get(target, 0)
            stood = min(done + here - max(left, arrived.waited + here), arrived.blocked)
            into = sums.setdefault((source, target), [0, 0, 0.0])
            into[0] += 1
            into[1] += arrived.bytes
            into[2] += max(stood, 0) / 1e9
    made = [Link(a, b, int(count), int(size), seconds) for (a, b), (count, size, seconds) in sums.items()]
    return sorted(made, key=lambda link: -link.seconds)


def slow_link(of: Iterable[Link], step: float, *, at_least: float = 0.05) -> Link | None:
    """The link that takes `at_least` of a step of `step` seconds, and several times what the next one takes.

    The next one is between two other ranks, since what slows a link mostly slows both of its directions. Where there
    are only two ranks it is the other direction.
    """
    every = sorted(of, key=lambda link: -link.seconds)
    # One that takes longer than the step has its moments from another step, which was slower.
    if not every or not at_least * step < every[0].seconds < step:
        return None
    ends = {every[0].source, every[0].target}
    others = [link for link in every[1:] if {link.source, link.target} != ends] or every[1:]
    usual = others[0].seconds if others else 0.0
    return every[0] if every[0].seconds >= _TIMES_THE_REST * usual else None


def _messages(calls: Iterable[TimedCall], op: str) -> Iterable[tuple[tuple[int, str, int], TimedCall]]:
    """((rank at the other end, group, number in the pair), call) of each message."""
    for call in calls:
        if call.op == op and call.peer is not None and call.peer >= 0:
            yield (call.peer, call.group, call.place), call
