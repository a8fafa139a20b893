"""Brings a training that lost ranks back to a step boundary, with new processes in their place.

In the order of this file: all ranks tell what they hold, and of which step; a survivor hands over what a Trainer is
made of; all build the strategy in force anew, since a process that dies takes its groups with it; one exchange fills
it, as in a switch, from what is held of the newest step that is whole; and all stand at that step.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbkit.errors import TrainingError
from nbkit.rank.comm.agree import agree
from nbkit.rank.comm.all_gather_objects import all_gather_objects
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.reshard.redistribute import Exchange
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.checkpoint import settings_of, take_settings
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.rank.train.control.recovery import Progress
from nbkit.rank.train.job import Job
from nbkit.rank.train.replace.backup import Generation, buddy_of
from nbkit.rank.train.replace.hand_over import hand_over
from nbkit.rank.train.replace.restoration import Holding, Part, Restoration, newest
from nbkit.rank.train.replace.snapshot import Contents
from nbkit.rank.train.switch.model_edits import changes_of
from nbkit.rank.train.switch.pending_switch import free
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.world.world import World
from nbkit.strategy import Strategy

Settings = list[dict[str, Any]]
"""See settings_of."""


def recover(trainer: Trainer | None, newcomers: Collection[int]) -> Trainer:
    """The training of the ranks that live, with the ranks `newcomers` in the place of those that died. Collective.

    After the world was formed again: the default group works, every other one is broken. trainer: this rank's, broken
    off anywhere in a step, which is mended in place and returned; None on a newcomer, where one is made. Afterwards
    all ranks stand at the same step boundary, with equal history, position in the data and schedule, under the same
    strategy. Raises TrainingError, on every rank, naming what is lost, or what cannot be handed to a new process.
    """
    place = World.join_from_env().place
    rank, world_size, device = place.rank, place.world_size, accelerator().device(place.device)
    held = _Held() if trainer is None else _Held.by(trainer)
    everyone = all_gather_objects(held.told, world_size=world_size, device=device)
    source = next(rank for rank in range(world_size) if rank not in newcomers)
    strategy = _common(everyone)
    # Of the newest some may not have heard yet.
    saved = max((each.saved for each in everyone if each.saved is not None), key=lambda one: one.step)
    if trainer is not None:
        trainer.job.builder.follow([each.changes for each in everyone if each.changes is not None])
    handed = hand_over(trainer, source, newcomers, rank=rank, device=device)
    if handed is not None:
        job, like = handed.job(), None
    else:
        assert trainer is not None
        job, like = trainer.job, trainer.job.optimizer.inner
    restoration, lost = None, ""
    try:
        restoration = newest(everyone, strategy, job.builder)
    except TrainingError as error:
        if saved is None or saved.path is None:
            raise
        lost = f"{error.what} {error.numbers}"
    sharded_model, inner = _built(job, strategy, restoration, like=like)
    told: list[Any] = [None]
    if restoration is not None:
        held.take_back(restoration, newcomers, rank=rank, device=device)
        _fill(sharded_model, inner, restoration, held.states.get(restoration.step, {}), rank=rank, device=device)
        first = next(rank for rank in restoration.sources if rank not in newcomers)
        told[0] = held.points[restoration.step] if rank == first else None
        dist.broadcast_object_list(told, src=first, device=device)
    if handed is not None:
        job.start(sharded_model, inner)
        trainer = handed.trainer(job)
    else:
        assert trainer is not None
        trainer.reopen()
        left = [job.state]
        job.adopt(left[0].under(sharded_model, inner))
        free(left)
    if told[0] is not None:
        # Without a message since the last line: should another rank die now, this one stands at a boundary.
        settings, progress = told[0]
        take_settings(inner, settings)
        job.go_on(progress)
    else:
        assert saved is not None and saved.path is not None
        _load(trainer, saved.path, saved.step, lost)
    job.meet(everyone[source].asked)
    return trainer


def _load(trainer: Trainer, path: Path, step: int, lost: str) -> None:
    """Nobody holds everything: back to the last checkpoint, of which every rank reads its part. Collective."""
    job = trainer.job
    job.integrity.half_way = True  # what was built holds nothing yet
    if job.rank == 0:
        warnings.warn(f"{lost}: all go on from the checkpoint {str(path)!r} of step {step}", stacklevel=4)
    # A run ends with the step that it would have ended with, however far back it goes.
    job.ledger.replace(step, [])
    trainer.load(path)


@dataclass(frozen=True)
class _Held:
    """What this rank holds. By step: tensors, and (settings of the optimizer, how far it was)."""

    told: Holding = field(default_factory=Holding)
    states: dict[int, JobState] = field(default_factory=dict)
    points: dict[int, tuple[Settings, Progress]] = field(default_factory=dict)
    wards: dict[int, Generation] = field(default_factory=dict)

    @classmethod
    def by(cls, trainer: Trainer) -> _Held:
        """What a rank holds that was broken off anywhere."""
        job = trainer.job
        job.break_off()
        inner, step = job.optimizer.inner, job.step
        states, points = dict[int, JobState](), dict[int, tuple[Settings, Progress]]()
        if not job.integrity.half_way:
            states[step] = job_state.state(job.sharded_model, inner)
            points[step] = settings_of(inner), job.progress
        numbers, names, backups = job_state.scalars(job.sharded_model, inner), job.builder.names, job.backups
        parts = {step: Part.of(state, numbers) for step, state in states.items()}
        backups.break_off()
        for each in backups.own:
            if each.step not in states:
                settings, place = each.point
                records = [record for record in job.ledger.records if record["step"] <= each.step]
                states[each.step], points[each.step] = each.state(), (settings, replace(place, records=records))
                parts[each.step] = Part.kept(each, names)
        wards = {each.step: each for each in backups.wards}
        kept = {step: Part.kept(each, names) for step, each in wards.items()}
        changes = changes_of(job.sharded_model, job.builder.skeleton)
        told = Holding(job.strategy, changes, job.step, parts, kept, backups.ward, backups.asked, trainer.saves.last)
        return cls(told, states, points, wards)

    def take_back(
        self, restoration: Restoration, newcomers: Collection[int], *, rank: int, device: torch.device
    ) -> None:
        """New ranks get from their buddies what those kept of the step, where it is asked of them."""
        step, world_size = restoration.step, len(restoration.plan.old)
        for newcomer in sorted(set(newcomers) & set(restoration.sources)):
            buddy = buddy_of(newcomer, world_size)
            if rank == buddy:
                dist.send(self.wards[step].flat.to(device), newcomer)
            elif rank == newcomer:
                part = restoration.given[rank]
                assert part is not None
                contents = Contents(part.kinds, part.layouts)
                flat = torch.empty(contents.num_bytes, dtype=torch.uint8, device=device)
                dist.recv(flat, buddy)
                self.states[step] = contents.views(flat.cpu())


def _common(everyone: Sequence[Holding]) -> Strategy:
    found = [each.strategy for each in everyone if each.strategy is not None]
    if len(set(map(str, found))) != 1:
        raise TrainingError(
            "A rank died within a switch, and the ranks that are left are under different strategies.",
            numbers=", ".join(map(str, found)) or "no rank is left",
            hint="build the Trainer again, and trainer.load(path) of a checkpoint",
        )
    return found[0]


def _built(
    job: Job, strategy: Strategy, restoration: Restoration | None, *, like: torch.optim.Optimizer | None
) -> tuple[ShardedModel, torch.optim.Optimizer]:
    """The sharded model with new groups, and its optimizer, with memory that is to be filled. Collective."""
    made: list[tuple[ShardedModel, torch.optim.Optimizer]] = []
    connections = job.builder.connect(strategy, alike=False)

    def build() -> None:
        made.append(job.builder.build(strategy, connections, like=like))
        if restoration is not None:
            job_state.allocate(*made[0], restoration.kinds, restoration.numbers)

    agree(build, what="The training could not be built anew beside a new process.", hint="on_failure='stop'")
    return made[0]


def _fill(
    sharded_model: ShardedModel,
    inner: torch.optim.Optimizer,
    restoration: Restoration,
    held: JobState,
    *,
    rank: int,
    device: torch.device,
) -> None:
    plan = restoration.plan
    source = {key: held[key] for key in plan.old[rank]}
    Exchange(plan, rank).run(source, job_state.state(sharded_model, inner), device=device)
    sharded_model.data.refresh()
