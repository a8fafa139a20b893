"""The seconds of a step: the one sum of all who predict any, whatever they know a rank's work and its links from.

compute     what the slowest rank computes, forward, backward and what is computed again
exposed     what it waits for: what tp and cp send, messages of a pipeline, and of the data axis what nothing hides,
            which is simulated (overlap.py)
bubble      what a pipeline's schedule, simulated with its own stages (load_balance.py), leaves idle
optimizer, other    as they are given

measured_step.py has a rank's work from what was measured, nbkit/planner/choose/seconds.py from data sheets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from nbkit.planner.link_speed import Way
from nbkit.planner.load_balance import makespan
from nbkit.planner.stage_partition import ranks_of_stages
from nbkit.planner.step.overlap import FORWARD, Message, Unit, Within, elapsed
from nbkit.planner.traffic import Traffic
from nbkit.strategy import Strategy

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
    terms: Sequence[Traffic]
    units: Sequence[Unit] = ()
    passes: int = 1
    forward: float = FORWARD
    optimizer: float = 0.0
    other: float = 0.0
    waiting: float = 1.0


@dataclass(frozen=True)
class Line:
    """The way that an operation takes. wire: equal for those that hold the same link."""

    way: Way
    wire: int = 0

    def message(self, term: Traffic, size: float | None = None) -> Message:
        """One call of `term`, of `size` bytes in place of its own part."""
        share = 1 / term.calls if size is None else size / term.bytes if term.bytes else 0.0
        holds = self.way.holds(term.wire * share)
        return Message(holds, max(self.way.seconds(1, term.wire * share) - holds, 0.0))

    def seconds(self, term: Traffic) -> float:
        """Of all its calls, each of which is waited for."""
        return self.way.seconds(term.calls, term.wire)


Lines = Callable[[Traffic], Line]
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
    work: Work, strategy: Strategy, lines: Lines, compute: float, inner: Sequence[Traffic], within: float
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
    def took(op: str, size: float) -> Message:
        message = lines(own[op]).message(own[op], size) if op in own else Message(0.0)
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


def _within(work: Work, inner: Sequence[Traffic], within: float, lines: Lines, *, shared: bool) -> Within:
    """What tp and cp send, level over the units and both directions."""
    if not within:
        return Within()
    places = 2 * work.passes * len(work.units)
    calls = max(round(sum(term.calls for term in inner) / places), 1)
    holds = sum(term.calls * lines(term).message(term).holds for term in inner) / (places * calls)
    return Within(calls, Message(holds, max(within / (places * calls) - holds, 0.0)), shared)
