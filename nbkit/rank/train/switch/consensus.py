"""Make ranks agree before a switch, so that all ranks fail, or all carry out the same exchange.

Before a switch all ranks gather a short description of each rank's optimizer state, and the digest of the plan. The
plan says which rank holds which part, so this is not gathered. But only a rank that holds a parameter knows which state
its optimizer keeps for it. Most parameters have the same state, so ranks send it once for consecutive equal parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nbkit.errors import StrategyError
from nbkit.rank.parallel.reshard.redistribute import Exchange, InPlace, plan_collectively
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import JobState, by_name, bytes_per_element
from nbkit.rank.train.estimate.cost_model import CostModel
from nbkit.rank.train.estimate.free_memory import crowded, left, round_bytes, side_bytes
from nbkit.rank.train.switch.exchange_cache import Kinds
from nbkit.rank.train.switch.model_edits import changes_of
from nbkit.rank.train.transaction import Ballot
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout

AnyExchange = TypeVar("AnyExchange", Exchange, InPlace)


def numbers_of(exchange: Exchange | InPlace, before: JobState, target: JobState, kinds: Kinds) -> list[int]:
    """Return the numbers of this rank's exchange from `before` to `target` that ranks compare: see `agreed`."""
    plan, rank = exchange.plan, exchange.rank
    fits = _fits(before, plan.old[rank], kinds) and _fits(target, plan.new[rank], kinds)
    return [int(not fits), exchange.stamp, -exchange.stamp]


def agreed(exchange: AnyExchange, compared: Sequence[int], before: JobState, target: JobState) -> AnyExchange:
    """Return the same exchange on every rank. compared: the maximum over all ranks of each of `numbers_of`.

    If the tensors of a rank differ from its strategy, or a rank had no memory for large rounds, all layouts are
    gathered, and rounds are small. In this case the call is collective.
    """
    different, most, least = compared
    if not different and most == -least:
        return exchange
    plan = plan_collectively(before, {key: layout for key, (_, layout) in target.items()})
    return type(exchange)(plan, exchange.rank)


def _fits(held: JobState, planned: Mapping[str, Layout], kinds: Kinds) -> bool:
    """Return True if the tensors of a rank match the plan of its strategy."""
    return held.keys() == planned.keys() and all(
        layout == planned[key] and tensor.dtype == kinds[key] for key, (tensor, layout) in held.items()
    )


class _Scalar(NamedTuple):
    value: Any
    dtype: torch.dtype


class ParameterRun(NamedTuple):
    """Successive parameters for which the optimizer keeps the same state.

    first: index of the first one. kinds: key -> dtype of the state per element. numbers: key -> other state.
    """

    first: int
    length: int
    kinds: dict[str, torch.dtype]
    numbers: dict[str, Any]


class OptimizerMemory(NamedTuple):
    """A description of the state of an optimizer, without the elements.

    kinds: name of a parameter -> {key: dtype}. numbers: see job_state.scalars.
    """

    kinds: dict[str, dict[str, torch.dtype]]
    numbers: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class RankKnowledge:
    """Facts that ranks learn from each other before a switch.

    strategy: the new strategy, with an order of ranks that all ranks agree on. memory: the state of all optimizers.
    crowded: a rank lacks room for the new sharded model beside the old one. round_bytes: bytes of a round of the
    exchange for which every rank has room. alike: all ranks have made the same groups.
    """

    strategy: Strategy
    memory: OptimizerMemory
    crowded: bool
    round_bytes: int
    alike: bool


def gather(
    sharded_model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    builder: Builder,
    cost_model: Callable[[], CostModel],
    new: Strategy,
    ranks: Ballot,
) -> RankKnowledge:
    """Gather the facts of all ranks, and apply the users' changes of the model to the Builder. One all-gather.

    Raises StrategyError, on every rank, if the model cannot be split, and SwitchError if another error occurs on a
    rank.
    """
    own: tuple[Any, ...] = ()
    asked = new
    failure: Exception | None = None
    try:
        new = cost_model().placed(new, now=sharded_model.strategy)
        plan = builder.plan(new)
        kinds = bytes_per_element(sharded_model, optimizer, builder.skeleton, builder.template.groups)
        num_bytes = side_bytes(builder, kinds, new, builder.rank)
        free = left(ranks.device)  # read once: the size of rounds relies on the room that `crowded` has found
        own = (
            changes_of(sharded_model, builder.skeleton),
            memory_of(sharded_model, optimizer, builder.names),
            crowded(num_bytes, free=free),
            round_bytes(num_bytes, ranks.device, free=free),
            (plan.digest, builder.groups_made(plan)),
        )
    except StrategyError:
        raise
    except Exception as error:
        failure = error
    everyone = ranks.gather(own, "comparing the states of the ranks", failure)
    changes, runs, lacking, sizes, groups = zip(*everyone, strict=True)
    builder.follow(changes)
    if len({digest for digest, _ in groups}) > 1:  # ranks know different optimizer states, so their plans may differ
        new = replace(asked, slowest="")
    return RankKnowledge(new, unpacked(runs, builder.names), any(lacking), min(sizes), len(set(groups)) == 1)


def memory_of(
    sharded_model: ShardedModel, optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> list[ParameterRun]:
    """Describe the state of `optimizer` on this rank. names: all parameters of the model, in the same order on all."""
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
    """Merge the descriptions of the optimizer states of all ranks."""
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
    """Return `numbers` with 0-dimensional tensors as plain values: a pickled tensor takes half a kilobyte."""
    return {
        key: _Scalar(value.item(), value.dtype) if isinstance(value, Tensor) and value.ndim == 0 else value
        for key, value in numbers.items()
    }


def _alike(one: ParameterRun, other: ParameterRun) -> bool:
    if one.kinds != other.kinds or one.numbers.keys() != other.numbers.keys():
        return False
    # Only plain numbers can be shared. Any other value belongs to one parameter.
    return all(isinstance(a, int | float | _Scalar) and a == other.numbers[key] for key, a in one.numbers.items())
