"""Measures the speed of each rank in every step, and gives the ranks rows, stages or experts to match.

The speed of a rank is its part of the work (rows x cost of its blocks), divided by the seconds that it computes forward
and backward. Waiting for other ranks does not count. The work is divided anew only if two steps in a row show a gain.

Under `ep`, the work of a rank is the tokens that the router sends to its experts. The mean tokens of the newest steps
decide which experts change places. The tokens of the next step show what this would have saved. The forward seconds of
a token come from a line through the tokens and seconds of the ranks (`seconds_of_a_token`). The ratio of forward and
backward seconds in a step gives the backward seconds. A switch to the same strategy with another `experts=` moves the
experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from nbkit.errors import SwitchError
from nbkit.planner.expert_places import Tokens, evened, most_tokens, moved_experts
from nbkit.planner.stages import best_places, best_speeds, computing_seconds, place
from nbkit.rank.comm.agree import largest
from nbkit.rank.device import accelerator
from nbkit.rank.telemetry.phases import StepPhases, clock
from nbkit.rank.train.estimate.time_model import switch_seconds
from nbkit.rank.train.job import Job
from nbkit.records.events import Rebalanced
from nbkit.strategy import Strategy

_WORTH = 0.05  # the least gain that is worth a change, as a fraction of the computing time of a step
_NEWEST = 8  # about so many newest steps show which experts are popular
_FINE = 100  # the least speed of a rank is the speed of the fastest rank divided by this


class Rebalancing:
    """Finds a better division of the work, equal on all ranks. device: the device for collectives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step: StepPhases | None = None
        self._measured: list[tuple[float, ...]] = []
        self._tokens: list[list[float]] = []  # per layer and expert, the mean of the newest steps
        self._seen = 0  # number of these steps
        self._strategy: Strategy | None = None
        self._stays: Strategy | None = None  # a switch away from it was refused, or taken back
        self._judged_from = 0  # the step from which experts are judged again

    def __call__(self, step: StepPhases) -> None:
        """Note a finished step: see StepClock.listeners."""
        self._step = step

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Measure the steps that are made inside."""
        clock.listeners.append(self)
        try:
            yield
        except BaseException:  # an interrupt may leave ranks with other measurements
            self.forget()
            raise
        finally:
            clock.listeners.remove(self)

    def forget(self) -> None:
        """Drop what was found. Called when ranks may have found other things, such as ranks that have joined."""
        self._strategy, self._measured, self._tokens, self._seen = None, [], [], 0
        self._stays, self._judged_from = None, 0

    def act(self, job: Job, batch: int, left: int) -> None:
        """Switch to a better division of the work, if there is one. Collective, at a step boundary.

        batch: rows of a global batch. left: the number of steps that are still to be made.
        """
        if job.strategy == self._stays:
            return
        self._stays = None
        if job.strategy.ep > 1:
            self._move_experts(job, left or job.step)
            return
        facts = job.builder.facts
        blocks = len(facts.chain) if facts.chain is not None else 1
        link = job.builder.link
        movable = link is None or len(set(link.node_of)) == 1
        found = self.due(job.strategy, batch, facts.costs or (1.0,) * blocks, movable=movable)
        if found is not None and self._switched(job, found[0]):
            strategy, gain = found
            speeds = ":".join(map(str, strategy.speeds)) or "equal"
            speeds += " places=" * bool(strategy.places) + ":".join(map(str, strategy.places))
            job.ledger.emit(Rebalanced(job.step, speeds=speeds, gain=gain))

    def _move_experts(self, job: Job, left: int) -> None:
        """Switch to other places of experts, if that pays within the `left` steps. Collective."""
        strategy, counts = job.strategy, [layer.count for layer in job.builder.facts.routed.layers]
        size, layers, compute = strategy.mesh.size, len(counts), self._seconds("forward", "backward")
        step = self._step if self._step is not None and self._step.routed else None
        routed = step.routed if step is not None else [{} for _ in counts]
        spent = step.expert_seconds() if step is not None else [0.0] * layers
        own = [[float(tokens.get(n, 0)) for n in range(count)] for tokens, count in zip(routed, counts, strict=True)]
        rows = [[0.0] * (2 + 2 * layers) for _ in range(size)]
        rows[job.rank] = [compute, self._seconds("forward"), *map(sum, own), *spent]
        told = iter(self._summed([number for each in (*rows, *own) for number in each]))
        rows = [[next(told) for _ in row] for row in rows]
        copies = size // strategy.ep // strategy.pp  # groups that have the same layers
        tokens = [[next(told) / copies for _ in range(count)] for count in counts]
        before, self._seen = self._tokens, min(self._seen + 1, _NEWEST)
        if not before:
            self._tokens = tokens
            return
        self._tokens = [
            [old + (new - old) / self._seen for old, new in zip(*pair, strict=True)]
            for pair in zip(before, tokens, strict=True)
        ]
        if strategy != self._strategy:
            self._strategy = strategy  # do not use the first step under it, which is not typical
            return
        if job.step < self._judged_from:
            return
        self._judged_from = job.step + _NEWEST  # choosing among hundreds of experts may take seconds
        compute, forward = (sum(row[column] for row in rows) / size for column in (0, 1))
        sums, times = ([row[2 + at : 2 + at + layers] for row in rows] for at in (0, layers))
        each = seconds_of_a_token(sums, times, strategy.mesh.shard_groups(strategy.ep)[0])
        found = better_places(strategy, before, tokens, each * compute / forward if forward else 0.0, compute)
        if found is not None:
            new, saves, gain = found
            if saves * left > self._pause(job, new) and self._switched(job, new):
                job.ledger.emit(Rebalanced(job.step, experts=moved_experts(strategy, new, tokens), gain=gain))

    def _switched(self, job: Job, new: Strategy) -> bool:
        """Switch to `new`, and return True. If that is refused, the training goes on as it is. Collective."""
        self._stays = job.strategy  # also if the first step under `new` fails and takes the switch back
        try:
            job.switch(str(new))
        except SwitchError as refused:  # by all ranks alike
            if job.rank == 0:
                warnings.warn(f"balance=True leaves the work as it is: {refused.what} {refused.numbers}", stacklevel=2)
            return False
        return True

    def _pause(self, job: Job, new: Strategy) -> float:
        """Return the seconds without a step that a switch to `new` takes on the slowest rank. Collective."""
        seen = job.cost_model()
        pause = switch_seconds(job, seen.census, new, seen.census.flow(job.strategy, new))
        return largest([round(1e9 * pause)], device=self._device)[0] / 1e9

    def _seconds(self, *states: str) -> float:
        """Return how long this rank was in `states` in the last step. Waits for its device."""
        step = self._step
        if step is None:
            return 0.0
        if not step.over():
            accelerator().wait_for_stream(self._device)
        return sum(stop - start for state, start, stop in step.intervals() if state in states) / 1e9

    def _summed(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of `numbers` over the ranks. Collective."""
        told = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(told)
        return told.tolist()  # type: ignore[no-any-return]

    def due(
        self, strategy: Strategy, batch: int, costs: Sequence[float], *, movable: bool = True
    ) -> tuple[Strategy, float] | None:
        """Return (a better strategy, the fraction of the computing seconds that it saves), or None. Collective.

        batch: rows of a global batch. costs: the cost of each block, if there is a pipeline. movable: see `better`.
        """
        seconds = [0.0] * strategy.mesh.size
        seconds[dist.get_rank() if dist.is_initialized() else 0] = self._seconds("forward", "backward")
        seconds = self._summed(seconds)
        if strategy != self._strategy:
            # The first step under a strategy is not typical, because it makes buffers and proofs.
            self._strategy, self._measured = strategy, []
            return None
        self._measured = [*self._measured[-1:], tuple(seconds)]
        found = [better(strategy, batch, costs, measured, movable=movable) for measured in self._measured]
        return found[-1] if len(found) == 2 and all(found) else None


def better_places(
    strategy: Strategy, popular: Tokens, tokens: Tokens, each: float, compute: float
) -> tuple[Strategy, float, float] | None:
    """Return `strategy` with experts exchanged, the seconds of a step that this saves, and the part of its compute.

    Returns None if it saves little. popular: the mean tokens of each expert, which decide the exchange. tokens:
    those of one group in one step, which show what the exchange saves. each: seconds for a token. compute: the mean
    seconds for which a rank computes in that step.
    """
    each /= strategy.pp  # the stages of a pipeline compute at a time
    most, mean = most_tokens(strategy, tokens), sum(map(sum, tokens)) / strategy.ep
    takes = each * (most - mean) + compute
    if each * (most - mean) <= _WORTH * takes:
        return None
    new = evened(strategy, popular)
    saves = each * (most - most_tokens(new, tokens))
    return (new, saves, saves / takes) if saves > _WORTH * takes else None


def seconds_of_a_token(tokens: Tokens, seconds: Tokens, groups: Sequence[Sequence[int]]) -> float:
    """Return the forward seconds that an expert needs for one token; 0 if ranks with more tokens were not slower.

    tokens, seconds: for each rank and layer. In a layer, all ranks of a group need the same seconds to call their
    experts, beside the seconds for tokens. So this is the slope of a line of least squares. It goes through tokens and
    seconds, after subtracting the means of the group in the layer.
    """
    both = square = 0.0
    for group in groups:
        layers = (zip(*(of[rank] for rank in group), strict=True) for of in (tokens, seconds))
        for many, took in zip(*layers, strict=True):
            mean, usual = sum(many) / len(group), sum(took) / len(group)
            both += sum((one - mean) * (other - usual) for one, other in zip(many, took, strict=True))
            square += sum((one - mean) ** 2 for one in many)
    return max(both / square, 0.0) if square else 0.0


def better(
    strategy: Strategy, batch: int, costs: Sequence[float], seconds: Sequence[float], *, movable: bool = True
) -> tuple[Strategy, float] | None:
    """Return (`strategy` with speeds= that suit the computing `seconds` of each rank, the fraction of time it saves).

    Returns None if it saves little. movable: a stage may move to another device, by `places=` of the strategy.
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
    # A rank without work gets a little work, so that it can be measured.
    speeds = [speed or fastest / _FINE for speed in speeds]
    if max(seconds) <= (1 + _WORTH) * sum(seconds) / len(seconds):
        return None
    now = computing_seconds(strategy, batch, costs, speeds)
    new = replace(strategy, speeds=best_speeds(strategy, batch, costs, speeds))
    then = computing_seconds(new, batch, costs, speeds)
    if movable and not strategy.order:
        # Moving a stage moves its whole state. So this must gain more than a new division alone.
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
