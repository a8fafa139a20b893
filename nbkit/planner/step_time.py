"""Predicts the step of a strategy that has not run: the parts of the present step, scaled by what they follow from.

compute     the work of a rank: rows, positions, features and blocks divided over the axes, by the speeds of the ranks
bubble      the schedule is simulated, with the stages' own work and what is sent between them
exposed     the traffic over the measured link. What hides that of the data axis is simulated too (overlap.py), where
            the model's pieces are known, and scaled by what hides it now; what tp and cp send is waited for
optimizer   the elements that a rank updates
data        the rows that a rank reads
other       as it is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nbkit.node_levels import BETWEEN
from nbkit.planner.link_speed import Link
from nbkit.planner.load_balance import makespan
from nbkit.planner.overlap import Unit, waits
from nbkit.planner.stage_partition import ranks_of_stages, stage_ranges
from nbkit.planner.traffic import Traffic
from nbkit.strategy import Strategy

_DATA = ("dp", "shard", "replicate")
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


def step_seconds(seen: Seen, now: Sends, strategy: Strategy, then: Sends, link: Link, costs: Sequence[float]) -> float:
    """Seconds of a step under `strategy`. costs: of each block, in any unit, for pipelines."""
    old = seen.strategy
    part = {name: seen.parts.get(name, 0.0) for name in ("compute", "exposed", "data", "optimizer", "other")}
    # What one rank, as fast as rank 0 is, would compute for the whole batch.
    whole = part["compute"] / _work(old, costs, 0)
    hidden = 1.0
    here = [term for term in now.terms if term.axis in _DATA]
    if here and len(here) == len(now.terms) and old.pp == 1:
        modelled = _data(old, now, link, part["compute"])
        hidden = min(part["exposed"] / modelled, 1.5) if modelled else 1.0
    speeds = _speeds(old, strategy)
    if strategy.pp == 1:
        computing = max(whole * _work(strategy, costs, rank) / speeds[rank] for rank in range(strategy.mesh.size))
        inner = computing + _inner(strategy, then, link)
        took = inner + hidden * _data(strategy, then, link, inner)
    else:
        took = _pipeline(strategy, then, link, costs, whole, speeds) + hidden * _data(strategy, then, link, 0.0)
    return (
        took
        + part["optimizer"] * (then.updates / now.updates if now.updates else 1.0)
        + part["data"] * old.dp / strategy.dp
        + part["other"]
    )


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


def _pipeline(
    strategy: Strategy, sends: Sends, link: Link, costs: Sequence[float], whole: float, speeds: Sequence[float]
) -> float:
    """Seconds from the first forward to the last backward of the slowest replica."""
    mesh, homes, ranges = strategy.mesh, ranks_of_stages(strategy), stage_ranges(costs, strategy)
    messages = [term for term in sends.terms if term.axis == "pp" and term.op == "send" and term.calls]
    transfer = max((_seconds(term, strategy, link) / term.calls for term in messages), default=0.0)
    inner = _inner(strategy, sends, link) * strategy.pp / len(homes)
    found = 0.0
    for first in mesh.ranks("dp", 0):
        ranks, block = mesh.ranks("pp", first), whole * _share(strategy, first) / sum(costs)
        stages = (
            block * sum(costs[a:b]) / speeds[ranks[home]] + inner for (a, b), home in zip(ranges, homes, strict=True)
        )
        found = max(found, makespan(strategy.schedule, strategy.microbatches or 1, tuple(stages), transfer))
    return found


def _inner(strategy: Strategy, sends: Sends, link: Link) -> float:
    """Seconds of what is sent within layers, which nothing hides."""
    return sum(_seconds(term, strategy, link) for term in sends.terms if term.axis not in (*_DATA, "pp"))


def _data(strategy: Strategy, sends: Sends, link: Link, computing: float) -> float:
    """Seconds that a rank waits for its data axis. computing: what may hide it."""
    terms = [term for term in sends.terms if term.axis in _DATA]
    levers = strategy.levers
    if not terms or not sends.units or strategy.pp > 1 or levers.compress or levers.sync_every > 1:
        return sum(_seconds(term, strategy, link) for term in terms)
    summed = [term for term in terms if term.axis == strategy.summed_axis]
    sharded = {term.op: term for term in terms if term.axis != strategy.summed_axis}
    whole = max((term.bytes for term in summed), default=0)

    def took(op: str, size: float) -> float:
        own = [replace(sharded[op], bytes=round(size))] if op in sharded else []
        if op != "all_gather":
            # What is all-reduced, in one level or two: all of it, or of what is sharded a rank's part.
            part = size / strategy.shard if strategy.zero else size
            own += [replace(term, bytes=round(part * term.bytes / whole)) for term in summed]
        return sum(_seconds(replace(term, calls=1), strategy, link) for term in own)

    return waits(strategy, sends.units, computing, took, passes=sends.passes)


def _seconds(term: Traffic, strategy: Strategy, link: Link) -> float:
    return link.seconds(term, spans_nodes=_spans(term, strategy, link))


def _spans(term: Traffic, strategy: Strategy, link: Link) -> bool:
    """Whether the groups along the axis have ranks of several nodes."""
    if len(set(link.node_of)) == 1 or term.level:
        return term.level == BETWEEN
    axis = term.axis if term.axis in ("tp", "cp", "pp") else "dp"
    lines = strategy.mesh.groups(axis)
    if term.axis == "shard":
        lines = [line[at : at + strategy.shard] for line in lines for at in range(0, len(line), strategy.shard)]
    return any(len({link.node_of[rank] for rank in line}) > 1 for line in lines)
