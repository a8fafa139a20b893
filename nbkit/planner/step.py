"""Predicts the seconds of a step.

Every prediction of step time uses one sum, `step_parts`. A rank's work and its links come from measurements
(`predicted`) or from data sheets (nbkit/planner/choose/load.py). The sum has these parts:

compute     forward, backward and recomputation of the slowest rank
exposed     its waits for traffic: of tp and cp, for messages of a pipeline, and for the part of the data axis that
            compute does not hide. `elapsed` simulates that part
bubble      the idle time of a pipeline's schedule, simulated with the stages of this model (planner/stages.py)
optimizer, other    as given

`elapsed` simulates a rank without a pipeline, from its first forward to its last gradient. The link of a rank carries
one operation at a time, in the order in which they begin. An operation may begin before the previous one has arrived,
if only latency is left:

    zero 0, 1, 2  a bucket of gradients is sent when backward has made its last gradient. Under zero 1 and 2, at most
                  two buckets are under way. The same holds for all-gathers of updated parameters, which run during the
                  next forward (in `fit` without callbacks; otherwise after the step, where nothing hides them)
    compress      the sums of a bucket are sent together with the next bucket; backward waits for them at its end
    zero 3        the next unit is gathered while one computes; the gradients of a unit are sent after its backward
    tp, cp        traffic between the linear layers of a unit, which waits for it; if it shares the link of the data
                  axis, it queues there
    tp_chunks     of c pieces, all but the first overlap with the product of a layer: (c-1)/c of the shorter of both.
                  These products are taken as a third of forward, and of the input gradients

A pipeline sends all traffic of its data axis after its last backward, which needs no simulation.

`predicted` scales the parts of a measured step by these quantities:

compute     the work of a rank: rows, positions, features and blocks divided over the axes, by the speeds of the ranks
exposed     the traffic over the measured link; for the data axis also the ratio of its measured to its simulated wait
optimizer   the elements that a rank updates
data        the rows that a rank reads
other       unchanged

Before the first step, the compute seconds of the blocks in one process replace a measured step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from nbkit.mesh import AXES, BETWEEN
from nbkit.planner.link_speed import OperationSpeed, WorldLinks
from nbkit.planner.stages import makespan, ranks_of_stages, stage_ranges
from nbkit.planner.traffic import TrafficTerm
from nbkit.strategy import Strategy

_ROW_MAPS = 1 / 3
"""The share of the maps with split inputs in the compute of a forward: 5/12 of a GPT's products, 3/10 of a Llama's."""

FORWARD = 1 / 3
"""The share of forward in the compute: a backward has twice the flops."""


@dataclass(frozen=True)
class MessageTime:
    """Seconds of an operation. holds: the time for which it occupies the link. late: from then until it arrives."""

    holds: float
    late: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds from its beginning to its arrival on a free link."""
        return self.holds + self.late

    def __add__(self, other: MessageTime) -> MessageTime:
        return MessageTime(self.holds + other.holds, self.late + other.late)


Took = Callable[[str, float], MessageTime]
"""A function (operation, bytes of the whole tensor) -> its time over the data axis."""


@dataclass(frozen=True)
class StepUnit:
    """A piece of the model. share: its share of the compute. sizes: bytes of each parameter, in the order of use.

    outside: bytes of the parameters that are in no block; zero 3 gathers them first and releases them last. gathered:
    the share of the other bytes that zero 3 gathers; less than 1 if parameters are cast first.
    """

    share: float
    sizes: tuple[int, ...]
    outside: int = 0
    gathered: float = 1.0

    @property
    def inside(self) -> int:
        """Return the bytes of the parameters that are in a block."""
        return sum(self.sizes) - self.outside


@dataclass(frozen=True)
class Within:
    """Traffic of tp and cp inside a unit. calls: in its forward, and again in its backward. each: the time of a call.

    shared: True if it uses the link of the data axis.
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
    """Return the seconds of a step without its update.

    computing: seconds of compute in the step. passes: forwards in a step. forward: the share of forward in the compute.
    """
    run = _Run(units, forward * computing / passes, (1 - forward) * computing / passes, took, within or Within())
    if strategy.zero == 3:
        return passes * run.zero3()
    alone = computing / passes + 2 * len(units) * run.within.calls * run.within.each.total
    return (passes - 1) * alone + run.replicated(strategy)


class _Wire:
    """A link. free: the time at which the next operation can begin."""

    def __init__(self) -> None:
        self.free = 0.0

    def send(self, begun: float, message: MessageTime) -> float:
        """Send `message` at `begun`, or as soon as the link is free. Return the time when it has arrived."""
        self.free = max(self.free, begun) + message.holds
        return self.free + message.late


@dataclass(frozen=True)
class _Run:
    """The simulation of one forward and one backward, in seconds."""

    units: Sequence[StepUnit]
    forward: float
    backward: float
    took: Took
    within: Within

    def replicated(self, strategy: Strategy) -> float:
        """Return the seconds of the last pass under zero 0, 1 or 2."""
        wire, zero, exchange, cut = _Wire(), strategy.zero, strategy.exchange, list(self._buckets(strategy))
        operations = ("reduce_scatter",) if zero else exchange.operations
        now = self._forward(wire, cut[::-1] if zero else [])
        done, arrived = len(self.units), list[float]()
        crossing = list[MessageTime]()  # the remaining operations of the previous bucket
        for size, piece in cut:
            while done > piece:
                done -= 1
                now = self._compute(now, self.units[done].share * self.backward, wire)
            for message in crossing:
                now = max(now, arrived.pop())
                arrived.append(wire.send(now, message))
            if zero and len(arrived) > 1:
                now = max(now, arrived.pop(0))
            first, *crossing = [self.took(operation, exchange.share * size) for operation in operations]
            arrived.append(wire.send(now, first))
        for unit in reversed(self.units[:done]):
            now = self._compute(now, unit.share * self.backward, wire)
        for message in crossing:
            now = max(now, arrived.pop())
            arrived.append(wire.send(now, message))
        return max([now, *arrived])

    def _forward(self, wire: _Wire, updated: Sequence[tuple[int, int]]) -> float:
        """Return the time when forward is done.

        updated: (bytes, first unit that reads them) for each bucket of parameters that is gathered during the forward.
        """
        now, coming = 0.0, [wire.send(0.0, self.took("all_gather", size)) for size, _ in updated[:2]]
        come = 0
        for i, unit in enumerate(self.units):
            while come < len(updated) and updated[come][1] <= i:
                now, come = max(now, coming[come]), come + 1
                coming += [wire.send(now, self.took("all_gather", size)) for size, _ in updated[come + 1 : come + 2]]
            now = self._compute(now, unit.share * self.forward, wire)
        return now

    def _buckets(self, strategy: Strategy) -> Iterator[tuple[int, int]]:
        """Yield (bytes, unit whose backward completes it) for each bucket of gradients, in order."""
        left = [(size, i) for i in reversed(range(len(self.units))) for size in reversed(self.units[i].sizes)]
        at = 0
        for bucket in strategy.exchange.buckets([size for size, _ in left]):
            at += len(bucket)
            yield sum(bucket), left[at - 1][1]

    def zero3(self) -> float:
        """Return the seconds of one pass under zero 3."""
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
        """Return the time when a unit is done, including the traffic inside it."""
        calls, each = self.within.calls, self.within.each
        if not calls or not self.within.shared:
            return now + seconds + calls * each.total
        for _ in range(calls):
            now = wire.send(now + seconds / calls, each)
        return now


DATA = ("dp", "shard", "replicate")
"""The data axis, and the two axes into which hsdp divides it."""


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
        """Return the sum of all parts."""
        return self.compute + self.exposed + self.bubble + self.optimizer + self.other


@dataclass(frozen=True)
class Work:
    """The work that a step gives the ranks.

    stages: for each replica, the compute seconds of each stage of its pipeline, for all its rows; a single stage
    without a pipeline. forward: the share of forward in these seconds. terms: the traffic of the busiest rank. units:
    the units of the model on a rank without a pipeline; if empty, compute hides nothing of the data axis. passes:
    forwards in a step without a pipeline. optimizer, other: seconds. waiting: a factor for the wait for the data axis.
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
    """The path of an operation. way: its speed. wire: a number that is equal for paths over the same link."""

    way: OperationSpeed
    wire: int = 0

    def message(self, term: TrafficTerm, size: float | None = None) -> MessageTime:
        """Return the time of one call of `term`. size: bytes of the call; by default an equal part of the term."""
        share = 1 / term.calls if size is None else size / term.bytes if term.bytes else 0.0
        holds = self.way.holds(term.wire * share)
        return MessageTime(holds, max(self.way.seconds(1, term.wire * share) - holds, 0.0))

    def seconds(self, term: TrafficTerm) -> float:
        """Return the seconds of all calls of `term`, if the rank waits for each one."""
        return self.way.seconds(term.calls, term.wire)


Lines = Callable[[TrafficTerm], OperationPath]
"""A function from a term to its path."""


def step_parts(work: Work, strategy: Strategy, lines: Lines) -> Parts:
    """Return the seconds of a step under `strategy`, by part."""
    inner = [term for term in work.terms if term.axis not in (*DATA, "pp")]
    within = sum(lines(term).seconds(term) for term in inner) - _beside(work, strategy, lines, inner)
    if strategy.pp == 1:
        compute, bubble = max(sum(stages) for stages in work.stages), 0.0
        exposed = within + work.waiting * _data(work, strategy, lines, compute, inner, within)
    else:
        compute, bubble, exposed = _pipeline(work, strategy, lines, within)
        exposed += work.waiting * _data(work, strategy, lines, compute, inner, within)
        exposed += sum(lines(term).seconds(term) for term in work.terms if term.axis == "pp" and term.op != "send")
    return Parts(compute, exposed, bubble, work.optimizer, work.other)


def _beside(work: Work, strategy: Strategy, lines: Lines, inner: Sequence[TrafficTerm]) -> float:
    """Return the seconds of traffic that overlaps with the products of maps with split inputs (tp_chunks=)."""
    product = _ROW_MAPS * work.forward * max(map(sum, work.stages)) / strategy.pp
    found = 0.0
    for term in inner:
        if term.pieces > 1:
            calls = round(term.calls * term.pieces / (term.pieces + 1))
            half = replace(term, calls=calls, bytes=term.bytes // 2)
            found += (1 - 1 / term.pieces) * min(lines(half).seconds(half), product)
    return found


def _pipeline(work: Work, strategy: Strategy, lines: Lines, within: float) -> tuple[float, float, float]:
    """Return (compute, bubble, exposed) of the slowest replica, from its first forward until all its ranks are done."""
    sends = [term for term in work.terms if term.axis == "pp" and term.op == "send" and term.calls]
    transfer = max((lines(term).message(term).total for term in sends), default=0.0)
    met = max((lines(term).way.latency for term in sends), default=0.0) * (strategy.pp - 1).bit_length()
    # Even if compute hides messages, the rank needs time to send them.
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
    """Return the compute seconds of the rank that computes longest, over all its stages."""
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
    """Return the seconds that a rank waits for its data axis."""
    terms = [term for term in work.terms if term.axis in DATA]
    if not terms or not work.units or strategy.pp > 1 or strategy.exchange.every > 1:
        return sum(lines(term).seconds(term) for term in terms)
    # `whole`: the all-reduce of the gradients, or of their shards, in one level or two. `own`: all other operations.
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
    """Return the traffic of tp and cp, spread evenly over the units, and over forward and backward."""
    if not within:
        return Within()
    places = 2 * work.passes * len(work.units)
    calls = max(round(sum(term.calls for term in inner) / places), 1)
    # A rank waits only for the part of the traffic that no product hides.
    waits = within / sum(lines(term).seconds(term) for term in inner)
    holds = waits * sum(term.calls * lines(term).message(term).holds for term in inner) / (places * calls)
    return Within(calls, MessageTime(holds, max(within / (places * calls) - holds, 0.0)), shared)


_EVERY = 1 << 12
"""Rows of an imaginary batch. Its division gives the shares of ranks of unequal speed."""


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step of rank 0 under `strategy`: seconds by part (see nbkit.records.records.StepRecord)."""

    strategy: Strategy
    parts: Mapping[str, float]


@dataclass(frozen=True)
class StepTraffic:
    """The traffic of a rank in a step. updates: bytes of optimizer state that it updates.

    units: the units of the model without a pipeline, if known, with the sizes of their parameters on this rank. passes:
    forwards in a step without a pipeline.
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
    """Return the predicted seconds of a step under `strategy`, by part.

    costs: the cost of each block, in any unit, for pipelines. recomputed: whether backward recomputes blocks, in the
    measured step and in the predicted one.
    """
    old = seen.strategy
    part = {name: seen.parts.get(name, 0.0) for name in ("compute", "exposed", "data", "optimizer", "other")}
    # `whole`: compute seconds of the whole batch on a single rank that is as fast as rank 0.
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
    """Return the seconds of each stage, for each replica. Without a pipeline, return them for each rank."""
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
    """Return the share of each of its blocks that a rank computes, divided by rows, positions and features."""
    rows = strategy.rows(_EVERY)[strategy.mesh.index(rank)["dp"]] if strategy.replica_speeds else (0, 1)
    whole = _EVERY if strategy.replica_speeds else strategy.dp
    return (rows[1] - rows[0]) / whole / (strategy.tp * strategy.cp)


def _work(strategy: Strategy, costs: Sequence[float], rank: int) -> float:
    """Return the share of the model's work that a rank has."""
    at, share = strategy.mesh.index(rank)["pp"], _share(strategy, rank)
    if strategy.pp == 1:
        return share
    stages = zip(stage_ranges(costs, strategy), ranks_of_stages(strategy), strict=True)
    return share * sum(sum(costs[a:b]) for (a, b), home in stages if home == at) / sum(costs)


def _speeds(old: Strategy, strategy: Strategy) -> list[float]:
    """Return the speed of each rank relative to rank 0, from `speeds=` of `old`, or else of `strategy`."""
    said = old.speeds or strategy.speeds
    return [speed / said[0] for speed in said] if said else [1.0] * strategy.mesh.size


def link_seconds(strategy: Strategy, terms: Sequence[TrafficTerm], link: WorldLinks) -> float:
    """Return the seconds that a rank's traffic in a step takes on the links, one operation after the other."""
    lines = _lines(strategy, link)
    return sum(lines(term).seconds(term) for term in terms)


def _lines(strategy: Strategy, link: WorldLinks) -> Lines:
    def line(term: TrafficTerm) -> OperationPath:
        spans, apart = _spans(term, strategy, link)
        return OperationPath(link.way(term, spans_nodes=spans, apart=apart), int(spans))

    return line


def _spans(term: TrafficTerm, strategy: Strategy, link: WorldLinks) -> tuple[bool, bool]:
    """Return (True if a group along the term's axis spans nodes, True if all groups have at most one rank per node)."""
    if len(set(link.node_of)) == 1 or term.level:
        return term.level == BETWEEN, term.level == BETWEEN
    axis = term.axis if term.axis in AXES else "dp"
    lines = strategy.mesh.groups(axis)
    if term.axis == "shard":
        lines = [line[at : at + strategy.shard] for line in lines for at in range(0, len(line), strategy.shard)]
    nodes = [len({link.node_of[rank] for rank in line}) for line in lines]
    return max(nodes) > 1, all(number == len(line) for number, line in zip(nodes, lines, strict=True))
