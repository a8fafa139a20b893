"""After a training was broken off in mid-step, ranks may differ by a step: here they become one again, or say so.

An interrupt reaches each rank where it stands: one has updated its weights, another has not. The next training begins
by comparing; only when something was broken off is anything moved: to the ranks that are behind, or torn, from those
that are whole at the furthest step of which they hold everything together.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbkit.errors import TrainingError
from nbkit.layout import Layout
from nbkit.planner.reshard.exchange import Plan
from nbkit.rank.parallel.reshard.redistribute import Exchange
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.checkpoint import settings_of, state_of, take_settings
from nbkit.rank.train.checkpoint.write_plan import by_name

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["become_one", "ensure_one"]


def ensure_one(job: Job) -> None:
    """`become_one`, unless a training runs: its beginning has seen to it. Collective."""
    if not job._running:
        become_one(job)


def become_one(job: Job) -> None:
    """Compare how far the ranks are; level them if a step was broken off. Collective.

    Raises TrainingError, on every rank, when no step is whole on the ranks that finished it: all of them were
    interrupted within it, or a part of the state is nowhere else; or when they are under different strategies.
    """
    mine = [job.step, job.broken_off, job.half_way, zlib.crc32(str(job.strategy).encode()), job.fallback is not None]
    everyone = [mine]
    if job.world_size > 1:
        told = torch.tensor(mine, dtype=torch.int64, device=job.device)
        gathered = [torch.empty_like(told) for _ in range(job.world_size)]
        dist.all_gather(gathered, told)
        everyone = [one.tolist() for one in gathered]
    if len({strategy for *_, strategy, _ in everyone}) > 1:
        raise TrainingError(
            "An interrupted switch left the ranks under different strategies.",
            numbers=f"rank {job.rank}: {job.strategy}",
            hint="build the Trainer again, and trainer.load(path) of a checkpoint",
        )
    if not all(way_back for *_, way_back in everyone):
        job.fallback = None  # some have made the first step under this strategy, or do not know of it
    steps = [step for step, *_ in everyone]
    if len(set(steps)) == 1 and not any(broken or half for _, broken, half, *_ in everyone):
        return
    whole = [rank for rank, (_, _, half, *_) in enumerate(everyone) if not half]
    if not whole:
        raise TrainingError(
            "Every rank was interrupted within a step: no rank has whole weights.",
            numbers=f"finished steps: {', '.join(map(str, steps))}",
            hint="trainer.load(path) of a checkpoint, or build the Trainer again",
        )
    source = whole[0]
    if job.world_size > 1:
        source = _level(job, steps, whole)
    job.whole_again()
    if len(set(steps)) > 1 and job.rank == 0:
        warnings.warn(
            f"the last training was broken off in mid-step: finished steps of ranks 0-{len(steps) - 1} were "
            f"{', '.join(map(str, steps))}; all go on from rank {source}'s step {steps[source]}",
            stacklevel=2,
        )


@dataclass(frozen=True)
class _Held:
    """What a rank tells the others. weights: buffers too; params: the layouts by which the optimizer's state is cut."""

    weights: Mapping[str, Layout]
    state: Mapping[str, Layout]
    params: Mapping[str, Layout]
    kinds: Mapping[str, torch.dtype]
    numbers: Mapping[str, Mapping[str, Any]]


def _level(job: Job, steps: Sequence[int], whole: Sequence[int]) -> int:
    """Every rank at one step, whole; returns the rank whose history and position they took."""
    side, inner = job.side, job.optimizer.inner
    own = state_of(job)
    weights = job_state.weights(side) | job_state.buffers(side)
    everyone: list[Any] = [None] * job.world_size
    dist.all_gather_object(
        everyone,
        _Held(
            {key: layout for key, (_, layout) in weights.items()},
            {key: layout for key, (_, layout) in own.items() if key not in weights},
            dict(side.data.layouts),
            {key: tensor.dtype for key, (tensor, _) in own.items()},
            job_state.scalars(side, inner),
        ),
    )
    plan, sources = _furthest(everyone, steps, whole)
    if job.rank not in sources:
        kinds = {key: kind for rank in sources for key, kind in everyone[rank].kinds.items()}
        numbers = {name: values for rank in sources for name, values in everyone[rank].numbers.items()}
        inner.state.clear()
        job_state.allocate(side, inner, by_name(kinds), numbers)
        own = state_of(job)
    Exchange(plan, job.rank).run({key: own[key] for key in plan.old[job.rank]}, own, device=job.device)
    side.data.refresh()
    _carry(job, sources[0])
    return sources[0]


def _furthest(everyone: Sequence[_Held], steps: Sequence[int], whole: Sequence[int]) -> tuple[Plan, list[int]]:
    """The exchange that brings all to one step, and the ranks that it takes everything from."""
    why = ""
    for step in sorted({steps[rank] for rank in whole}, reverse=True):
        sources = [rank for rank in whole if steps[rank] == step]
        try:
            return _plan(everyone, sources), sources
        except TrainingError as error:
            why = why or str(error.numbers)
    raise TrainingError(
        "The ranks were interrupted at different places of a step, and no step is whole: what the strategy splits, "
        "one rank has from before the step, another from after it.",
        numbers=f"finished steps: {', '.join(map(str, steps))}; missing: {why}",
        hint="trainer.load(path) of a checkpoint, or build the Trainer again",
    )


def _plan(everyone: Sequence[_Held], sources: Sequence[int]) -> Plan:
    """Raises TrainingError when `sources` do not hold everything that the others must."""
    kinds = {key: kind for rank in sources for key, kind in everyone[rank].kinds.items()}
    old: list[dict[str, Layout]] = []
    new: list[dict[str, Layout]] = []
    told: set[str] = set()
    for rank, held in enumerate(everyone):
        kinds |= {key: kind for key, kind in held.kinds.items() if key in held.weights}
        if rank in sources:
            has = {**held.weights, **held.state}
            # Buffers that a forward pass changed differ between ranks of the same step: the first rank's count.
            buffers = {key for key in has if key.startswith("buffer/")}
            old.append({key: layout for key, layout in has.items() if key not in buffers or key not in told})
            told |= buffers
            new.append(has)
        else:
            old.append({})
            cut = [(key, key.partition("/")[2]) for key in kinds if not key.startswith(("weight/", "buffer/"))]
            new.append({**held.weights, **{key: held.params[name] for key, name in cut if name in held.params}})
    return Plan.of(old, new, {key: kind.itemsize for key, kind in kinds.items()})


def _carry(job: Job, source: int) -> None:
    """Settings of the optimizer, loss scale, step, history and position of `source`, to every rank."""
    held: list[Any] = [None]
    if job.rank == source:
        settings, scale = settings_of(job.optimizer.inner), job.precision.state_dict()
        held = [(settings, scale, job.step, list(job.ledger.records), job.feed.position())]
    dist.broadcast_object_list(held, src=source, device=job.device)
    if job.rank != source:
        settings, scale, job.step, job.ledger.records[:], position = held[0]
        take_settings(job.optimizer.inner, settings)
        job.precision.load_state_dict(scale)
        job.feed.go_to(position)
