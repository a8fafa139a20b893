"""How long a rank without a pipeline takes from its first forward to its last gradient, over a link that is shared.

The link of a rank carries one operation at a time, in the order in which they are begun, and the next one follows
before the first has arrived where latency allows it:

    zero 0, 1, 2  a bucket of gradients leaves when backward has made the last of them; under zero 1 and 2 two are under
                  way at most; so are all-gathers of updated parameters, behind the next forward (in `fit` without
                  callbacks; else behind the step, where nothing hides them)
    compress      of a bucket, the sums leave when the next bucket does, and are waited for behind backward
    zero 3        the next unit is gathered while one computes, and gradients of a unit leave behind its backward
    tp, cp        between the maps of a unit, and waited for; on the link of the data axis, behind what is on it

A pipeline sends all of its data axis behind its last backward, and has no need of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nbkit.levers import buckets
from nbkit.strategy import Strategy

FORWARD = 1 / 3
"""The share of a forward in what computing takes: a backward multiplies twice as much."""


@dataclass(frozen=True)
class Message:
    """Seconds of an operation: in which it holds the link, and from then on until it has arrived."""

    holds: float
    late: float = 0.0

    @property
    def total(self) -> float:
        """From its beginning to its arrival, where the link is free."""
        return self.holds + self.late

    def __add__(self, other: Message) -> Message:
        return Message(self.holds + other.holds, self.late + other.late)


Took = Callable[[str, float], Message]
"""(operation, bytes of the whole tensor) -> what it takes over the data axis."""


@dataclass(frozen=True)
class Unit:
    """A piece of the model. share: of the computing. sizes: bytes of each of its parameters, in the order of use.

    outside: bytes of those that are in no block, which zero 3 gathers first and lets go last. gathered: of the bytes of
    the others, the share that zero 3 gathers, where they are cast before.
    """

    share: float
    sizes: tuple[int, ...]
    outside: int = 0
    gathered: float = 1.0

    @property
    def inside(self) -> int:
        """Bytes of those that are in a block."""
        return sum(self.sizes) - self.outside


@dataclass(frozen=True)
class Within:
    """What tp and cp send between the maps of a unit. calls: in a forward of one, and again in its backward.

    shared: over the link of the data axis.
    """

    calls: int = 0
    each: Message = Message(0.0)
    shared: bool = False


def elapsed(
    strategy: Strategy,
    units: Sequence[Unit],
    computing: float,
    took: Took,
    *,
    passes: int = 1,
    forward: float = FORWARD,
    within: Within | None = None,
) -> float:
    """Seconds of a step but for its update. computing: of these. passes: forwards of a step. forward: share of one."""
    run = _Run(units, forward * computing / passes, (1 - forward) * computing / passes, took, within or Within())
    if strategy.zero == 3:
        return passes * run.zero3()
    alone = computing / passes + 2 * len(units) * run.within.calls * run.within.each.total
    return (passes - 1) * alone + run.replicated(strategy)


class _Wire:
    """free: when it could take the next operation."""

    def __init__(self) -> None:
        self.free = 0.0

    def send(self, begun: float, message: Message) -> float:
        """When it has arrived."""
        self.free = max(self.free, begun) + message.holds
        return self.free + message.late


@dataclass(frozen=True)
class _Run:
    """A forward and a backward, in seconds."""

    units: Sequence[Unit]
    forward: float
    backward: float
    took: Took
    within: Within

    def replicated(self, strategy: Strategy) -> float:
        """zero 0, 1 and 2, of the last pass."""
        wire, zero, levers, cut = _Wire(), strategy.zero, strategy.levers, list(self._buckets(strategy))
        now = self._forward(wire, cut[::-1] if zero else [])
        done, arrived = len(self.units), list[float]()
        crossing: Message | None = None
        for size, piece in cut:
            while done > piece:
                done -= 1
                now = self._compute(now, self.units[done].share * self.backward, wire)
            if levers.compress:
                if crossing is not None:
                    now = max(now, arrived.pop())
                    arrived.append(wire.send(now, crossing))
                arrived.append(wire.send(now, self.took("all_to_all", levers.share * size)))
                crossing = self.took("all_gather", levers.share * size)
                continue
            if zero and len(arrived) > 1:
                now = max(now, arrived.pop(0))
            arrived.append(wire.send(now, self.took("reduce_scatter" if zero else "all_reduce", size)))
        for unit in reversed(self.units[:done]):
            now = self._compute(now, unit.share * self.backward, wire)
        if crossing is not None:
            now = max(now, arrived.pop())
            arrived.append(wire.send(now, crossing))
        return max([now, *arrived])

    def _forward(self, wire: _Wire, updated: Sequence[tuple[int, int]]) -> float:
        """When forward is through. updated: (bytes, the first unit that reads it) of what is gathered meanwhile."""
        now, coming = 0.0, [wire.send(0.0, self.took("all_gather", size)) for size, _ in updated[:2]]
        come = 0
        for i, unit in enumerate(self.units):
            while come < len(updated) and updated[come][1] <= i:
                now, come = max(now, coming[come]), come + 1
                coming += [wire.send(now, self.took("all_gather", size)) for size, _ in updated[come + 1 : come + 2]]
            now = self._compute(now, unit.share * self.forward, wire)
        return now

    def _buckets(self, strategy: Strategy) -> Iterator[tuple[int, int]]:
        """(bytes, the unit whose backward completes it) of each bucket of gradients, in their order."""
        left = [(size, i) for i in reversed(range(len(self.units))) for size in reversed(self.units[i].sizes)]
        at = 0
        for bucket in buckets([size for size, _ in left], strategy.levers.bucket):
            at += len(bucket)
            yield sum(bucket), left[at - 1][1]

    def zero3(self) -> float:
        """One pass."""
        units, wire = self.units, _Wire()
        root = sum(unit.outside for unit in units)

        def gather(i: int, begun: float) -> float:
            size = units[i].inside * units[i].gathered
            return wire.send(begun, self.took("all_gather", size)) if size else begun

        now = wire.send(0.0, self.took("all_gather", root)) if root else 0.0
        arrived = gather(0, now)
        for i, unit in enumerate(units):
            now = max(now, arrived)
            if i + 1 < len(units):
                arrived = gather(i + 1, now)
            now = self._compute(now, unit.share * self.forward, wire)
        arrived, under_way = gather(len(units) - 1, now), list[float]()
        for i in reversed(range(len(units))):
            now = max(now, arrived)
            if i:
                arrived = gather(i - 1, now)
            now = self._compute(now, units[i].share * self.backward, wire)
            for size in (units[i].inside, root if i == 0 else 0):
                if size:
                    if len(under_way) > 1:
                        now = max(now, under_way.pop(0))
                    under_way.append(wire.send(now, self.took("reduce_scatter", size)))
        return max([now, *under_way])

    def _compute(self, now: float, seconds: float, wire: _Wire) -> float:
        """When a unit is through, with what is sent between its maps."""
        calls, each = self.within.calls, self.within.each
        if not calls or not self.within.shared:
            return now + seconds + calls * each.total
        for _ in range(calls):
            now = wire.send(now + seconds / calls, each)
        return now
