"""Find what a training would be on another number of ranks, or why it cannot be, before anything is changed.

`shrink` goes on without the ranks that have died, if memory and mesh allow it, for `on_failure="shrink"`. The state of
a dead rank has to be somewhere while it moves to the others. So the rank is replaced first, and the number of ranks
changes at the boundary where all have met. The ranks with the highest numbers leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from nbkit.errors import NbkitError, Stopped, StrategyError, TrainingError
from nbkit.rank.comm.agree import largest
from nbkit.rank.train.estimate.free_memory import left, side_bytes
from nbkit.rank.train.replace.resume_fit import FitRange
from nbkit.rank.world.world import World
from nbkit.strategy import Strategy
from nbkit.techniques import DEGREES

Trainer = Any  # nbkit.rank.train.trainer's, which imports this file

_OFFERED = 4  # how many sizes that fit an error offers


@dataclass(frozen=True)
class WantedWorld:
    """The world to form.

    ranks: its number of ranks. strategy: the one under which the training goes on there; None if nothing trains. pins:
    of every rank, as the notebook has planned them (see nbkit.bridge.parent.spec.RankPin), with label and why; () if
    each rank keeps its own.
    """

    ranks: int
    strategy: Strategy | None
    pins: tuple[dict[str, Any], ...]


class ResizeAtBoundary(Stopped):
    """Raised on all ranks at one step boundary, to go on with another number of ranks.

    done: is told the result (event as a dict, or None; error, or None).
    """

    def __init__(self, wanted: WantedWorld) -> None:
        super().__init__(f"goes on with {wanted.ranks} ranks")
        self.wanted = wanted
        self.done: Callable[[dict[str, Any] | None, BaseException | None], None] = lambda result, error: None


def planned(trainer: Trainer, ranks: int, text: str, pins: tuple[dict[str, Any], ...]) -> WantedWorld:
    """Return the world of `ranks` ranks, with strategy `text` or the one in force with another dp. Collective.

    Raises StrategyError or TrainingError, on every rank alike, with what would fit. Reasons: the degrees or the global
    batch do not divide, a planned switch does not fit there, or a rank's memory does not hold its part.
    """
    job = trainer.job
    job.sync.resync()
    try:
        strategy = _strategy(job.strategy, ranks, text)
        job.feed.fits(strategy)
        job.plan.check(lambda planned: Strategy.parse(planned, ranks), job.feed.fits)
        job.builder.finder.sync([strategy])
        job.builder.plan(strategy)
    except (StrategyError, TrainingError) as error:
        raise type(error)(
            f"The training cannot go on with {ranks} ranks. {error.what}",
            numbers=error.numbers,
            hint=_offers(trainer, ranks, text) or error.hint,
        ) from error
    strategy = job.cost_model().placed(strategy, now=strategy)
    _check_memory(trainer, strategy, ranks)
    job.builder.agree_on(strategy)
    return WantedWorld(ranks, strategy, pins)


def scaled(now: Strategy, ranks: int) -> Strategy:
    """Return `now` on `ranks` ranks: dp takes what the other axes leave.

    Raises StrategyError if they do not divide.
    """
    rest, left_over = divmod(ranks, now.mesh.size // now.dp)
    if left_over or not rest:
        others = " ".join(f"{axis}={now.degree(axis)}" for axis in DEGREES if axis != "dp")
        return Strategy.parse(others, ranks)  # which says why
    shard = now.shard if now.shard < now.dp and rest % now.shard == 0 and now.shard < rest else 0
    # What was measured on other ranks does not hold for these.
    return replace(now, dp=rest, shard=shard, ep=gcd(now.ep, rest), speeds=(), places=())


def _strategy(now: Strategy, ranks: int, text: str) -> Strategy:
    return Strategy.parse(text, ranks) if text else scaled(now, ranks)


def _offers(trainer: Trainer, ranks: int, text: str) -> str:
    """Return commands for the numbers of ranks near `ranks` that would fit."""
    job = trainer.job

    def fits(other: int) -> bool:
        try:
            job.feed.fits(_strategy(job.strategy, other, text))
        except NbkitError:
            return False
        return bool(other != job.world_size)

    near = sorted(range(1, 2 * max(ranks, job.world_size) + 1), key=lambda other: abs(other - ranks))
    return "   or   ".join(f"%cluster resize {n}" for n in sorted(list(filter(fits, near))[:_OFFERED]))


def _check_memory(trainer: Trainer, strategy: Strategy, ranks: int) -> None:
    """Raise TrainingError if the memory of a rank does not hold the training.

    Between the two worlds a rank holds its old part and its new one. With fewer ranks it holds the new one twice.
    """
    job, local = trainer.job, max(ranks, World.join_from_env().place.local_world_size)
    kinds = job.bytes_per_element()
    part = max(side_bytes(job.builder, kinds, strategy, rank) for rank in range(ranks))
    times = 2 if ranks < job.world_size else 1
    free = left(job.device, ranks=local)
    # The least room of any rank. `largest` gets negative numbers; -(1 << 60) if unknown.
    least = -largest([-free if free is not None else -(1 << 60)], device=job.device)[0]
    if times * part > least:
        raise TrainingError(
            f"{ranks} ranks do not hold this training.",
            numbers=f"{part / 1e6:,.4g} MB of weights, gradients and optimizer on a rank under {strategy}"
            + (", twice while it moves" if times == 2 else "")
            + f"; {least / 1e6:,.4g} MB are free",
            hint=f"%cluster resize {ranks} --strategy zero3   or more ranks; %cluster status shows memory",
        )


def shrink(trainer: Trainer, span: FitRange, say: Callable[[str], None]) -> FitRange:
    """Raise ResizeAtBoundary, to go on with `span.fewer` ranks less. Collective, at a step boundary.

    If that is not possible, say why, and return the span with which all ranks go on, the replaced ones too.
    """
    now, place = trainer.job.world_size, World.join_from_env().place
    try:
        if place.local_world_size != now:
            raise TrainingError("The number of ranks changes on one host alone.", numbers=f"{now} ranks on several")
        wanted = planned(trainer, now - span.fewer, "", ())
    except (StrategyError, TrainingError) as refused:
        say(f"on_failure='shrink': goes on with {now} ranks. {refused.what} {refused.numbers}")
        return replace(span, fewer=0)
    raise ResizeAtBoundary(wanted)
