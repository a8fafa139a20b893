"""Bring ranks to agree around a switch: they fail alike, and they carry out the same exchange.

Before a switch all ranks gather what each rank's optimizer keeps of each parameter, in few bytes, and the digest of the
plan. Who holds which part follows from the plan, so that is not gathered. Only the rank that holds a parameter knows
what its optimizer keeps of it. Most of it is alike for all parameters, so it is sent once for each run of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nbkit.errors import StrategyError
from nbkit.rank.parallel.plan import ParallelPlan
from nbkit.rank.parallel.reshard.redistribute import Exchange, plan_collectively
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import JobState, by_name, bytes_per_element
from nbkit.rank.train.estimate.cost_model import CostModel
from nbkit.rank.train.estimate.free_memory import crowded, side_bytes
from nbkit.rank.train.switch.exchange_cache import ExchangeCache, Kinds
from nbkit.rank.train.switch.model_edits import changes_of
from nbkit.rank.train.transaction import Ballot
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout


def planned(
    exchanges: ExchangeCache,
    kinds: Kinds,
    old: ParallelPlan,
    new: ParallelPlan,
    before: JobState,
    target: JobState,
) -> tuple[Exchange, list[int]]:
    """Return the exchange from `before` to `target` as this rank sees it, and what the ranks compare: see `agreed`."""
    exchange = exchanges.exchange(old, new, kinds)
    plan, rank = exchange.plan, exchanges.rank
    fits = _fits(before, plan.old[rank], kinds) and _fits(target, plan.new[rank], kinds)
    return exchange, [int(not fits), exchange.stamp, -exchange.stamp]


def agreed(exchange: Exchange, compared: Sequence[int], before: JobState, target: JobState, *, rank: int) -> Exchange:
    """Return the exchange, the same on every rank. compared: the largest, over all ranks, of the numbers of `planned`.

    Collective if a rank holds something else than its strategy says: then all layouts are gathered.
    """
    different, most, least = compared
    if not different and most == -least:
        return exchange
    return Exchange(plan_collectively(before, {key: layout for key, (_, layout) in target.items()}), rank)


def _fits(held: JobState, planned: Mapping[str, Layout], kinds: Kinds) -> bool:
    """Return True if a rank holds what its strategy says."""
    return held.keys() == planned.keys() and all(
        layout == planned[key] and tensor.dtype == kinds[key] for key, (tensor, layout) in held.items()
    )


class _Scalar(NamedTuple):
    value: Any
    dtype: torch.dtype


class ParameterRun(NamedTuple):
    """Neighbouring parameters of which an optimizer keeps the same. kinds: of what it keeps per element."""

    first: int
    length: int
    kinds: dict[str, torch.dtype]
    numbers: dict[str, Any]


class OptimizerMemory(NamedTuple):
    """A description of what an optimizer remembers, without the elements.

    kinds: name -> {key: dtype}; numbers: see job_state.scalars.
    """

    kinds: dict[str, dict[str, torch.dtype]]
    numbers: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class RankKnowledge:
    """Facts that ranks learn of each other before a switch.

    strategy: the one to go to, its ranks in an order that suits all. memory: what their optimizers keep. crowded: a
    rank lacks room for the new sharded model beside the old one. alike: all have made the same groups so far.
    """

    strategy: Strategy
    memory: OptimizerMemory
    crowded: bool
    alike: bool


def gather(
    sharded_model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    builder: Builder,
    cost_model: Callable[[], CostModel],
    new: Strategy,
    ranks: Ballot,
) -> RankKnowledge:
    """Return what ranks know of each other. What users changed on the model counts from now on. One all-gather.

    Raises StrategyError, on every rank, for what cannot be split, and SwitchError if a rank failed to look.
    """
    own: tuple[Any, ...] = ()
    asked = new
    failure: Exception | None = None
    try:
        new = cost_model().placed(new, now=sharded_model.strategy)
        plan = builder.plan(new)
        kinds = bytes_per_element(sharded_model, optimizer, builder.skeleton, builder.template.groups)
        own = (
            changes_of(sharded_model, builder.skeleton),
            memory_of(sharded_model, optimizer, builder.names),
            crowded(side_bytes(builder, kinds, new, builder.rank), ranks.device),
            (plan.digest, builder.groups_made(plan)),
        )
    except StrategyError:
        raise
    except Exception as error:
        failure = error
    everyone = ranks.gather(own, "looking at what there is", failure)
    changes, runs, lacking, groups = zip(*everyone, strict=True)
    builder.follow(changes)
    if len({digest for digest, _ in groups}) > 1:  # a rank may know more of its optimizer than another
        new = replace(asked, slowest="")
    return RankKnowledge(new, unpacked(runs, builder.names), any(lacking), len(set(groups)) == 1)


def memory_of(
    sharded_model: ShardedModel, optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> list[ParameterRun]:
    """Return what `optimizer` remembers of the parameters here. names: of the whole model's, the same on every rank."""
    kept = job_state.per_element(sharded_model, optimizer)
    kinds = by_name({key: tensor.dtype for key, (tensor, _) in kept.items()})
    numbers = job_state.scalars(sharded_model, optimizer)
    runs: list[ParameterRun] = []
    for place, name in enumerate(names):
        if name not in numbers:
            continue
        run = ParameterRun(place, 1, kinds.get(name, {}), _packed(numbers[name]))
        last = runs[-1] if runs else None
        if last is not None and last.first + last.length == place and _alike(last, run):
            runs[-1] = last._replace(length=last.length + 1)
        else:
            runs.append(run)
    return runs


def unpacked(everyone: Sequence[Sequence[ParameterRun]], names: Sequence[str]) -> OptimizerMemory:
    """Return what the optimizers of all ranks remember, together."""
    memory = OptimizerMemory({}, {})
    for run in (run for runs in everyone for run in runs):
        numbers = {
            key: torch.tensor(value.value, dtype=value.dtype) if isinstance(value, _Scalar) else value
            for key, value in run.numbers.items()
        }
        for name in names[run.first : run.first + run.length]:
            if run.kinds:
                memory.kinds.setdefault(name, {}).update(run.kinds)
            memory.numbers.setdefault(name, {}).update(numbers)
    return memory


def _packed(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return `numbers` with tensors of no dim as plain values: a pickled tensor takes half a kilobyte."""
    return {
        key: _Scalar(value.item(), value.dtype) if isinstance(value, Tensor) and value.ndim == 0 else value
        for key, value in numbers.items()
    }


def _alike(one: ParameterRun, other: ParameterRun) -> bool:
    if one.kinds != other.kinds or one.numbers.keys() != other.numbers.keys():
        return False
    # Compare plain numbers only: anything else belongs to one parameter.
    return all(isinstance(a, int | float | _Scalar) and a == other.numbers[key] for key, a in one.numbers.items())
