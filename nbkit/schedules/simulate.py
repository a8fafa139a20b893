"""Simulates a schedule with given costs of its stages, and plans the order in which a pipeline generates tokens.

`simulate` returns the times at which each operation begins and ends. It fails if the schedule cannot run.

`token_rounds` returns the order for generation. A sequence enters the first stage again when the last stage has made
its token. Sequences follow one another through the stages. If there are as many sequences as stages, every rank is
busy. With only one sequence, each rank waits for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from nbkit.schedules.schedule import Op, Schedule, before, check_complete, check_done, peak_of

Cost = float | Sequence[float]


class OpTime(NamedTuple):
    """An operation with the times at which it starts and stops, in the unit of the costs."""

    op: Op
    start: float
    stop: float


@dataclass(frozen=True)
class ScheduleTimeline:
    """The result of a simulation. makespan: the time of the last end. spans, idle, peak: one entry for each rank.

    spans: its operations with their times. idle: the share of the makespan in which the rank does nothing. peak: the
    largest number of activations that it holds at once. One counts for each stage and micro-batch, from F to the end of
    B or W.
    """

    spans: tuple[tuple[OpTime, ...], ...]
    makespan: float
    idle: tuple[float, ...]
    peak: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Return the share of the time in which a rank is idle, averaged over the ranks."""
        return sum(self.idle) / len(self.idle)


def simulate(
    schedule: Schedule,
    *,
    forward: Cost = 1.0,
    backward_input: Cost = 1.0,
    backward_weight: Cost = 1.0,
    transfer: float = 0.0,
) -> ScheduleTimeline:
    """Return the times at which operations run if the executor follows the lists: sends never block, receives wait.

    forward, backward_input, backward_weight: one cost, or one for each stage; a B costs the sum of the last two.
    transfer: the time of a message between two ranks, in the same unit. Raises StrategyError if an operation is missing
    or doubled, or if the ranks would wait for each other forever.
    """
    num_stages = schedule.num_stages
    costs = {"F": _each(forward, num_stages), "I": _each(backward_input, num_stages)}
    costs["W"] = _each(backward_weight, num_stages)
    costs["B"] = [a + b for a, b in zip(costs["I"], costs["W"], strict=True)]
    split = check_complete(schedule)
    stops: dict[Op, float] = {}
    spans: list[list[OpTime]] = [[] for _ in schedule.ops]
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ops):
            done = spans[rank]
            while len(done) < len(ops):
                op = ops[len(done)]
                start = done[-1].stop if done else 0.0
                needed = before(op, num_stages, split=(op.stage + 1, op.micro) in split)
                if any(one not in stops for one in needed):
                    break
                for one in needed:
                    start = max(start, stops[one] + transfer * (schedule.rank_of(one.stage) != rank))
                stops[op] = start + costs[op.kind][op.stage]
                done.append(OpTime(op, start, stops[op]))
                moved = True
    check_done(schedule, [len(done) for done in spans])
    makespan = max(stops.values())
    idle = tuple(1 - sum(span.stop - span.start for span in done) / makespan for done in spans)
    return ScheduleTimeline(tuple(map(tuple, spans)), makespan, idle, tuple(map(peak_of, schedule.ops)))


def _each(cost: Cost, num_stages: int) -> list[float]:
    return [float(cost)] * num_stages if isinstance(cost, (int, float)) else [float(one) for one in cost]


@lru_cache(maxsize=64)
def token_rounds(schedule: Schedule, sequences: int, rounds: int) -> tuple[tuple[Op, ...], ...]:
    """Return the forwards of each rank. Micro-batch n is round n // sequences of sequence n % sequences.

    schedule: determines which rank holds which stage. All stages are assumed to take equal time. Of the operations that
    could run, a rank chooses the one at the last stage. Every stage takes micro-batches in the order of their numbers.
    """
    last, total = schedule.num_stages - 1, sequences * rounds
    done = [0] * (last + 1)  # number of micro-batches that have passed each stage
    lists: list[list[Op]] = [[] for _ in range(schedule.ranks)]
    while done[last] < total:
        before = list(done)
        for rank, ops in enumerate(lists):
            for stage in reversed(schedule.stages_of(rank)):
                known = before[stage - 1] if stage else min(before[last] + sequences, total)
                if before[stage] < known:
                    ops.append(Op("F", stage, before[stage]))
                    done[stage] += 1
                    break
    return tuple(map(tuple, lists))
