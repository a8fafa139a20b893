"""The work of a step from what was measured of another one: parts of the present step, scaled by what they follow from.

compute     the work of a rank: rows, positions, features and blocks divided over the axes, by the speeds of the ranks
exposed     the traffic over the measured link; the data axis scaled by what hides it now, beside what is told of it
optimizer   the elements that a rank updates
data        the rows that a rank reads
other       as it is

Before the first step the blocks' own seconds stand for the present one: those of one process.

How long a rank without a pipeline takes from its first forward to its last gradient, over a link that is shared.

The link of a rank carries one operation at a time, in the order in which they are begun, and the next one follows
before the first has arrived where latency allows it:

    zero 0, 1, 2  a bucket of gradients leaves when backward has made the last of them; under zero 1 and 2 two are under
                  way at most; so are all-gathers of updated parameters, behind the next forward (in `fit` without
                  callbacks; else behind the step, where nothing hides them)
    compress      of a bucket, the sums leave when the next bucket does, and are waited for behind backward
    zero 3        the next unit is gathered while one computes, and gradients of a unit leave behind its backward
    tp, cp        between the maps of a unit, and waited for; on the link of the data axis, behind what is on it

A pipeline sends all of its data axis behind its last backward, and has no need of this.

The seconds of a step: the one sum of all who predict any, whatever they know a rank's work and its links from.

compute     what the slowest rank computes, forward, backward and what is computed again
exposed     what it waits for: what tp and cp send, messages of a pipeline, and of the data axis what nothing hides,
            which is simulated  (`simulated`)
bubble      what a pipeline's schedule, simulated with its own stages (planner/stages.py), leaves idle
optimizer, other    as they are given

A rank's work comes from what was measured, or in nbkit/planner/choose/load.py from data sheets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from nbkit.levers import buckets
from nbkit.node_levels import BETWEEN
from nbkit.planner.link_speed import OperationSpeed, WorldLinks
from nbkit.planner.stages import makespan, ranks_of_stages, stage_ranges
from nbkit.planner.traffic import TrafficTerm
from nbkit.strategy import Strategy

FORWARD = 1 / 3
"""The share of a forward in what computing takes: a backward multiplies twice as much."""


@dataclass(frozen=True)
class MessageTime:
    """Seconds of an operation: in which it holds the link, and from then on until it has arrived."""

    holds: float
    late: float = 0.0

    @property
    def total(self) -> float:
        """From its beginning to its arrival, where the link is free."""
        return self.holds + self.late

    def __add__(self, other: MessageTime) -> MessageTime:
        return MessageTime(self.holds + other.holds, self.late + other.late)


Took = Callable[[str, float], MessageTime]
"""(operation, bytes of the whole tensor) -> what it takes over the data axis."""


@dataclass(frozen=True)
class StepUnit:
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
    each: MessageTime = MessageTime(0.0)
    shared: bool = False


def elapsed(
    strategy: Strategy,
    units: Sequence[StepUnit],
    computing: float,
    took: Took,
    *,
    passes: int = 1,
    forward: float = FORWARD,
    within: Within | None = None,
) -> float:
    """Return seconds of a step but for its update. computing: of these. passes: forwards of a step. forward: share of
    one."""
    run = _Run(units, forward * computing / passes, (1 - forward) * computing / passes, took, within or Within())
    if strategy.zero == 3:
        return passes * run.zero3()
    alone = computing / passes + 2 * len(units) * run.within.calls * run.within.each.total
    return (passes - 1) * alone + run.replicated(strategy)


class _Wire:
    """free: when it could take the next operation."""

    def __init__(self) -> None:
        self.free = 0.0

    def send(self, begun: float, message: MessageTime) -> float:
        """Return when it has arrived."""
        self.free = max(self.free, begun) + message.holds
        return self.free + message.late


@dataclass(frozen=True)
class _Run:
    """A forward and a backward, in seconds."""

    units: Sequence[StepUnit]
    forward: float
    backward: float
    took: Took
    within: Within

    def replicated(self, strategy: Strategy) -> float:
        """zero 0, 1 and 2, of the last pass."""
        wire, zero, levers, cut = _Wire(), strategy.zero, strategy.levers, list(self._buckets(strategy))
        now = self._forward(wire, cut[::-1] if zero else [])
        done, arrived = len(self.units), list[float]()
        crossing: MessageTime | None = None
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
        """Return when forward is through. updated: (bytes, the first unit that reads it) of what is gathered
        meanwhile."""
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
        """Return one pass."""
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


DATA = ("dp", "shard", "replicate")
"""The data axis, and its halves."""


@dataclass(frozen=True)
class Parts:
    """Seconds of a step by part."""

    compute: float
    exposed: float
    bubble: float
    optimizer: float
    other: float = 0.0

    @property
    def total(self) -> float:
        """Their sum."""
        return self.compute + self.exposed + self.bubble + self.optimizer + self.other


@dataclass(frozen=True)
class Work:
    """What a step gives the ranks to do.

    stages: of each replica, seconds of computing of each stage of its pipeline (of one without a pipeline), for all its
    rows. forward: the share of that before backward. terms: what the busiest rank sends. units: the model as a rank
    without a pipeline computes with it; without them nothing hides the data axis. passes: forwards of a step without a
    pipeline. optimizer, other: seconds. waiting: of what the data axis is waited for, the share that counts.
    """

    stages: Sequence[Sequence[float]]
    terms: Sequence[TrafficTerm]
    units: Sequence[StepUnit] = ()
    passes: int = 1
    forward: float = FORWARD
    optimizer: float = 0.0
    other: float = 0.0
    waiting: float = 1.0


@dataclass(frozen=True)
class OperationPath:
    """The way that an operation takes. wire: equal for those that hold the same link."""

    way: OperationSpeed
    wire: int = 0

    def message(self, term: TrafficTerm, size: float | None = None) -> MessageTime:
        """One call of `term`, of `size` bytes in place of its own part."""
        share = 1 / term.calls if size is None else size / term.bytes if term.bytes else 0.0
        holds = self.way.holds(term.wire * share)
        return MessageTime(holds, max(self.way.seconds(1, term.wire * share) - holds, 0.0))

    def seconds(self, term: TrafficTerm) -> float:
        """Of all its calls, each of which is waited for."""
        return self.way.seconds(term.calls, term.wire)


Lines = Callable[[TrafficTerm], OperationPath]
"""Of a term, the line that it takes."""


def step_parts(work: Work, strategy: Strategy, lines: Lines) -> Parts:
    """Of a step under `strategy`."""
    inner = [term for term in work.terms if term.axis not in (*DATA, "pp")]
    within = sum(lines(term).seconds(term) for term in inner)
    if strategy.pp == 1:
        compute, bubble = max(sum(stages) for stages in work.stages), 0.0
        exposed = within + work.waiting * _data(work, strategy, lines, compute, inner, within)
    else:
        compute, bubble, exposed = _pipeline(work, strategy, lines, within)
        exposed += work.waiting * _data(work, strategy, lines, compute, inner, within)
        exposed += sum(lines(term).seconds(term) for term in work.terms if term.axis == "pp" and term.op != "send")
    return Parts(compute, exposed, bubble, work.optimizer, work.other)


def _pipeline(work: Work, strategy: Strategy, lines: Lines, within: float) -> tuple[float, float, float]:
    """(compute, bubble, exposed) of the slowest replica, from its first forward until its ranks have met."""
    sends = [term for term in work.terms if term.axis == "pp" and term.op == "send" and term.calls]
    transfer = max((lines(term).message(term).total for term in sends), default=0.0)
    met = max((lines(term).way.latency for term in sends), default=0.0) * (strategy.pp - 1).bit_length()
    # Whatever is hidden, all of it has to leave the rank.
    leaving = sum(term.calls * lines(term).message(term).holds for term in sends)
    micros = strategy.microbatches or 1
    found = (0.0, 0.0, 0.0)
    for stages in work.stages:
        rounds = len(stages) // strategy.pp
        inner = tuple(stage + within / rounds for stage in stages)
        alone, sent = (
            makespan(strategy.schedule, micros, inner, each, ranks=strategy.pp, forward=work.forward)
            for each in (0.0, transfer)
        )
        most = _longest(inner, strategy)
        own = most - within
        found = max(found, (own, alone - most, max(sent, leaving) - alone + within + met), key=sum)
    return found


def _longest(stages: Sequence[float], strategy: Strategy) -> float:
    """Seconds of the rank that computes longest, of all its stages."""
    homes = ranks_of_stages(strategy)
    if len(homes) != len(stages):  # more rounds than nbkit's own schedules have
        homes = tuple(i % strategy.pp for i in range(len(stages)))
    sums = [0.0] * strategy.pp
    for home, stage in zip(homes, stages, strict=True):
        sums[home] += stage
    return max(sums)


def _data(
    work: Work, strategy: Strategy, lines: Lines, compute: float, inner: Sequence[TrafficTerm], within: float
) -> float:
    """Seconds that a rank waits for its data axis."""
    terms = [term for term in work.terms if term.axis in DATA]
    if not terms or not work.units or strategy.pp > 1 or strategy.levers.sync_every > 1:
        return sum(lines(term).seconds(term) for term in terms)
    # What is all-reduced, in one level or two: all of it, or of what is sharded a rank's part.
    whole = [term for term in terms if term.axis == strategy.summed_axis]
    own = {term.op: term for term in terms if term.axis != strategy.summed_axis}
    largest = max((term.bytes for term in whole), default=0)

    @cache  # the blocks of a model are alike
    def took(op: str, size: float) -> MessageTime:
        message = lines(own[op]).message(own[op], size) if op in own else MessageTime(0.0)
        if op != "all_gather":
            part = size / strategy.shard if strategy.zero else size
            for term in whole:
                message += lines(term).message(term, part * term.bytes / largest)
        return message

    wires = {lines(term).wire for term in own.values() or whole}
    between = _within(work, inner, within, lines, shared=any(lines(term).wire in wires for term in inner))
    return (
        elapsed(strategy, work.units, compute, took, passes=work.passes, forward=work.forward, within=between)
        - compute
        - within
    )


def _within(work: Work, inner: Sequence[TrafficTerm], within: float, lines: Lines, *, shared: bool) -> Within:
    """Return what tp and cp send, level over the units and both directions."""
    if not within:
        return Within()
    places = 2 * work.passes * len(work.units)
    calls = max(round(sum(term.calls for term in inner) / places), 1)
    holds = sum(term.calls * lines(term).message(term).holds for term in inner) / (places * calls)
    return Within(calls, MessageTime(holds, max(within / (places * calls) - holds, 0.0)), shared)


_EVERY = 1 << 12
"""Rows of which the shares of ranks of unequal speed are read off."""


@dataclass(frozen=True)
class MeasuredStep:
    """Rank 0's step as it was measured: seconds by part (see nbkit.records.records.StepRecord), under `strategy`."""

    strategy: Strategy
    parts: Mapping[str, float]


@dataclass(frozen=True)
class StepTraffic:
    """What a rank sends in a step, and bytes of optimizer state that it updates.

    units: of the model without a pipeline, where they are known: bytes of parameters as this rank computes with them.
    passes: forwards of a step without a pipeline.
    """

    terms: Sequence[TrafficTerm]
    updates: int
    units: Sequence[StepUnit] = ()
    passes: int = 1


def predicted(
    seen: MeasuredStep,
    now: StepTraffic,
    strategy: Strategy,
    then: StepTraffic,
    link: WorldLinks,
    costs: Sequence[float],
    *,
    recomputed: tuple[bool, bool] = (False, False),
) -> Parts:
    """Of a step under `strategy`. costs: of each block, in any unit, for pipelines. recomputed: whether blocks are
    computed again in the backward pass, now and then."""
    old = seen.strategy
    part = {name: seen.parts.get(name, 0.0) for name in ("compute", "exposed", "data", "optimizer", "other")}
    # What one rank, as fast as rank 0 is, would compute for the whole batch.
    before, after = (1 + FORWARD * again for again in recomputed)
    whole = part["compute"] / _work(old, costs, 0) * after / before
    waiting = 1.0
    if now.terms and all(term.axis in DATA for term in now.terms) and old.pp == 1:
        here = Work([[part["compute"]]], now.terms, now.units, now.passes, FORWARD / before)
        modelled = step_parts(here, old, _lines(old, link)).exposed
        waiting = min(part["exposed"] / modelled, 1.5) if modelled else 1.0
    work = Work(
        _stages(strategy, costs, whole, _speeds(old, strategy)),
        then.terms,
        then.units,
        then.passes,
        FORWARD / after,
        optimizer=part["optimizer"] * (then.updates / now.updates if now.updates else 1.0),
        other=part["data"] * old.dp / strategy.dp + part["other"],
        waiting=waiting,
    )
    return step_parts(work, strategy, _lines(strategy, link))


def _stages(
    strategy: Strategy, costs: Sequence[float], whole: float, speeds: Sequence[float]
) -> list[tuple[float, ...]]:
    """Of each replica, or without a pipeline of each rank, seconds of each stage."""
    mesh = strategy.mesh
    if strategy.pp == 1:
        return [(whole * _share(strategy, rank) / speeds[rank],) for rank in range(mesh.size)]
    homes, ranges, found = ranks_of_stages(strategy), stage_ranges(costs, strategy), []
    for first in mesh.ranks("dp", 0):
        ranks, block = mesh.ranks("pp", first), whole * _share(strategy, first) / sum(costs)
        found.append(
            tuple(block * sum(costs[a:b]) / speeds[ranks[home]] for (a, b), home in zip(ranges, homes, strict=True))
        )
    return found


def _share(strategy: Strategy, rank: int) -> float:
    """Of the batch, the positions and the features: what a rank has of each of its blocks."""
    rows = strategy.rows(_EVERY)[strategy.mesh.index(rank)["dp"]] if strategy.replica_speeds else (0, 1)
    whole = _EVERY if strategy.replica_speeds else strategy.dp
    return (rows[1] - rows[0]) / whole / (strategy.tp * strategy.cp)


def _work(strategy: Strategy, costs: Sequence[float], rank: int) -> float:
    """The share of the model's work that a rank has."""
    at, share = strategy.mesh.index(rank)["pp"], _share(strategy, rank)
    if strategy.pp == 1:
        return share
    stages = zip(stage_ranges(costs, strategy), ranks_of_stages(strategy), strict=True)
    return share * sum(sum(costs[a:b]) for (a, b), home in stages if home == at) / sum(costs)


def _speeds(old: Strategy, strategy: Strategy) -> list[float]:
    """Of each rank, beside rank 0: as `speeds=` says now, or else as the strategy that is asked for has it."""
    said = old.speeds or strategy.speeds
    return [speed / said[0] for speed in said] if said else [1.0] * strategy.mesh.size


def link_seconds(strategy: Strategy, terms: Sequence[TrafficTerm], link: WorldLinks) -> float:
    """Return what all that a rank sends in a step takes on the links, one after the other."""
    lines = _lines(strategy, link)
    return sum(lines(term).seconds(term) for term in terms)


def _lines(strategy: Strategy, link: WorldLinks) -> Lines:
    def line(term: TrafficTerm) -> OperationPath:
        spans, apart = _spans(term, strategy, link)
        return OperationPath(link.way(term, spans_nodes=spans, apart=apart), int(spans))

    return line


def _spans(term: TrafficTerm, strategy: Strategy, link: WorldLinks) -> tuple[bool, bool]:
    """Whether groups along the axis have ranks of several nodes, and whether all of them have one on each."""
    if len(set(link.node_of)) == 1 or term.level:
        return term.level == BETWEEN, term.level == BETWEEN
    axis = term.axis if term.axis in ("tp", "cp", "pp") else "dp"
    lines = strategy.mesh.groups(axis)
    if term.axis == "shard":
        lines = [line[at : at + strategy.shard] for line in lines for at in range(0, len(line), strategy.shard)]
    nodes = [len({link.node_of[rank] for rank in line}) for line in lines]
    return max(nodes) > 1, all(number == len(line) for number, line in zip(nodes, lines, strict=True))
