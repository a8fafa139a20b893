"""What ranks do together around a switch: tell each other what none can know, agree on the plan, fail alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from nbkit.errors import SwitchError
from nbkit.events import Failed
from nbkit.layout import Layout
from nbkit.rank.parallel.reshard import Exchange, plan_together
from nbkit.rank.train.follow import changes_of
from nbkit.rank.train.holdings import Held
from nbkit.rank.train.plans import Kinds
from nbkit.rank.train.told import Memory, memory_of, told, unpacked
from nbkit.strategy import Strategy

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["agreed", "all_or_none", "news", "refused"]


def news(job: Job) -> Memory:
    """What the optimizers of all ranks remember; sides are made from now on with what users changed. Collective."""
    blueprint = job.blueprint
    own = changes_of(job.side, blueprint.skeleton), memory_of(job.side, job.optimizer.inner, blueprint.names)
    everyone = told(own, world_size=job.world_size)
    blueprint.follow([changes for changes, _ in everyone])
    return unpacked([runs for _, runs in everyone], blueprint.names)


def agreed(job: Job, new: Strategy, before: Held, target: Held, memory: Memory) -> Exchange:
    """The exchange from `before` to `target`, the same on every rank. Collective: one small all-reduce, mostly."""
    with all_or_none(job, "planning the exchange", numbers=3) as said:
        kinds = job.blueprint.plans.kinds(memory.kinds)
        exchange = job.blueprint.plans.exchange(job.strategy, new, kinds)
        plan, rank = exchange.plan, job.rank
        fits = _fits(before, plan.old[rank], kinds) and _fits(target, plan.new[rank], kinds)
        said.numbers = [int(not fits), exchange.stamp, -exchange.stamp]
    different, most, least = said.largest
    if different or most != -least:
        # Somebody holds something else than its strategy says: then everything is told.
        return Exchange(plan_together(before, {key: layout for key, (_, layout) in target.items()}), job.rank)
    return exchange


@dataclass
class Said:
    """Whole numbers that ranks tell each other on the way. largest: of each over all ranks, known afterwards."""

    numbers: list[int]
    largest: list[int] = field(default_factory=list)


@contextmanager
def all_or_none(job: Job, doing: str, *, numbers: int = 0) -> Iterator[Said]:
    """What is done inside has worked on every rank, or SwitchError is raised on every rank.

    numbers: so many are told, zeros if nothing else. Collective: one small all-reduce; waits for the device.
    """
    failure, goes_on = "", str(job.strategy)
    said = Said([0] * numbers)
    try:
        yield said
    except Exception as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
        cause = error
    failed, *said.largest = _largest(job, int(bool(failure)), *said.numbers)
    if not failed:
        return
    failures = told(failure, world_size=job.world_size)
    if told_of := [(rank, text) for rank, text in enumerate(failures) if text]:
        refusal = SwitchError(
            f"The switch failed while {doing}; {goes_on} goes on, unchanged.",
            numbers="; ".join(f"rank {rank}: {text}" for rank, text in told_of[:2]) + "; ..." * (len(told_of) > 2),
            hint="%strategy shows what can be picked",
        )
        raise refused(job, refusal) from (cause if failure else None)


def refused(job: Job, error: SwitchError) -> SwitchError:
    """The error, of which everyone has been told: all ranks raise it alike."""
    job.ledger.emit(Failed(job.step, error="SwitchError", what=f"{error.what} {error.numbers}"))
    return error


def _fits(held: Held, planned: Mapping[str, Layout], kinds: Kinds) -> bool:
    """Whether a rank holds what its strategy says."""
    return held.keys() == planned.keys() and all(
        layout == planned[key] and tensor.dtype == kinds[key] for key, (tensor, layout) in held.items()
    )


def _largest(job: Job, *numbers: int) -> list[int]:
    """Of each number the largest over all ranks. Collective: one all-reduce; waits for the device."""
    if job.world_size == 1:
        return list(numbers)
    found = torch.tensor(numbers, dtype=torch.int64, device=job.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()
