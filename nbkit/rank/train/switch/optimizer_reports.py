"""Reports of what each rank's optimizer keeps of each parameter, in few bytes, gathered by all ranks before a switch.

Who holds which part follows from the strategies (see ShardLayouts), so that is not gathered. What an optimizer keeps
of a parameter, only the rank that holds it knows. Most of it is alike for all parameters: it is sent once for each run
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nbkit.errors import StrategyError
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import bytes_per_element
from nbkit.rank.train.checkpoint.write_plan import by_name
from nbkit.rank.train.estimate.cost_model import CostModel
from nbkit.rank.train.estimate.free_memory import crowded, side_bytes
from nbkit.rank.train.switch.consensus import Consensus
from nbkit.rank.train.switch.model_edits import changes_of
from nbkit.strategy import Strategy


class _Scalar(NamedTuple):
    value: Any
    dtype: torch.dtype


class Run(NamedTuple):
    """Neighbouring parameters of which an optimizer keeps the same. kinds: of what it keeps per element."""

    first: int
    length: int
    kinds: dict[str, torch.dtype]
    numbers: dict[str, Any]


class Memory(NamedTuple):
    """What an optimizer remembers beside the elements. kinds: name -> {key: dtype}; numbers: see job_state.scalars."""

    kinds: dict[str, dict[str, torch.dtype]]
    numbers: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Gathered:
    """What ranks know of each other before a switch.

    strategy: the one to go to, its ranks in an order that suits all. memory: what their optimizers keep. crowded: a
    rank lacks room for the new sharded model beside the old one. alike: all have made the same groups so far.
    """

    strategy: Strategy
    memory: Memory
    crowded: bool
    alike: bool


def gather(
    sharded_model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    builder: Builder,
    cost_model: Callable[[], CostModel],
    new: Strategy,
    ranks: Consensus,
) -> Gathered:
    """What ranks know of each other; what users changed on the model counts from now on. One all-gather.

    Raises StrategyError, on every rank, for what cannot be split, and SwitchError when a rank failed to look.
    """
    own: tuple[Any, ...] = ()
    asked = new
    failure: Exception | None = None
    try:
        new = cost_model().placed(new, now=sharded_model.strategy)
        kinds = bytes_per_element(sharded_model, optimizer, builder.skeleton)
        own = (
            changes_of(sharded_model, builder.skeleton),
            memory_of(sharded_model, optimizer, builder.names),
            crowded(side_bytes(builder, kinds, new, builder.rank), ranks.device),
            ((new.slowest, new.places), builder.groups_made(new)),
        )
    except StrategyError:
        raise
    except Exception as error:
        failure = error
    everyone = ranks.gather(own, "looking at what there is", failure)
    changes, runs, lacking, groups = zip(*everyone, strict=True)
    builder.follow(changes)
    if len({order for order, _ in groups}) > 1:  # of what its optimizer keeps a rank may know more than another
        new = replace(asked, slowest="")
    return Gathered(new, unpacked(runs, builder.names), any(lacking), len(set(groups)) == 1)


def memory_of(sharded_model: ShardedModel, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> list[Run]:
    """What `optimizer` remembers of the parameters here. names: of the whole model's, the same on every rank."""
    kept = job_state.per_element(sharded_model, optimizer)
    kinds = by_name({key: tensor.dtype for key, (tensor, _) in kept.items()})
    numbers = job_state.scalars(sharded_model, optimizer)
    runs: list[Run] = []
    for place, name in enumerate(names):
        if name not in numbers:
            continue
        run = Run(place, 1, kinds.get(name, {}), _packed(numbers[name]))
        last = runs[-1] if runs else None
        if last is not None and last.first + last.length == place and _alike(last, run):
            runs[-1] = last._replace(length=last.length + 1)
        else:
            runs.append(run)
    return runs


def unpacked(everyone: Sequence[Sequence[Run]], names: Sequence[str]) -> Memory:
    """What the optimizers of all ranks remember, together."""
    memory = Memory({}, {})
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
    """With tensors of no dim as plain values: a pickled one is half a kilobyte."""
    return {
        key: _Scalar(value.item(), value.dtype) if isinstance(value, Tensor) and value.ndim == 0 else value
        for key, value in numbers.items()
    }


def _alike(one: Run, other: Run) -> bool:
    if one.kinds != other.kinds or one.numbers.keys() != other.numbers.keys():
        return False
    # Plain ones alone: whatever else there is belongs to one parameter.
    return all(isinstance(a, int | float | _Scalar) and a == other.numbers[key] for key, a in one.numbers.items())
