"""Continue a training on another number of ranks: from the request to the first step.

1. `planned` (plan_resize.py) has chosen the strategy, or has said why it cannot. Nothing has changed yet.
2. With fewer ranks, an exchange in the old world moves the state from the ranks that will leave to the others.
3. The host forms the new world. New ranks have no state yet. The leaving ranks leave the training now.
4. In the new world every rank makes a new Job, like a rank that replaces another. So everything that depends on the
   number of ranks is new. An exchange sends each rank the state that it lacks. State that moved in step 2 is not sent
   again.
5. The Trainer, the model and the optimizer of the user stay the same objects, and show the new ones.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from nbkit.errors import TrainingError
from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.comm.agree import agree, all_gather_objects
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.reshard.redistribute import Exchange
from nbkit.rank.parallel.reshard.state_digest import digest
from nbkit.rank.telemetry.sinks import Bus
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import Everyone, JobState, by_name, counted_once, everyone
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.step_boundary import note
from nbkit.rank.train.job import Job
from nbkit.rank.train.replace import resume_fit
from nbkit.rank.train.replace.hand_over import hand_over, handed_by, packed_for_new
from nbkit.rank.train.replace.resume_fit import FitRange
from nbkit.rank.train.resize.plan_resize import WantedWorld
from nbkit.rank.train.step.optimizer_state import settings_of, take_settings
from nbkit.rank.train.switch.model_edits import changes_of
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.train.transaction import free
from nbkit.rank.world.world import World
from nbkit.records.events import Resized
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout


@dataclass(frozen=True)
class LocalShards:
    """The state of this rank, in any layout. numbers: see job_state.scalars. moved_bytes: bytes moved so far."""

    state: JobState = field(default_factory=dict)
    numbers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    moved_bytes: int = 0


def held_by(job: Job) -> LocalShards:
    """Return the live state of this rank."""
    inner = job.optimizer.inner
    return LocalShards(job_state.state(job.sharded_model, inner), job_state.scalars(job.sharded_model, inner))


@torch.no_grad()
def onto_first(job: Job, strategy: Strategy) -> LocalShards:
    """Copy the state to the first ranks. Return the copy on this rank. Collective, in the old world.

    strategy: a strategy for fewer ranks. Afterwards the other ranks are not needed. The training itself does not
    change.
    """
    own = held_by(job)
    every = everyone(own.state, own.numbers, job.world_size, job.device)
    plan = plan_of(every, strategy, job.builder, ranks=job.world_size)
    target: JobState = {
        key: (torch.empty(layout.local, dtype=every.kinds[key], device=_where(own.state, key, job)), layout)
        for key, layout in plan.new[job.rank].items()
    }
    carry_out(plan, own.state, target, rank=job.rank, device=job.device)
    return LocalShards(target, every.numbers if target else {}, plan.total_bytes)


def plan_of(every: Everyone, strategy: Strategy, builder: Builder, *, ranks: int, once: bool = True) -> ExchangePlan:
    """Return the exchange from the state of all ranks to the state of the ranks under `strategy`.

    ranks: the number of all ranks. Ranks beyond those of `strategy` get nothing. once: use the buffers of the first
    rank, as when a rank is replaced. Buffers that a forward pass changes differ between ranks.
    """
    kinds = builder.exchanges.kinds(by_name(every.kinds))
    new: list[dict[str, Layout]] = builder.exchanges.layouts_by_rank(builder.plan(strategy), kinds)
    new += [{} for _ in range(ranks - len(new))]
    old = counted_once(every.layouts) if once else every.layouts
    return ExchangePlan.of(old, new, {key: kind.itemsize for key, kind in kinds.items()})


def carry_out(plan: ExchangePlan, state: JobState, target: JobState, *, rank: int, device: torch.device) -> None:
    """Fill `target` from `state`, and compare their digests. Collective. Raises TrainingError if they differ."""
    source = {key: state[key] for key in plan.old[rank]}
    Exchange(plan, rank).run(source, target, device=device)
    if digest(source, plan.old, rank=rank, device=device) != digest(target, plan.new, rank=rank, device=device):
        raise TrainingError(
            "The state on the new number of ranks differs from the state before.",
            numbers="the digests of weights and optimizer state differ",
            hint="trainer.load(path) of a checkpoint; please report this",
        )


def _where(state: JobState, key: str, job: Job) -> torch.device:
    return state[key][0].device if key in state else job.device


def check_handed(trainer: Trainer, wanted: WantedWorld) -> None:
    """Raise TrainingError, on every rank, if the training cannot be sent to new ranks. Collective."""
    job, strategy = trainer.job, wanted.strategy

    def pack() -> None:
        if job.rank == 0 and strategy is not None:
            packed_for_new(trainer, strategy)

    agree(
        pack,
        what="The training cannot continue with another number of ranks.",
        hint="%strategy zero3   changes the strategy of the present ranks",
    )


def resize(trainer: Trainer, wanted: WantedWorld, span: FitRange | None) -> dict[str, Any]:
    """Continue the training with `wanted.ranks` ranks. Return the fields of the event.

    Collective, between two steps, while no `fit` runs. span: the steps of the `fit` that continues afterwards, and that
    new ranks enter; None if there is none. Raises errors of forming the world; then nothing has changed. Raises Left on
    a rank that is no longer needed.
    """
    assert resume_fit.host is not None and wanted.strategy is not None
    began, job = time.perf_counter(), trainer.job
    trainer.saves.collect(wait=True)
    job.sync.resync()
    job.ledger.settle()
    job.sync.average_replicas()
    old = job.strategy, job.world_size
    changes = all_gather_objects(
        changes_of(job.sharded_model, job.builder.skeleton), world_size=job.world_size, device=job.device
    )
    job.builder.follow(changes)
    held = onto_first(job, wanted.strategy) if wanted.ranks < job.world_size else held_by(job)
    newcomers = resume_fit.host.resize(wanted, trainer, span)
    moved = rebuilt(trainer, held, wanted.strategy, newcomers)
    event = Resized(
        trainer.step,
        old_ranks=old[1],
        ranks=wanted.ranks,
        old=str(old[0]),
        new=str(wanted.strategy),
        moved_bytes=held.moved_bytes + moved[1],
        pause_s=time.perf_counter() - began,
    )
    trainer.job.ledger.emit(event)
    if trainer.job.rank == 0:
        resume_fit.host.tell(event.said)
    step_boundary.meet(trainer.job.device)
    trainer.job.ledger.begin_again()
    return asdict(event)


def joined(newcomers: Collection[int]) -> Trainer:
    """Join a training that gets more ranks, on a new rank. Return its Trainer."""
    trainer, _ = rebuilt(None, LocalShards(), None, newcomers)
    step_boundary.meet(trainer.job.device)
    trainer.job.ledger.begin_again()
    return trainer


def rebuilt(
    trainer: Trainer | None, held: LocalShards, strategy: Strategy | None, newcomers: Collection[int]
) -> tuple[Trainer, int]:
    """Rebuild the training in a new world, at a step boundary. Return (its Trainer, bytes that moved). Collective.

    trainer: the Trainer of this rank, which is changed in place. On a newcomer, trainer and strategy are None.
    """
    place = World.join_from_env().place
    rank, device = place.rank, accelerator().device(place.device)
    left = None if trainer is None else trainer.job
    handed = hand_over(trainer, 0, newcomers, rank=rank, device=place.message_device, strategy=strategy)
    if handed is None:
        assert trainer is not None and strategy is not None
        handed = handed_by(trainer, strategy)
    job = handed.job(like=left)
    every = everyone(held.state, held.numbers, place.world_size, device)
    connections = job.builder.connect(handed.strategy, alike=False)
    sharded_model, inner = job.builder.build(
        job.builder.plan(handed.strategy), connections, like=None if left is None else left.optimizer.inner
    )
    job_state.allocate(sharded_model, inner, by_name(every.kinds), every.numbers)
    plan = plan_of(every, handed.strategy, job.builder, ranks=place.world_size, once=bool(newcomers))
    carry_out(plan, held.state, job_state.state(sharded_model, inner), rank=rank, device=device)
    sharded_model.data.refresh()
    told: list[Any] = [None]
    if rank == 0 and left is not None:
        told[0] = settings_of(left.optimizer.inner), left.progress, left.backups.asked
    dist.broadcast_object_list(told, src=0, device=device)
    settings, progress, asked = told[0]
    handed.start(job, sharded_model, inner)
    new = handed.trainer(job)
    assert isinstance(new, Trainer)  # a resize refuses a user's own loop
    take_settings(inner, settings)
    job.go_on(progress)
    if trainer is not None:
        new = _shown_by(trainer, new)
    job.sync.sync_step(asked)
    return new, plan.total_bytes


def _shown_by(trainer: Trainer, new: Trainer) -> Trainer:
    """Make the user's Trainer, optimizer and model objects show those of `new` from now on. Return `trainer`."""
    left, job = trainer.job, new.job
    left.training_step.release()
    states = [left.state]
    handle, made = left.optimizer, job.optimizer
    # Share one __dict__, so that objects that refer to the new one, such as bound methods, stay valid.
    handle.__dict__ = made.__dict__
    job.optimizer = handle
    trainer.__dict__ = new.__dict__
    note(trainer)
    left.backups, left.ledger.bus = job.backups, Bus()
    free(states)
    return trainer
