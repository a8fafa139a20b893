"""What ranks do together around a switch: tell each other what none can know, agree on the plan, fail alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbkit.errors import StrategyError, SwitchError
from nbkit.layout import Layout
from nbkit.rank.parallel.reshard.redistribute import Exchange, plan_together
from nbkit.rank.train.checkpoint.job_state import Held
from nbkit.rank.train.estimate.cost_model import settled
from nbkit.rank.train.estimate.free_memory import crowded
from nbkit.rank.train.switch.model_edits import changes_of
from nbkit.rank.train.switch.plan_cache import Kinds
from nbkit.rank.train.switch.rank_reports import Memory, memory_of, told, unpacked
from nbkit.records.events import Failed
from nbkit.strategy import Strategy

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["News", "agreed", "all_or_none", "news", "planned", "refused"]


@dataclass(frozen=True)
class News:
    """What ranks have told each other before a switch.

    strategy: the one to go to, its ranks in an order that suits all. memory: what their optimizers remember. crowded:
    somebody lacks room for the new side beside the old one. alike: all have made the same groups so far.
    """

    strategy: Strategy
    memory: Memory
    crowded: bool
    alike: bool


def news(job: Job, new: Strategy) -> News:
    """Sides are made from now on with what users changed on the model. Collective, one all-gather.

    Raises StrategyError, on every rank, for what cannot be split, and SwitchError when one of them could not tell.
    """
    blueprint = job.blueprint
    own: tuple[Any, ...] = ()
    failure: Exception | None = None
    try:
        new = settled(job, new)
        own = (
            changes_of(job.side, blueprint.skeleton),
            memory_of(job.side, job.optimizer.inner, blueprint.names),
            crowded(job, new),
            (new.tp_slowest, blueprint.groups_made(new)),
        )
    except StrategyError:
        raise
    except Exception as error:
        failure = error
    everyone = told((_spoken(failure), own), world_size=job.world_size, device=job.device)
    _check(job, "looking at what there is", [spoken for spoken, _ in everyone], failure)
    changes, runs, lacking, groups = zip(*(each for _, each in everyone), strict=True)
    blueprint.follow(changes)
    if len({order for order, _ in groups}) > 1:  # of what its optimizer keeps a rank may know more than another
        new = replace(new, tp_slowest=False)
    return News(new, unpacked(runs, blueprint.names), any(lacking), len(set(groups)) == 1)


def planned(job: Job, new: Strategy, before: Held, target: Held, memory: Memory) -> tuple[Exchange, list[int]]:
    """The exchange from `before` to `target` as this rank sees it, and what the ranks compare: see `agreed`."""
    kinds = job.blueprint.plans.kinds(memory.kinds)
    exchange = job.blueprint.plans.exchange(job.strategy, new, kinds)
    plan, rank = exchange.plan, job.rank
    fits = _fits(before, plan.old[rank], kinds) and _fits(target, plan.new[rank], kinds)
    return exchange, [int(not fits), exchange.stamp, -exchange.stamp]


def agreed(job: Job, exchange: Exchange, compared: Sequence[int], before: Held, target: Held) -> Exchange:
    """The exchange, the same on every rank. compared: of what `planned` gave the largest over all ranks.

    Collective where somebody holds something else than its strategy says: then everything is told.
    """
    different, most, least = compared
    if not different and most == -least:
        return exchange
    return Exchange(plan_together(before, {key: layout for key, (_, layout) in target.items()}), job.rank)


@dataclass
class Said:
    """What a rank says when something was done. doing: what it is doing, for whom it concerns. numbers: told to all.

    largest: of each of the numbers over all ranks, known afterwards.
    """

    doing: str
    numbers: list[int]
    largest: list[int] = field(default_factory=list)


@contextmanager
def all_or_none(job: Job, doing: str, *, numbers: int = 0) -> Iterator[Said]:
    """What is done inside has worked on every rank, or SwitchError is raised on every rank.

    numbers: so many are told, zeros if nothing else. Collective: one small all-reduce; waits for the device.
    """
    said, failure = Said(doing, [0] * numbers), None
    try:
        yield said
    except Exception as error:
        failure = error
    failed, *said.largest = _largest(job, int(failure is not None), *said.numbers)
    if failed:
        everyone = told((_spoken(failure), said.doing), world_size=job.world_size, device=job.device)
        done = next((doing for spoken, doing in everyone if spoken), doing)
        _check(job, done, [spoken for spoken, _ in everyone], failure)


def _spoken(failure: Exception | None) -> str:
    return "" if failure is None else f"{type(failure).__name__}: {failure}".splitlines()[0]


def _check(job: Job, doing: str, spoken: Sequence[str], own: Exception | None) -> None:
    """Raises SwitchError when any rank has spoken of a failure."""
    if failed := [(rank, text) for rank, text in enumerate(spoken) if text]:
        refusal = SwitchError(
            f"The switch failed while {doing}; {job.strategy} goes on, unchanged.",
            numbers="; ".join(f"rank {rank}: {text}" for rank, text in failed[:2]) + "; ..." * (len(failed) > 2),
            hint="%strategy shows what can be picked",
        )
        raise refused(job, refusal) from own


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
