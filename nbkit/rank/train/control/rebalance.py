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
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class ExpertLoad:
    """The tokens and seconds of experts in a step, equal on all ranks.

    tokens: for each layer and expert, the tokens in one group of ranks; the mean of the groups that have the layer.
    tokens_of_ranks, seconds_of_ranks: for each rank and layer, the tokens that its experts computed, and the seconds of
    their forward passes. compute, forward: seconds of forward and backward, and of forward, the mean over ranks.
    """

    tokens: list[list[float]]
    tokens_of_ranks: list[list[float]]
    seconds_of_ranks: list[list[float]]
    compute: float
    forward: float

    def seconds_of_a_token(self, strategy: Strategy) -> float:
        """Return the seconds that an expert needs for one token, forward and backward; 0 if they are not known."""
        groups, _ = strategy.mesh.shard_groups(strategy.ep)
        each = seconds_of_a_token(self.tokens_of_ranks, self.seconds_of_ranks, groups)
        return each * self.compute / self.forward if self.forward else 0.0


class Rebalancing:
    """Finds a better division of the work, equal on all ranks. device: the device for collectives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step: StepPhases | None = None
        self._measured: list[tuple[float, ...]] = []
        self._tokens: Tokens = []  # per layer and expert, the mean of the newest steps
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
        strategy, load = job.strategy, self._expert_load(job)
        popular = self._note_tokens(load.tokens)
        if not popular:
            return
        if strategy != self._strategy:
            self._strategy = strategy  # do not use the first step under it, which is not typical
            return
        if job.step < self._judged_from:
            return
        self._judged_from = job.step + _NEWEST  # choosing among hundreds of experts may take seconds
        found = better_places(strategy, popular, load.tokens, load.seconds_of_a_token(strategy), load.compute)
        if found is None:
            return
        new, saves, gain = found
        if saves * left > self._pause(job, new) and self._switched(job, new):
            job.ledger.emit(Rebalanced(job.step, experts=moved_experts(strategy, new, load.tokens), gain=gain))

    def _expert_load(self, job: Job) -> ExpertLoad:
        """Return the load of the experts of all ranks in the last step. Collective."""
        strategy, size = job.strategy, job.strategy.mesh.size
        compute, forward = self._seconds("forward", "backward"), self._seconds("forward")
        tokens, expert_seconds = self._own_experts([layer.count for layer in job.builder.facts.routed.layers])
        # Each rank fills its own row of a table: its compute, its forward, then a number for each layer, twice.
        own = [compute, forward, *map(sum, tokens), *expert_seconds]
        rows = [own if rank == job.rank else [0.0] * len(own) for rank in range(size)]
        summed = self._summed(*rows, *tokens)
        rows, tokens, layers = summed[:size], summed[size:], len(tokens)
        copies = size // strategy.ep // strategy.pp  # groups that have the same layers
        return ExpertLoad(
            tokens=[[number / copies for number in layer] for layer in tokens],
            tokens_of_ranks=[row[2 : 2 + layers] for row in rows],
            seconds_of_ranks=[row[2 + layers :] for row in rows],
            compute=sum(row[0] for row in rows) / size,
            forward=sum(row[1] for row in rows) / size,
        )

    def _own_experts(self, counts: Sequence[int]) -> tuple[list[list[float]], list[float]]:
        """Return what this rank's experts did in the last step: tokens by layer and expert, forward seconds by layer.

        counts: the number of experts of each layer. All results are 0 if the step was not measured.
        """
        step = self._step
        if step is None or not step.routed:
            return [[0.0] * count for count in counts], [0.0] * len(counts)
        layers = zip(step.routed, counts, strict=True)
        return [[float(routed.get(n, 0)) for n in range(count)] for routed, count in layers], step.expert_seconds()

    def _note_tokens(self, tokens: Tokens) -> Tokens:
        """Include the tokens of a step in the mean of the newest steps. Return the mean before; [] at the first step.

        The new step has the weight 1 / _NEWEST, or 1 / steps while there are fewer steps.
        """
        before, self._seen = self._tokens, min(self._seen + 1, _NEWEST)
        self._tokens = tokens
        if before:
            layers = [zip(*layer, strict=True) for layer in zip(before, tokens, strict=True)]
            self._tokens = [[mean + (new - mean) / self._seen for mean, new in layer] for layer in layers]
        return before

    def _switched(self, job: Job, new: Strategy) -> bool:
        """Switch to `new`, and return True. If that is refused, the training goes on as it is. Collective."""
        self._stays = job.strategy  # also if the first step under `new` fails and takes the switch back
        try:
            job.switch(str(new))
        except SwitchError as refused:  # by all ranks alike
            if job.rank == 0:
                warnings.warn(
                    f"balance=True does not change the work of the ranks: {refused.what} {refused.numbers}",
                    stacklevel=2,
                )
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

    def _summed(self, *rows: Sequence[float]) -> list[list[float]]:
        """Return the sums of the numbers of each row over the ranks. One all-reduce."""
        numbers = [number for row in rows for number in row]
        told = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(told)
        return [sums.tolist() for sums in told.cpu().split([len(row) for row in rows])]

    def due(
        self, strategy: Strategy, batch: int, costs: Sequence[float], *, movable: bool = True
    ) -> tuple[Strategy, float] | None:
        """Return (a better strategy, the fraction of the computing seconds that it saves), or None. Collective.

        batch: rows of a global batch. costs: the cost of each block, if there is a pipeline. movable: see `better`.
        """
        seconds = [0.0] * strategy.mesh.size
        seconds[dist.get_rank() if dist.is_initialized() else 0] = self._seconds("forward", "backward")
        (seconds,) = self._summed(seconds)
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
