"""Bring a training that lost ranks back to a step boundary, with new processes in place of the lost ones.

1. Each rank tells which parts of the state it holds, and of which steps. The newest complete step will be restored.
2. A survivor sends the new processes everything that they need to make a Trainer.
3. All ranks build a sharded model of the strategy in force again, because the death of a process breaks its groups.
4. An exchange fills the new sharded model, as in a switch. Then all ranks are at the restored step.

Most tensors of the survivors do not change: all of them under ddp, and each rank's part of a layer under tp. A second
full sharded model would need as much memory again, and a copy of everything. So the new one is built without memory
("hollow", see redistribute.py), and its tensors take over the old memory. Memory that several tensors share, such as
the flat parts of zero 3, is filled by a copy.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.comm.agree import agree, all_gather_objects
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.device_mesh import close_all
from nbkit.rank.parallel.plan import ParallelPlan
from nbkit.rank.parallel.reshard.redistribute import Exchange, Spaces, TargetStorage, hollow
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import JobState, by_name, counted_once
from nbkit.rank.train.config import LastCheckpoint
from nbkit.rank.train.control.rank_sync import TrainingProgress
from nbkit.rank.train.job import Job
from nbkit.rank.train.own_loop.own_loop import OwnLoop
from nbkit.rank.train.replace.backup import BackupGeneration, Contents, buddy_of
from nbkit.rank.train.replace.hand_over import hand_over
from nbkit.rank.train.step.optimizer_state import settings_of, take_settings
from nbkit.rank.train.switch.consensus import unpacked
from nbkit.rank.train.switch.model_edits import Changes, changes_of
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.train.transaction import free
from nbkit.rank.world.world import World
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout

Numbers = Mapping[str, Mapping[str, Any]]
"""See job_state.scalars."""


@dataclass(frozen=True)
class HeldPart:
    """A description of the state of one step on one rank. layouts: key -> layout. kinds: key -> dtype."""

    layouts: Mapping[str, Layout]
    kinds: Mapping[str, torch.dtype]
    numbers: Numbers

    @classmethod
    def of(cls, state: JobState, numbers: Numbers) -> HeldPart:
        """Describe `state`.

        Equal layouts become one object. It is pickled once, and layouts can be compared by identity.
        """
        known: dict[Layout, Layout] = {}
        layouts = {key: known.setdefault(layout, layout) for key, (_, layout) in state.items()}
        return cls(layouts, {key: tensor.dtype for key, (tensor, _) in state.items()}, numbers)

    @classmethod
    def kept(cls, generation: BackupGeneration, names: Sequence[str]) -> HeldPart:
        """Describe the state in a backup. names: the names of the model's parameters."""
        contents, numbers = generation.contents, unpacked([pickle.loads(generation.about)], names).numbers
        return cls(contents.layouts, contents.kinds, numbers)


@dataclass(frozen=True)
class Holding:
    """The report of a rank to the others after ranks were lost. A new rank reports the defaults.

    finished: the number of finished steps. parts: step -> the state that the rank can send. wards: step -> the backup
    of rank `ward`. asked: see Backups. saved: the last checkpoint.
    """

    strategy: Strategy | None = None
    changes: Changes | None = None
    finished: int | None = None
    parts: Mapping[int, HeldPart] = field(default_factory=dict)
    wards: Mapping[int, HeldPart] = field(default_factory=dict)
    ward: int | None = None
    asked: int | None = 0
    saved: LastCheckpoint | None = None


@dataclass(frozen=True)
class Restoration:
    """The newest complete step, the ranks that have its state, and the exchange that restores it on all ranks.

    given: for each rank, the state that it sends; None for nothing. kinds, numbers: the optimizer state, see
    job_state.allocate.
    """

    step: int
    given: Sequence[HeldPart | None]
    plan: ExchangePlan
    kinds: Mapping[str, Mapping[str, torch.dtype]]
    numbers: Numbers

    @property
    def sources(self) -> list[int]:
        """Return the ranks that send state."""
        return [rank for rank, part in enumerate(self.given) if part is not None]


def newest(everyone: Sequence[Holding], strategy: Strategy, builder: Builder) -> Restoration:
    """Return the restoration of the newest complete step. The ranks compute the same result without messages.

    Raises TrainingError if no step is complete. The error names the lost state.
    """
    # A buddy sends the backup that it kept to the new rank, which then sends it in place of the dead rank.
    kept = {each.ward: each.wards for each in everyone if each.ward is not None}
    why = lacking = ""
    held = {step for each in everyone for step in each.parts}
    for step in sorted(held, reverse=True):
        parts = [each.parts.get(step) for each in everyone]
        more = [kept.get(rank, {}).get(step) if each.strategy is None else None for rank, each in enumerate(everyone)]
        for those in (parts, [own or its for own, its in zip(parts, more, strict=True)]):
            try:
                return _restoration(step, those, strategy, builder)
            except TrainingError as error:
                lacking = str(error.numbers)
        why = why or f"step {step}: {lacking}"
    finished = ", ".join("new" if each.finished is None else str(each.finished) for each in everyone)
    path = next((each.saved.path for each in everyone if each.saved is not None and each.saved.path), "path")
    unkept = (
        ""
        if any(each.asked != 0 for each in everyone)
        else "; recovery=nbkit.Recovery(backup_every=1) keeps it on another rank too"
    )
    raise TrainingError(
        f"No rank and no backup has the state of the dead ranks under {strategy}.",
        numbers=f"finished steps of ranks 0-{len(everyone) - 1}: {finished}; missing of {why or 'every step'}",
        hint=f"build the Trainer again, and trainer.load({str(path)!r}){unkept}",
    )


def _restoration(step: int, parts: Sequence[HeldPart | None], strategy: Strategy, builder: Builder) -> Restoration:
    kinds = {key: kind for part in parts if part is not None for key, kind in part.kinds.items()}
    numbers = {name: dict(values) for part in parts if part is not None for name, values in part.numbers.items()}
    memory = by_name(kinds)
    old = counted_once([{} if part is None else part.layouts for part in parts])
    every = builder.exchanges.kinds(memory)
    plan = ExchangePlan.of(
        old,
        builder.exchanges.layouts_by_rank(builder.plan(strategy), every),
        {key: k.itemsize for key, k in every.items()},
    )
    if memory or any(numbers.values()):
        _check_owners(parts, builder.plan(strategy))
    return Restoration(step, parts, plan, memory, numbers)


def _check_owners(parts: Sequence[HeldPart | None], plan: ParallelPlan) -> None:
    """Raise TrainingError if the owner of a tensor is lost, and the tensor's optimizer state with it.

    The exchange does not notice this, because no other rank knows which state the owner had.
    """
    found = [held.keys() for part, held in zip(parts, plan.layouts.held, strict=True) if part is not None]
    if lost := sorted(plan.owned.difference(*found)):
        raise TrainingError(
            "The rank that owned whole tensors has died, and only it had their optimizer state.",
            numbers=f"the state of {len(lost)} tensors, the first {lost[0]!r}",
            hint="recovery=nbkit.Recovery(backup_every=1)",
        )


def with_memory(hollow: JobState, tensors: Iterable[Tensor], spaces: Spaces, held: JobState) -> JobState:
    """Give memory to the tensors of `hollow`: the memory of the same tensor in `held`, or else new, unfilled memory.

    tensors: all other tensors that share the same memory. held: the state of this rank at the restored step. Return key
    -> (tensor, layout). A reused tensor in the result is the tensor object of `held`, so the exchange does not copy it.
    Raises errors of the allocator.
    """
    tenants: dict[int, list[str]] = {}
    for key, (tensor, _) in hollow.items():
        tenants.setdefault(_address(tensor), []).append(key)
    shown: dict[int, dict[int, Tensor]] = {}
    for tensor in (*(tensor for tensor, _ in hollow.values()), *tensors):
        shown.setdefault(_address(tensor), {})[id(tensor)] = tensor
    filling, found = TargetStorage(hollow, spaces), dict(hollow)
    for address, keys in tenants.items():
        if len(keys) == 1 and address in spaces and _is_same(hollow, held, keys[0], spaces[address][1]):
            found[keys[0]] = held[keys[0]]
            storage = held[keys[0]][0].untyped_storage()
            for tensor in shown[address].values():
                where = tensor.storage_offset(), tensor.shape, tensor.stride()
                tensor.data = tensor.detach().new_empty(0).set_(storage, *where)
        else:
            for key in keys:
                filling.take(key)
    return found


def _is_same(hollow: JobState, held: JobState, key: str, num_bytes: int) -> bool:
    """Return True if `held` has this tensor with the same layout, alone in its memory."""
    if key not in held:
        return False
    (new, layout), (old, known) = hollow[key], held[key]
    alike = (new.dtype, new.device, new.shape, new.stride()) == (old.dtype, old.device, old.shape, old.stride())
    at = new.storage_offset(), num_bytes
    return alike and layout == known and at == (old.storage_offset(), old.untyped_storage().nbytes())


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


Training: TypeAlias = Trainer | OwnLoop
"""The object that makes the steps: a Trainer in `fit`, or the user's own loop."""
Settings = list[dict[str, Any]]
"""See settings_of."""


def recover(trainer: Training | None, newcomers: Collection[int]) -> Training:
    """Restore the training on the surviving ranks and on the new ranks `newcomers`, and return it. Collective.

    Call it after the world was formed again. Then the default group works, and every other group is broken. trainer:
    the training of this rank, interrupted anywhere in a step. It is repaired in place and returned. On a newcomer it is
    None, and a new one is made. Afterwards all ranks are at the same step boundary under the same strategy, with equal
    history, data position and schedule. Raises TrainingError, on every rank, if state is lost or cannot be sent to a
    new process. The error names it.
    """
    place = World.join_from_env().place
    rank, world_size, device = place.rank, place.world_size, accelerator().device(place.device)
    held = _Held() if trainer is None else _Held.by(trainer)
    everyone = all_gather_objects(held.told, world_size=world_size, device=device)
    source = next(rank for rank in range(world_size) if rank not in newcomers)
    strategy = _common(everyone)
    # Some ranks may not know of the newest checkpoint yet.
    saved = max((each.saved for each in everyone if each.saved is not None), key=lambda one: one.step)
    if trainer is not None:
        trainer.job.builder.follow([each.changes for each in everyone if each.changes is not None])
    handed = hand_over(trainer, source, newcomers, rank=rank, device=place.message_device)
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
    if newcomers:
        close_all()
    built = _built(job, strategy, restoration, held, like=like)
    sharded_model, inner = built.sharded_model, built.inner
    told: list[Any] = [None]
    if restoration is not None:
        held.take_back(restoration, newcomers, rank=rank, device=place.message_device)
        plan, own = restoration.plan, held.states.get(restoration.step, {})
        Exchange(plan, rank).run({key: own[key] for key in plan.old[rank]}, built.target, device=device)
        sharded_model.data.refresh()
        first = next(rank for rank in restoration.sources if rank not in newcomers)
        told[0] = held.points[restoration.step] if rank == first else None
        dist.broadcast_object_list(told, src=first, device=device)
    if handed is not None:
        handed.start(job, sharded_model, inner)
        trainer = handed.trainer(job)
    else:
        assert trainer is not None
        trainer.reopen()
        left = [job.state]
        job.adopt(left[0].under(sharded_model, inner))
        free(left)
    if told[0] is not None:
        # This part sends no messages. So even if another rank dies now, this rank gets to a step boundary.
        settings, progress = told[0]
        take_settings(inner, settings)
        job.go_on(progress)
    else:
        assert saved is not None and saved.path is not None
        _load(trainer, saved.path, saved.step, lost)
    job.sync.sync_step(everyone[source].asked)
    return trainer


def _load(trainer: Training, path: Path, step: int, lost: str) -> None:
    """Load the last checkpoint, because some state is lost. Every rank reads its part. Collective."""
    job = trainer.job
    job.integrity.half_way = True  # the new sharded model is not filled yet
    if job.rank == 0:
        warnings.warn(f"{lost}: all ranks continue from the checkpoint {str(path)!r} of step {step}", stacklevel=4)
    # The run still ends with the same step, although it goes back further.
    job.ledger.replace(step, [])
    trainer.load(path)


@dataclass(frozen=True)
class _Held:
    """The state that this rank holds.

    told: its description for the other ranks. states: step -> tensors. points: step -> (optimizer settings, progress).
    wards: step -> backup of the ward. finished: the step of the live state; None if an update was interrupted.
    """

    told: Holding = field(default_factory=Holding)
    finished: int | None = None
    states: dict[int, JobState] = field(default_factory=dict)
    points: dict[int, tuple[Settings, TrainingProgress]] = field(default_factory=dict)
    wards: dict[int, BackupGeneration] = field(default_factory=dict)

    @property
    def live(self) -> JobState:
        """Return the live state, in the memory of the training, if it is complete. Otherwise return {}."""
        return {} if self.finished is None else self.states[self.finished]

    @classmethod
    def by(cls, trainer: Training) -> _Held:
        """Return the state that a rank holds after its training was interrupted anywhere."""
        job = trainer.job
        job.break_off()
        inner, step = job.optimizer.inner, job.step
        states, points = dict[int, JobState](), dict[int, tuple[Settings, TrainingProgress]]()
        if not job.integrity.half_way:
            states[step] = job_state.state(job.sharded_model, inner)
            points[step] = settings_of(inner), job.progress
        numbers, names, backups = job_state.scalars(job.sharded_model, inner), job.builder.names, job.backups
        parts = {step: HeldPart.of(state, numbers) for step, state in states.items()}
        backups.break_off()
        for each in backups.own:
            if each.step not in states:
                settings, place = each.point
                records = [record for record in job.ledger.records if record["step"] <= each.step]
                states[each.step], points[each.step] = each.state(), (settings, replace(place, records=records))
                parts[each.step] = HeldPart.kept(each, names)
        wards = {each.step: each for each in backups.wards}
        kept = {step: HeldPart.kept(each, names) for step, each in wards.items()}
        changes = changes_of(job.sharded_model, job.builder.skeleton)
        told = Holding(job.strategy, changes, job.step, parts, kept, backups.ward, backups.asked, trainer.saves.last)
        return cls(told, None if job.integrity.half_way else step, states, points, wards)

    def take_back(
        self, restoration: Restoration, newcomers: Collection[int], *, rank: int, device: torch.device
    ) -> None:
        """Send the backups that buddies kept to the new ranks, if the restoration needs them."""
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
    """A new sharded model and its optimizer.

    target: all of its tensors, with memory. Tensors that this rank had before are filled, the others are not.
    """

    sharded_model: ShardedModel
    inner: torch.optim.Optimizer
    target: JobState


def _common(everyone: Sequence[Holding]) -> Strategy:
    found = [each.strategy for each in everyone if each.strategy is not None]
    if len(set(map(str, found))) != 1:
        raise TrainingError(
            "A rank died during a switch, and the remaining ranks are under different strategies.",
            numbers=", ".join(map(str, found)) or "no rank is left",
            hint="build the Trainer again, and trainer.load(path) of a checkpoint",
        )
    return found[0]


def _built(
    job: Job, strategy: Strategy, restoration: Restoration | None, held: _Held, *, like: torch.optim.Optimizer | None
) -> _Built:
    """Return a new sharded model with new groups, and its optimizer. Collective."""
    made: list[_Built] = []
    connections = job.builder.connect(strategy, alike=False)

    def build() -> None:
        with hollow() as spaces:
            sharded_model, inner = job.builder.build(job.builder.plan(strategy), connections, like=like)
            sharded_model.data.let_go()  # gradients get memory later, after all ranks have met
            if restoration is not None:
                job_state.allocate(sharded_model, inner, restoration.kinds, restoration.numbers)
        live = held.live if restoration is not None and restoration.step == held.finished else {}
        state = job_state.state(sharded_model, inner)
        made.append(_Built(sharded_model, inner, with_memory(state, sharded_model.data.tensors(), spaces, live)))

    agree(
        build,
        what="The training could not be built again together with a new process.",
        hint="recovery=nbkit.Recovery(on_failure='stop')",
    )
    return made[0]
