"""The work of a step from what was measured of another one: parts of the present step, scaled by what they follow from.

compute     the work of a rank: rows, positions, features and blocks divided over the axes, by the speeds of the ranks
exposed     the traffic over the measured link; the data axis scaled by what hides it now, beside what is told of it
optimizer   the elements that a rank updates
data        the rows that a rank reads
other       as it is

Before the first step the blocks' own seconds stand for the present one: those of one process. See step_time.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbkit.node_levels import BETWEEN
from nbkit.planner.link_speed import Link
from nbkit.planner.stage_partition import ranks_of_stages, stage_ranges
from nbkit.planner.step.overlap import FORWARD, Unit
from nbkit.planner.step.step_time import DATA, Line, Lines, Parts, Work, step_parts
from nbkit.planner.traffic import Traffic
from nbkit.strategy import Strategy

_EVERY = 1 << 12
"""Rows of which the shares of ranks of unequal speed are read off."""


@dataclass(frozen=True)
class Seen:
    """Rank 0's step as it was measured: seconds by part (see nbkit.records.records.StepRecord), under `strategy`."""

    strategy: Strategy
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Sends:
    """What a rank sends in a step, and bytes of optimizer state that it updates.

    units: of the model without a pipeline, where they are known: bytes of parameters as this rank computes with them.
    passes: forwards of a step without a pipeline.
    """

    terms: Sequence[Traffic]
    updates: int
    units: Sequence[Unit] = ()
    passes: int = 1


def predicted(
    seen: Seen,
    now: Sends,
    strategy: Strategy,
    then: Sends,
    link: Link,
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


def link_seconds(strategy: Strategy, terms: Sequence[Traffic], link: Link) -> float:
    """What all that a rank sends in a step takes on the links, one after the other."""
    lines = _lines(strategy, link)
    return sum(lines(term).seconds(term) for term in terms)


def _lines(strategy: Strategy, link: Link) -> Lines:
    def line(term: Traffic) -> Line:
        spans, apart = _spans(term, strategy, link)
        return Line(link.way(term, spans_nodes=spans, apart=apart), int(spans))

    return line


def _spans(term: Traffic, strategy: Strategy, link: Link) -> tuple[bool, bool]:
    """Whether groups along the axis have ranks of several nodes, and whether all of them have one on each."""
    if len(set(link.node_of)) == 1 or term.level:
        return term.level == BETWEEN, term.level == BETWEEN
    axis = term.axis if term.axis in ("tp", "cp", "pp") else "dp"
    lines = strategy.mesh.groups(axis)
    if term.axis == "shard":
        lines = [line[at : at + strategy.shard] for line in lines for at in range(0, len(line), strategy.shard)]
    nodes = [len({link.node_of[rank] for rank in line}) for line in lines]
    return max(nodes) > 1, all(number == len(line) for number, line in zip(nodes, lines, strict=True))
