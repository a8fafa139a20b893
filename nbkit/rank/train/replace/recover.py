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
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from nbkit.errors import TrainingError
from nbkit.rank.comm.agree import agree
from nbkit.rank.comm.all_gather_objects import all_gather_objects
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.device_mesh import close_all
from nbkit.rank.parallel.reshard.redistribute import Exchange
from nbkit.rank.parallel.reshard.resizable_storage import hollow
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.rank.train.control.recovery import Progress
from nbkit.rank.train.job import Job
from nbkit.rank.train.own_loop.own_loop import OwnLoop
from nbkit.rank.train.replace import stages
from nbkit.rank.train.replace.backup import Generation, buddy_of
from nbkit.rank.train.replace.hand_over import hand_over
from nbkit.rank.train.replace.kept_memory import with_memory
from nbkit.rank.train.replace.restoration import Holding, Part, Restoration, newest
from nbkit.rank.train.replace.snapshot import Contents
from nbkit.rank.train.step.optimizer_state import settings_of, take_settings
from nbkit.rank.train.switch.model_edits import changes_of
from nbkit.rank.train.switch.pending_switch import free
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.world.world import World
from nbkit.strategy import Strategy

Training: TypeAlias = Trainer | OwnLoop
"""What makes the steps: a `fit`, or a loop of the user's own."""
Settings = list[dict[str, Any]]
"""See settings_of."""


def recover(trainer: Training | None, newcomers: Collection[int]) -> Training:
    """The training of the ranks that live, with the ranks `newcomers` in the place of those that died. Collective.

    After the world was formed again: the default group works, every other one is broken. trainer: this rank's, broken
    off anywhere in a step, which is mended in place and returned; None on a newcomer, where one is made. Afterwards
    all ranks stand at the same step boundary, with equal history, position in the data and schedule, under the same
    strategy. Raises TrainingError, on every rank, naming what is lost, or what cannot be handed to a new process.
    """
    place = World.join_from_env().place
    rank, world_size, device = place.rank, place.world_size, accelerator().device(place.device)
    stages.mark("names handed over")
    held = _Held() if trainer is None else _Held.by(trainer)
    stages.mark("looked at what is held")
    everyone = all_gather_objects(held.told, world_size=world_size, device=device)
    stages.mark("told what is held")
    source = next(rank for rank in range(world_size) if rank not in newcomers)
    strategy = _common(everyone)
    # Of the newest some may not have heard yet.
    saved = max((each.saved for each in everyone if each.saved is not None), key=lambda one: one.step)
    if trainer is not None:
        trainer.job.builder.follow([each.changes for each in everyone if each.changes is not None])
    handed = hand_over(trainer, source, newcomers, rank=rank, device=place.message_device)
    if handed is not None:
        job, like = handed.job(), None
    else:
        assert trainer is not None
        job, like = trainer.job, trainer.job.optimizer.inner
    stages.mark("trainer handed over")
    restoration, lost = None, ""
    try:
        restoration = newest(everyone, strategy, job.builder)
    except TrainingError as error:
        if saved is None or saved.path is None:
            raise
        lost = f"{error.what} {error.numbers}"
    stages.mark("exchange planned")
    if newcomers:
        close_all()
    built = _built(job, strategy, restoration, held, like=like)
    sharded_model, inner = built.sharded_model, built.inner
    stages.mark("built")
    told: list[Any] = [None]
    if restoration is not None:
        held.take_back(restoration, newcomers, rank=rank, device=place.message_device)
        plan, own = restoration.plan, held.states.get(restoration.step, {})
        Exchange(plan, rank).run({key: own[key] for key in plan.old[rank]}, built.target, device=device)
        sharded_model.data.refresh()
        first = next(rank for rank in restoration.sources if rank not in newcomers)
        told[0] = held.points[restoration.step] if rank == first else None
        dist.broadcast_object_list(told, src=first, device=device)
    stages.mark("filled")
    if handed is not None:
        handed.start(job, sharded_model, inner)
        trainer = handed.trainer(job)
    else:
        assert trainer is not None
        trainer.reopen()
        left = [job.state]
        job.adopt(left[0].under(sharded_model, inner, job.builder.options))
        free(left)
    if told[0] is not None:
        # Without a message since the last line: should another rank die now, this one stands at a boundary.
        settings, progress = told[0]
        take_settings(inner, settings)
        job.go_on(progress)
    else:
        assert saved is not None and saved.path is not None
        _load(trainer, saved.path, saved.step, lost)
    stages.mark("adopted")
    job.meet(everyone[source].asked)
    return trainer


def _load(trainer: Training, path: Path, step: int, lost: str) -> None:
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
    """What this rank holds. By step: tensors, and (settings of the optimizer, how far it was).

    finished: the step of what it computed with; None where an update was broken off.
    """

    told: Holding = field(default_factory=Holding)
    finished: int | None = None
    states: dict[int, JobState] = field(default_factory=dict)
    points: dict[int, tuple[Settings, Progress]] = field(default_factory=dict)
    wards: dict[int, Generation] = field(default_factory=dict)

    @property
    def live(self) -> JobState:
        """What it computed with, where that is whole: memory that the training itself has, and no backup."""
        return {} if self.finished is None else self.states[self.finished]

    @classmethod
    def by(cls, trainer: Training) -> _Held:
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
        return cls(told, None if job.integrity.half_way else step, states, points, wards)

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


@dataclass(frozen=True)
class _Built:
    """target: all of its state, with memory; what was this rank's before is there, the rest is to be filled."""

    sharded_model: ShardedModel
    inner: torch.optim.Optimizer
    target: JobState


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
    job: Job, strategy: Strategy, restoration: Restoration | None, held: _Held, *, like: torch.optim.Optimizer | None
) -> _Built:
    """The sharded model with new groups, and its optimizer. Collective."""
    made: list[_Built] = []
    connections = job.builder.connect(strategy, alike=False)

    def build() -> None:
        with hollow() as spaces:
            sharded_model, inner = job.builder.build(strategy, connections, like=like)
            sharded_model.data.let_go()  # of gradients, until all have met
            if restoration is not None:
                job_state.allocate(sharded_model, inner, restoration.kinds, restoration.numbers)
        live = held.live if restoration is not None and restoration.step == held.finished else {}
        state = job_state.state(sharded_model, inner)
        made.append(_Built(sharded_model, inner, with_memory(state, sharded_model.data.tensors(), spaces, live)))

    agree(build, what="The training could not be built anew beside a new process.", hint="on_failure='stop'")
    return made[0]
