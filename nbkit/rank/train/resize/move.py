"""The state of a training on its way from one number of ranks to another: what is sent is what a rank lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nbkit.errors import TrainingError
from nbkit.planner.reshard.exchange import Plan
from nbkit.rank.parallel.reshard.redistribute import Exchange
from nbkit.rank.parallel.reshard.state_digest import digest
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.rank.train.checkpoint.write_plan import Everyone, by_name, everyone
from nbkit.rank.train.job import Job
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout


@dataclass(frozen=True)
class Held:
    """What this rank holds of the state, as whatever it is. numbers: see job_state.scalars. moved_bytes: so far."""

    state: JobState = field(default_factory=dict)
    numbers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    moved_bytes: int = 0


def held_by(job: Job) -> Held:
    """What this rank computes with."""
    inner = job.optimizer.inner
    return Held(job_state.state(job.sharded_model, inner), job_state.scalars(job.sharded_model, inner))


@torch.no_grad()
def onto_first(job: Job, strategy: Strategy) -> Held:
    """What the first ranks are to hold under `strategy`, which is of fewer ranks than there are: afterwards nobody
    needs the others. Collective, in the world of all; the training itself is left as it is."""
    own = held_by(job)
    every = everyone(own.state, own.numbers, job.world_size, job.device)
    plan = plan_of(every, strategy, job.builder, ranks=job.world_size)
    target: JobState = {
        key: (torch.empty(layout.local, dtype=every.kinds[key], device=_where(own.state, key, job)), layout)
        for key, layout in plan.new[job.rank].items()
    }
    carry_out(plan, own.state, target, rank=job.rank, device=job.device)
    return Held(target, every.numbers if target else {}, plan.total_bytes)


def plan_of(every: Everyone, strategy: Strategy, builder: Builder, *, ranks: int, once: bool = True) -> Plan:
    """From what `ranks` ranks hold to what those of `strategy` have to; ranks beyond them hold nothing then.

    once: buffers that a forward pass changed differ between ranks: the first rank's count, as where one is replaced.
    """
    kinds = builder.plans.kinds(by_name(every.kinds))
    new: list[dict[str, Layout]] = builder.plans.layouts_by_rank(strategy, kinds)
    new += [{} for _ in range(ranks - len(new))]
    old = _counted_once(every.layouts) if once else every.layouts
    return Plan.of(old, new, {key: kind.itemsize for key, kind in kinds.items()})


def carry_out(plan: Plan, state: JobState, target: JobState, *, rank: int, device: torch.device) -> None:
    """Fill `target`, and compare it with what there was. Collective. Raises TrainingError where it is not the same."""
    source = {key: state[key] for key in plan.old[rank]}
    Exchange(plan, rank).run(source, target, device=device)
    if digest(source, plan.old, rank=rank, device=device) != digest(target, plan.new, rank=rank, device=device):
        raise TrainingError(
            "The state on the new number of ranks is not the one before.",
            numbers="the digests of weights and optimizer state differ",
            hint="trainer.load(path) of a checkpoint; please report this",
        )


def _counted_once(layouts: Sequence[Mapping[str, Layout]]) -> list[dict[str, Layout]]:
    given: set[str] = set()
    found = []
    for each in layouts:
        buffers = {key for key in each if key.startswith("buffer/")}
        found.append({key: layout for key, layout in each.items() if key not in buffers & given})
        given |= buffers
    return found


def _where(state: JobState, key: str, job: Job) -> torch.device:
    return state[key][0].device if key in state else job.device
