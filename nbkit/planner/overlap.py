"""How long a rank waits for its data axis: what backward, and under zero 3 forward, does not hide.

One link carries one operation at a time, in the order in which they are begun:

    zero 0, 1, 2  a bucket of gradients leaves when backward has made the last of them; under zero 1 and 2 two are under
                  way at most, and updated parameters are gathered behind the step, where nothing hides them
    zero 3        the next unit is gathered while one computes, and gradients of a unit leave behind its backward

A pipeline sends all of it behind its last backward, and has no need of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nbkit.levers import buckets
from nbkit.strategy import Strategy

Took = Callable[[str, float], float]
"""(operation, bytes of the whole tensor) -> seconds over the data axis; an all-reduce of zero=0 is "all_reduce"."""

FORWARD = 1 / 3
"""The share of a forward in what computing takes: a backward multiplies twice as much."""


@dataclass(frozen=True)
class Unit:
    """A piece of the model. share: of the computing. sizes: bytes of each of its parameters, in the order of use.

    outside: bytes of those that are in no block, which zero 3 gathers first and lets go last.
    """

    share: float
    sizes: tuple[int, ...]
    outside: int = 0


def waits(strategy: Strategy, units: Sequence[Unit], computing: float, took: Took, *, passes: int = 1) -> float:
    """Seconds of a step without a pipeline that are longer than its `computing`. passes: forwards of a step."""
    if strategy.zero == 3:
        return passes * _zero3(units, computing / passes, took)
    backward = (1 - FORWARD) * computing / passes
    wire, now, under_way = _Wire(), 0.0, list[float]()
    left = [(size, i) for i in reversed(range(len(units))) for size in reversed(units[i].sizes)]
    op = "reduce_scatter" if strategy.zero else "all_reduce"
    at, done = 0, len(units)
    cut = list(buckets([size for size, _ in left], strategy.levers.bucket))
    for bucket in cut:
        at += len(bucket)
        piece = left[at - 1][1]
        while done > piece:
            done -= 1
            now += units[done].share * backward
        if strategy.zero and len(under_way) > 1:
            now = max(now, under_way.pop(0))
        under_way.append(wire.send(now, took(op, sum(bucket))))
    now += sum(unit.share for unit in units[:done]) * backward
    after = sum(took("all_gather", sum(bucket)) for bucket in cut) if strategy.zero else 0.0
    return max(now, wire.free) - backward + after


@dataclass
class _Wire:
    """free: when it has carried everything that was handed to it."""

    free: float = field(default=0.0)

    def send(self, begun: float, seconds: float) -> float:
        self.free = max(self.free, begun) + seconds
        return self.free


def _zero3(units: Sequence[Unit], computing: float, took: Took) -> float:
    forward, backward = FORWARD * computing, (1 - FORWARD) * computing
    inside = [sum(unit.sizes) - unit.outside for unit in units]
    root = sum(unit.outside for unit in units)
    wire = _Wire()

    def gather(i: int, begun: float) -> float:
        return wire.send(begun, took("all_gather", inside[i])) if inside[i] else begun

    now = wire.send(0.0, took("all_gather", root)) if root else 0.0
    arrived = gather(0, now)
    for i, unit in enumerate(units):
        now = max(now, arrived)
        if i + 1 < len(units):
            arrived = gather(i + 1, now)
        now += unit.share * forward
    arrived, under_way = gather(len(units) - 1, now), list[float]()
    for i in reversed(range(len(units))):
        now = max(now, arrived)
        if i:
            arrived = gather(i - 1, now)
        now += units[i].share * backward
        for size in (inside[i], root if i == 0 else 0):
            if size:
                if len(under_way) > 1:
                    now = max(now, under_way.pop(0))
                under_way.append(wire.send(now, took("reduce_scatter", size)))
    return max(now, wire.free) - computing
