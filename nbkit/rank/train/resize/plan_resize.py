"""Plan a training on another number of ranks, or say why that is impossible, before anything changes.

`shrink` implements `on_failure="shrink"`: it continues without the ranks that have died, if memory and mesh allow it.
The state of a dead rank must be in some process before it can move to the others. So the rank is replaced first, and
the number of ranks changes at the next step boundary. The ranks with the highest numbers leave.
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

Trainer = Any  # nbkit.rank.train.trainer.Trainer: that file imports this one

_OFFERED = 4  # number of possible sizes that an error suggests


@dataclass(frozen=True)
class WantedWorld:
    """The world to form.

    ranks: its number of ranks. strategy: the strategy of the training there; None if nothing trains. pins: the RankPin
    of every rank (see nbkit.bridge.parent.spec), as the notebook has planned it, with label and why; () if each rank
    keeps its own.
    """

    ranks: int
    strategy: Strategy | None
    pins: tuple[dict[str, Any], ...]


class ResizeAtBoundary(Stopped):
    """Raised on all ranks at the same step boundary, to continue with another number of ranks.

    done: called with the result: (event as a dict, or None; error, or None).
    """

    def __init__(self, wanted: WantedWorld) -> None:
        super().__init__(f"continues with {wanted.ranks} ranks")
        self.wanted = wanted
        self.done: Callable[[dict[str, Any] | None, BaseException | None], None] = lambda result, error: None


def planned(trainer: Trainer, ranks: int, text: str, pins: tuple[dict[str, Any], ...]) -> WantedWorld:
    """Return the world of `ranks` ranks, with strategy `text`, or with the one in force and another dp. Collective.

    Raises StrategyError or TrainingError on every rank, and suggests numbers of ranks that would fit. Reasons: the
    degrees or the global batch cannot be divided, a planned switch does not fit, or a rank has too little memory.
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
            f"The training cannot continue with {ranks} ranks. {error.what}",
            numbers=error.numbers,
            hint=_offers(trainer, ranks, text) or error.hint,
        ) from error
    strategy = job.cost_model().placed(strategy, now=strategy)
    _check_memory(trainer, strategy, ranks)
    job.builder.agree_on(strategy)
    return WantedWorld(ranks, strategy, pins)


def scaled(now: Strategy, ranks: int) -> Strategy:
    """Return strategy `now` for `ranks` ranks: only dp changes.

    Raises StrategyError if the degrees of the other axes do not divide `ranks`.
    """
    rest, left_over = divmod(ranks, now.mesh.size // now.dp)
    if left_over or not rest:
        others = " ".join(f"{axis}={now.degree(axis)}" for axis in DEGREES if axis != "dp")
        return Strategy.parse(others, ranks)  # raises an error that says why
    shard = now.shard if now.shard < now.dp and rest % now.shard == 0 and now.shard < rest else 0
    ep = gcd(now.ep, rest)
    experts = now.experts if ep == now.ep else ()
    # Drop speeds and places, which were measured for the old ranks.
    return replace(now, dp=rest, shard=shard, ep=ep, experts=experts, speeds=(), places=())


def _strategy(now: Strategy, ranks: int, text: str) -> Strategy:
    return Strategy.parse(text, ranks) if text else scaled(now, ranks)


def _offers(trainer: Trainer, ranks: int, text: str) -> str:
    """Return commands for numbers of ranks that would fit, near `ranks`."""
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
    """Raise TrainingError if a rank does not have enough memory for the training.

    While the world changes, a rank holds its old part and its new one. With fewer ranks it holds the new one twice.
    """
    job, local = trainer.job, max(ranks, World.join_from_env().place.local_world_size)
    kinds = job.bytes_per_element()
    part = max(side_bytes(job.builder, kinds, strategy, rank) for rank in range(ranks))
    times = 2 if ranks < job.world_size else 1
    free = left(job.device, ranks=local)
    # The minimum over the ranks, as a maximum of negative numbers. Unknown counts as 1 << 60.
    least = -largest([-free if free is not None else -(1 << 60)], device=job.device)[0]
    if times * part > least:
        raise TrainingError(
            f"{ranks} ranks do not have enough memory for this training.",
            numbers=f"{part / 1e6:,.4g} MB of weights, gradients and optimizer on a rank under {strategy}"
            + (", twice during the change" if times == 2 else "")
            + f"; {least / 1e6:,.4g} MB are free",
            hint=f"%cluster resize {ranks} --strategy zero3   or more ranks; %cluster status shows memory",
        )


def shrink(trainer: Trainer, span: FitRange, say: Callable[[str], None]) -> FitRange:
    """Raise ResizeAtBoundary, to continue with `span.fewer` fewer ranks. Collective, at a step boundary.

    If that is impossible, say why, and return the span with which all ranks continue, including the replaced ones.
    """
    now, place = trainer.job.world_size, World.join_from_env().place
    try:
        if place.local_world_size != now:
            raise TrainingError(
                "The number of ranks can change only if all ranks are on one host.",
                numbers=f"{now} ranks on several hosts",
            )
        wanted = planned(trainer, now - span.fewer, "", ())
    except (StrategyError, TrainingError) as refused:
        say(f"on_failure='shrink': continues with {now} ranks. {refused.what} {refused.numbers}")
        return replace(span, fewer=0)
    raise ResizeAtBoundary(wanted)
