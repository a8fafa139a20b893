"""Measures the speed of each rank in every step, and gives the ranks rows and stages to match.

The speed of a rank is its part of the work (rows x cost of its blocks), divided by the seconds that it computes forward
and backward. Waiting for other ranks does not count. The work is divided anew only if two steps in a row show a gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from nbkit.planner.stages import best_places, best_speeds, computing_seconds, place
from nbkit.rank.telemetry.phases import StepPhases, clock
from nbkit.rank.train.job import Job
from nbkit.records.events import Rebalanced
from nbkit.strategy import Strategy

_WORTH = 0.05  # the least gain that is worth a change, as a part of the computing of a step
_FINE = 100  # the least speed that a rank is given is that of the fastest divided by this


class Rebalancing:
    """Finds a better division of the work, the same one on every rank. device: used for collectives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = 0.0
        self._measured: list[tuple[float, ...]] = []
        self._strategy: Strategy | None = None

    def __call__(self, step: StepPhases) -> None:
        """Note the computing seconds of a finished step: see StepClock.listeners."""
        if step.over():
            self._own = sum(stop - start for state, start, stop in step.intervals() if state in _COMPUTING) / 1e9

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the steps of this process's training inside."""
        clock.listeners.append(self)
        try:
            yield
        finally:
            clock.listeners.remove(self)

    def forget(self) -> None:
        """Drop the measurements. Called when ranks have joined that have measured nothing."""
        self._strategy, self._measured = None, []

    def act(self, job: Job, batch: int) -> None:
        """Switch to a better division of the work, if there is one. Collective, at a step boundary.

        batch: rows of a global batch.
        """
        facts = job.builder.facts
        blocks = len(facts.chain) if facts.chain is not None else 1
        link = job.builder.link
        movable = link is None or len(set(link.node_of)) == 1
        found = self.due(job.strategy, batch, facts.costs or (1.0,) * blocks, movable=movable)
        if found is not None:
            strategy, gain = found
            job.switch(str(strategy))
            speeds = ":".join(map(str, strategy.speeds)) or "equal"
            speeds += " places=" * bool(strategy.places) + ":".join(map(str, strategy.places))
            job.ledger.emit(Rebalanced(job.step, speeds=speeds, gain=gain))

    def due(
        self, strategy: Strategy, batch: int, costs: Sequence[float], *, movable: bool = True
    ) -> tuple[Strategy, float] | None:
        """Return a better strategy and the part of the computing seconds that it saves, or None. Collective.

        batch: rows of a global batch. costs: of each block, if there is a pipeline. movable: see `better`.
        """
        seconds = torch.zeros(strategy.mesh.size, dtype=torch.float64, device=self._device)
        seconds[dist.get_rank() if dist.is_initialized() else 0] = self._own
        if strategy.mesh.size > 1:
            dist.all_reduce(seconds)
        if strategy != self._strategy:
            # The first step under a strategy is not typical: it made buffers and proofs.
            self._strategy, self._measured = strategy, []
            return None
        self._measured = [*self._measured[-1:], tuple(seconds.tolist())]
        found = [better(strategy, batch, costs, measured, movable=movable) for measured in self._measured]
        return found[-1] if len(found) == 2 and all(found) else None


_COMPUTING = ("forward", "backward")


def better(
    strategy: Strategy, batch: int, costs: Sequence[float], seconds: Sequence[float], *, movable: bool = True
) -> tuple[Strategy, float] | None:
    """Return `strategy` with speeds= that suit the computing `seconds` of each rank, and the part of time it saves.

    Returns None if it saves little. movable: a stage may move to another device, as `places=` of the strategy says.
    """
    work, mesh = _work(strategy, batch, costs), strategy.mesh
    if not all(second > 0 for second, own in zip(seconds, work, strict=True) if own):
        return None
    speeds = [own / second if own else 0.0 for own, second in zip(work, seconds, strict=True)]
    # Ranks that compute equal parts of each layer are as fast as the slowest. The speed of one without rows is unknown.
    for axis in ("tp", "cp"):
        for group in mesh.groups(axis):
            slowest = min(speeds[rank] for rank in group)
            speeds = [slowest if rank in group else speed for rank, speed in enumerate(speeds)]
    fastest = max(speeds)
    if fastest == 0:
        return None
    # A rank that had nothing to do is given a little work, to measure it.
    speeds = [speed or fastest / _FINE for speed in speeds]
    if max(seconds) <= (1 + _WORTH) * sum(seconds) / len(seconds):
        return None
    now = computing_seconds(strategy, batch, costs, speeds)
    new = replace(strategy, speeds=best_speeds(strategy, batch, costs, speeds))
    then = computing_seconds(new, batch, costs, speeds)
    if movable and not strategy.order:
        # Moving a stage to another device moves all that it holds. It must gain more than a new division alone.
        measured = tuple(max(round(_FINE * speed / fastest), 1) for speed in speeds)
        other = best_places(replace(strategy, speeds=measured), batch, tuple(costs))
        other = replace(other, speeds=best_speeds(other, batch, costs, speeds))
        took = computing_seconds(other, batch, costs, speeds)
        new, then = (other, took) if took < (1 - _WORTH) * then else (new, then)
    return (new, 1 - then / now) if then < (1 - _WORTH) * now else None


def _work(strategy: Strategy, batch: int, costs: Sequence[float]) -> list[float]:
    """Return the work of each rank, in rows of the whole model."""
    rows, mesh = strategy.rows(batch), strategy.mesh
    stages = [1.0]
    if strategy.pp > 1:
        sums = [sum(sum(costs[start:stop]) for start, stop in ranges) for ranges in place(costs, strategy)]
        stages = [own / sum(sums) for own in sums]
    places = [mesh.index(rank) for rank in range(mesh.size)]
    return [(rows[at["dp"]][1] - rows[at["dp"]][0]) * stages[at["pp"]] for at in places]
