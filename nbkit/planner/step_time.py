"""Predicts the step of a strategy that has not run: the parts of the present step, scaled by what they follow from.

compute     the work of a rank: rows, positions, features and blocks divided over the axes, evenly
optimizer   the elements that a rank updates
data        the rows that a rank reads
exposed     the traffic over the measured link. What the data axis hides behind the backward pass it hides in the
            same proportion as now, where it is there now; along tp and cp everything waits for what is sent
bubble      what the schedule leaves idle, by simulation
other       as it is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nbkit.planner.link_speed import Link
from nbkit.planner.stage_partition import place
from nbkit.planner.traffic import Traffic
from nbkit.schedules import Schedule, simulate
from nbkit.strategy import Strategy

_DATA = ("dp", "shard", "replicate")


@dataclass(frozen=True)
class Seen:
    """Rank 0's step as it was measured: seconds by part (see nbkit.records.records.StepRecord), under `strategy`."""

    strategy: Strategy
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Sends:
    """What a rank of a strategy sends in a step, and bytes of optimizer state that it updates."""

    terms: Sequence[Traffic]
    updates: int


def step_seconds(seen: Seen, now: Sends, strategy: Strategy, then: Sends, link: Link, costs: Sequence[float]) -> float:
    """Seconds of a step under `strategy`. costs: of each block, in any unit, for pipelines."""
    old = seen.strategy
    part = {name: seen.parts.get(name, 0.0) for name in ("compute", "exposed", "data", "optimizer", "other")}
    compute = part["compute"] / _loads(old, costs)[0] * max(_loads(strategy, costs))
    hidden = _exposed_share(part["exposed"], now.terms, old, link)
    exposed = sum(
        link.seconds(term, spans_nodes=_spans(term, strategy, link)) * (hidden if term.axis in _DATA else 1.0)
        for term in then.terms
        if term.axis != "pp"
    )
    return (
        (compute + exposed) / (1 - _idle(strategy))
        + part["optimizer"] * (then.updates / now.updates if now.updates else 1.0)
        + part["data"] * old.dp / strategy.dp
        + part["other"]
    )


def _loads(strategy: Strategy, costs: Sequence[float]) -> list[float]:
    """The share of the model's work that a rank has, by place along pp."""
    even = 1 / (strategy.dp * strategy.tp * strategy.cp)
    if strategy.pp == 1:
        return [even]
    sums = [sum(sum(costs[start:stop]) for start, stop in ranges) for ranges in place(costs, strategy)]
    return [even * own / sum(sums) for own in sums]


def _exposed_share(exposed: float, terms: Sequence[Traffic], strategy: Strategy, link: Link) -> float:
    """Seconds of waiting per second of traffic along the data axis, now; 1 where none is there to be seen."""
    data = [term for term in terms if term.axis in _DATA]
    if not data or len(data) < len(terms):
        return 1.0
    modelled = sum(link.seconds(term, spans_nodes=_spans(term, strategy, link)) for term in data)
    return min(exposed / modelled, 1.5) if modelled else 1.0


def _idle(strategy: Strategy) -> float:
    """Of the rank that has most to do, where stages cost the same."""
    if strategy.pp == 1:
        return 0.0
    return _bubble(strategy.schedule or "1f1b", strategy.pp, strategy.microbatches or 1)


@lru_cache(maxsize=256)
def _bubble(schedule: str, ranks: int, micros: int) -> float:
    if schedule in ("gpipe", "1f1b"):
        return (ranks - 1) / (micros + ranks - 1)
    return min(simulate(Schedule.of(schedule, ranks, micros)).idle)


def _spans(term: Traffic, strategy: Strategy, link: Link) -> bool:
    """Whether the groups along the axis have ranks of several nodes."""
    if len(set(link.node_of)) == 1:
        return False
    axis = term.axis if term.axis in ("tp", "cp", "pp") else "dp"
    lines = strategy.mesh.groups(axis)
    if term.axis == "shard":
        lines = [line[at : at + strategy.shard] for line in lines for at in range(0, len(line), strategy.shard)]
    return any(len({link.node_of[rank] for rank in line}) > 1 for line in lines)
