"""Ranks whose speed changes while they train: measured in every step, and given rows and stages to match.

A rank's speed is its part of the work, rows x cost of its blocks, by the seconds that it computes forward and backward;
waits for others are none of them. Two steps in a row have to say that another division is better.
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

_WORTH = 0.05  # of the computing of a step
_FINE = 100  # of the fastest, the least speed that a rank is given


class Rebalancing:
    """Finds a better division of the work, the same one on every rank. device: that of collectives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = 0.0
        self._measured: list[tuple[float, ...]] = []
        self._strategy: Strategy | None = None

    def __call__(self, step: StepPhases) -> None:
        """A step is made: see StepClock.listeners."""
        if step.over():
            self._own = sum(stop - start for state, start, stop in step.intervals() if state in _COMPUTING) / 1e9

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around a training of this process: be told of its steps."""
        clock.listeners.append(self)
        try:
            yield
        finally:
            clock.listeners.remove(self)

    def forget(self) -> None:
        """What was measured counts no more: ranks have joined that have measured nothing."""
        self._strategy, self._measured = None, []

    def act(self, job: Job, batch: int) -> None:
        """Switch to a better division of the work, if there is one. Collective, at a step boundary.

        batch: rows of a global batch.
        """
        options = job.builder.options
        blocks = len(options.chain) if options.chain is not None else 1
        link = job.builder.link
        movable = link is None or len(set(link.node_of)) == 1
        found = self.due(job.strategy, batch, options.costs or (1.0,) * blocks, movable=movable)
        if found is not None:
            strategy, gain = found
            job.switch(str(strategy))
            speeds = ":".join(map(str, strategy.speeds)) or "equal"
            speeds += " places=" * bool(strategy.places) + ":".join(map(str, strategy.places))
            job.ledger.emit(Rebalanced(job.step, speeds=speeds, gain=gain))

    def due(
        self, strategy: Strategy, batch: int, costs: Sequence[float], *, movable: bool = True
    ) -> tuple[Strategy, float] | None:
        """Return a better strategy, and the part of the computing seconds that it saves; None where there is none.
        Collective.

        batch: rows of a global batch. costs: of each block, where there is a pipeline. movable: see `better`.
        """
        seconds = torch.zeros(strategy.mesh.size, dtype=torch.float64, device=self._device)
        seconds[dist.get_rank() if dist.is_initialized() else 0] = self._own
        if strategy.mesh.size > 1:
            dist.all_reduce(seconds)
        if strategy != self._strategy:
            # Its first step made buffers and proofs.
            self._strategy, self._measured = strategy, []
            return None
        self._measured = [*self._measured[-1:], tuple(seconds.tolist())]
        found = [better(strategy, batch, costs, measured, movable=movable) for measured in self._measured]
        return found[-1] if len(found) == 2 and all(found) else None


_COMPUTING = ("forward", "backward")


def better(
    strategy: Strategy, batch: int, costs: Sequence[float], seconds: Sequence[float], *, movable: bool = True
) -> tuple[Strategy, float] | None:
    """`strategy` with the speeds= that suit `seconds` of each rank's computing, and what that saves; None if little.

    movable: whether a stage may go to another device, which `places=` of the strategy then says.
    """
    work, mesh = _work(strategy, batch, costs), strategy.mesh
    if not all(second > 0 for second, own in zip(seconds, work, strict=True) if own):
        return None
    speeds = [own / second if own else 0.0 for own, second in zip(work, seconds, strict=True)]
    # Ranks that compute equal parts of each layer are as fast as the slowest of them. One without rows is not known.
    for axis in ("tp", "cp"):
        for group in mesh.groups(axis):
            slowest = min(speeds[rank] for rank in group)
            speeds = [slowest if rank in group else speed for rank, speed in enumerate(speeds)]
    fastest = max(speeds)
    if fastest == 0:
        return None
    # One that had nothing to do is tried with a little.
    speeds = [speed or fastest / _FINE for speed in speeds]
    if max(seconds) <= (1 + _WORTH) * sum(seconds) / len(seconds):
        return None
    now = computing_seconds(strategy, batch, costs, speeds)
    new = replace(strategy, speeds=best_speeds(strategy, batch, costs, speeds))
    then = computing_seconds(new, batch, costs, speeds)
    if movable and not strategy.order:
        # Another device for a stage moves all that the stage holds, so it has to be worth it beside other stages alone.
        measured = tuple(max(round(_FINE * speed / fastest), 1) for speed in speeds)
        other = best_places(replace(strategy, speeds=measured), batch, tuple(costs))
        other = replace(other, speeds=best_speeds(other, batch, costs, speeds))
        took = computing_seconds(other, batch, costs, speeds)
        new, then = (other, took) if took < (1 - _WORTH) * then else (new, then)
    return (new, 1 - then / now) if then < (1 - _WORTH) * now else None


def _work(strategy: Strategy, batch: int, costs: Sequence[float]) -> list[float]:
    """Return what each rank has to do, in rows of the whole model."""
    rows, mesh = strategy.rows(batch), strategy.mesh
    stages = [1.0]
    if strategy.pp > 1:
        sums = [sum(sum(costs[start:stop]) for start, stop in ranges) for ranges in place(costs, strategy)]
        stages = [own / sum(sums) for own in sums]
    places = [mesh.index(rank) for rank in range(mesh.size)]
    return [(rows[at["dp"]][1] - rows[at["dp"]][0]) * stages[at["pp"]] for at in places]
