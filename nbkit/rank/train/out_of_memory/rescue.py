"""A step of `fit` that runs out of memory on any rank: all ranks hear of it, take the step back, and go on otherwise.

In the order of this file: an alarm is on while steps are made, which wakes the ranks that wait for one that failed; all
groups are formed again; weights, optimizer, random state and position in the data are those of before the step; rank 0
computes what would fit, and all ranks put the same setting in force. The global batch stays, and so does the curve.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.errors import NotFinite, SwitchError, TrainingError
from nbkit.rank.comm.all_gather_objects import all_gather_objects
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.pipeline.p2p_groups import meet
from nbkit.rank.rng.seeding import Drawn
from nbkit.rank.telemetry.memory import storage_bytes
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.control import pause, step_boundary
from nbkit.rank.train.control.collective_guard import Guard, waited
from nbkit.rank.train.control.detached_flag import DETACHED
from nbkit.rank.train.estimate import free_memory
from nbkit.rank.train.out_of_memory import diagnosis, question, tensor_limit
from nbkit.rank.train.out_of_memory.apply import apply
from nbkit.rank.train.out_of_memory.remedies import Remedies, Remedy, Setting, alternatives, described, remedies
from nbkit.rank.train.replace import resume_fit
from nbkit.rank.train.step.optimizer_state import forget
from nbkit.rank.world import world
from nbkit.rank.world.failure_alarm import Alarm
from nbkit.records.events import OutOfMemory

if TYPE_CHECKING:
    from nbkit.rank.train.trainer import Trainer

POLICIES = ("ask", "fit", "raise")


def check_on_oom(on_oom: str | None) -> None:
    """Raise TrainingError where there is no such answer to a lack of memory."""
    if on_oom not in (None, *POLICIES):
        raise TrainingError(
            f"There is no on_oom {on_oom!r}.", numbers=", ".join(map(repr, POLICIES)), hint="on_oom='fit'"
        )


@dataclass(frozen=True)
class _Before:
    """What step number `step` + 1 changes beside weights, optimizer and position in the data. versions: of parameters
    that an optimizer without state is to update."""

    step: int
    drawn: Drawn
    buffers: dict[str, Tensor]
    versions: tuple[int, ...] | None


@dataclass(frozen=True)
class _Lack:
    """rank: that ran out; None: several. what: of what, and what else the numbers tell. since: when (time.time())."""

    rank: int | None
    what: str
    since: float


@contextmanager
def rescue(trainer: Trainer, on_oom: str | None) -> Iterator[Rescue]:
    """`fit` makes its steps inside. on_oom: None: "ask" where a notebook can answer."""
    rescuing = Rescue(trainer, on_oom or ("ask" if "control" in step_boundary.handlers else "raise"))
    try:
        yield rescuing
    finally:
        rescuing.end()


class Rescue:
    """Of one `fit`. tried: settings that did not fit."""

    def __init__(self, trainer: Trainer, on_oom: str) -> None:
        # A step is read again, which not all data can be.
        self._on = on_oom != "raise" and Alarm.possible() and trainer.job.feed.remakes
        self._trainer, self._policy = trainer, on_oom
        self._tried: set[Setting] = set()
        self._guard: Guard | None = None
        self._key = ""
        self._before: _Before | None = None
        self._levels: deque[int] = deque(maxlen=diagnosis.LEVELS)

    def end(self) -> None:
        """No step is guarded any more."""
        if self._guard is not None:
            self._guard.end()
            self._guard = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step and its boundary."""
        job = self._trainer.job
        if self._on:
            here = world.current()
            assert here is not None
            if self._guard is None or self._key != here.key:  # the groups were formed anew meanwhile
                self.end()
                self._key = here.key
                self._guard = Guard("memory", world_size=job.world_size, device=job.device)
            buffers = {key: tensor.clone() for key, (tensor, _) in job_state.buffers(job.sharded_model).items()}
            self._levels.append(diagnosis.level(job.device))
            versions = None if job.optimizer.state else self._versions()
            self._before = _Before(job.step, Drawn.so_far(), buffers, versions)
        limit = tensor_limit.in_force()
        held = tensor_limit.held_by(job.sharded_model, job.optimizer.inner)
        with limit.counting(held) if limit is not None else nullcontext():
            yield

    def _versions(self) -> tuple[int, ...]:
        groups = self._trainer.job.optimizer.inner.param_groups
        return tuple(p._version for group in groups for p in group["params"])

    def went_back(self, error: Exception) -> bool:
        """Whether `error` is a lack of memory on any rank, after which all ranks stand at a boundary and go on.

        Collective then. Raises TrainingError, on every rank, where nothing fits, or where the step cannot be taken
        back.
        """
        if not self._concerns(error):
            return False
        began, guard, job = time.time(), self._guard, self._trainer.job
        assert guard is not None
        own = accelerator().out_of_memory(error)
        findings = diagnosis.look(job.device, self._levels).findings() if own else []
        failures, self._guard = guard.failures(error), None
        _forget_frames(error)
        with job.ledger.clock.stopped():
            self._take_back()
            told = all_gather_objects(findings, world_size=job.world_size, device=job.device)
            what = "; ".join([failures.words, *dict.fromkeys(each for one in told for each in one)])
            self._go_on(error, _Lack(failures.rank, what, began))
        return True

    def _concerns(self, error: Exception) -> bool:
        guard = self._guard
        if guard is None or guard.alarm.world.dirty or isinstance(error, NotFinite):
            return False
        if accelerator().out_of_memory(error):
            return True
        try:
            return waited(error) and guard.alarm.rung()
        except Exception:  # the store is gone, and rank 0 with it: no lack of memory
            return False

    def _take_back(self) -> None:
        """All ranks stand at the boundary before the step, or behind it where others have made it. Collective."""
        job, before, self._before = self._trainer.job, self._before, None
        assert before is not None
        job.break_off()
        job.backups.break_off()
        if job.integrity.half_way and before.versions is not None and before.versions == self._versions():
            # The optimizer had made its state, and updated nothing.
            forget(job.optimizer.inner)
            job.integrity.half_way = False
        if not job.integrity.half_way and job.step == before.step:
            with torch.no_grad():
                for key, (tensor, _) in job_state.buffers(job.sharded_model).items():
                    tensor.copy_(before.buffers[key])
        job.integrity.broken_off = True
        try:
            job.level_now()
        except TrainingError:  # of all ranks alike: what one rank alone holds is torn
            if resume_fit.host is None or not job.backups.on:
                raise
            resume_fit.host.recover(self._trainer, ())
        if job.step == before.step:
            before.drawn.restore()
        job.pending = None
        meet(job.sharded_model.connections.edges, job.device)
        job.meet(job.backups.asked)
        step_boundary.meet(job.device)
        job.ledger.begin_again()

    def _go_on(self, error: Exception, lack: _Lack) -> None:
        job, batch = self._trainer.job, self._trainer.arithmetic.total
        before = Setting.of(job, batch)
        self._tried.add(before)
        found = self._found(batch)
        self._tell(lack, found, None)
        if self._policy == "ask":
            self._ask(error, lack, found, batch)
        else:
            self._take_first(error, lack, found, batch)
        now = Setting.of(job, batch)
        row = next((row for row in found.rows if row.setting == now), None)
        peak, seconds = (row.peak, row.seconds) if row is not None else (None, None)
        self._tell(lack, found, Remedy(now, now.changes(before) or "the same setting", peak, None, seconds))

    def _take_first(self, error: Exception, lack: _Lack, found: Remedies, batch: int) -> None:
        while True:
            if (chosen := found.first) is None:
                raise self._hopeless(error, lack, found)
            try:
                apply(self._trainer.job, chosen.setting, batch)
                return
            except SwitchError:  # of all ranks alike: the next one
                self._tried.add(chosen.setting)
                found = self._found(batch)

    def _ask(self, error: Exception, lack: _Lack, found: Remedies, batch: int) -> None:
        """Hold the training until somebody has answered, or end `fit` where nobody can while its cell runs."""
        job = self._trainer.job
        asked = question.Question(weakref.ref(job), batch, found)
        question.put(asked)
        if not DETACHED.get():
            wanting = TrainingError(
                f"A step ran out of memory, and was taken back: {lack.what}",
                numbers=asked.text,
                hint=f"{question.COMMAND} or {question.COMMAND} N, then this cell again: fit goes on from here",
            )
            wanting.__cause__ = error
            raise wanting
        if job.rank == 0:
            print(f"\rOut of memory in step {job.step + 1}, which was taken back: {lack.what}\n{asked.text}")
            print(f"The training waits: {question.COMMAND}, or %strategy and %train resume", flush=True)
        step_boundary.report(waits=f"out of memory: {question.COMMAND}")
        try:
            pause.hold(job.device)
        finally:
            step_boundary.report(waits="")
            question.put(None)

    def _tell(self, lack: _Lack, found: Remedies, chosen: Remedy | None) -> None:
        """An event: of what has happened, and of what was done about it."""
        job = self._trainer.job
        event = OutOfMemory(
            job.step,
            rank=lack.rank,
            what=lack.what,
            changes=chosen.changes if chosen is not None else "",
            old_peak=found.peak or 0,
            peak=(chosen.peak or 0) if chosen is not None else 0,
            room=found.room or 0,
            step_s=(chosen.seconds or 0.0) if chosen is not None else 0.0,
            seconds=time.time() - lack.since,
        )
        job.ledger.emit(event)
        if job.rank == 0 and chosen is not None:
            print(f"\r{event.said}", flush=True)

    def _found(self, batch: int) -> Remedies:
        """The same on every rank: rank 0 computes them, for the rank that has least. Collective."""
        job = self._trainer.job
        job.builder.learn(alternatives(job))
        rooms = all_gather_objects(_room(job), world_size=job.world_size, device=job.device)
        told: list[Any] = [None]
        if job.rank == 0:
            known = [room for room in rooms if room is not None]
            with torch.random.fork_rng(devices=[]):
                job.builder.may_cut()
                told[0] = remedies(job, batch, min(known, default=None), self._tried)
        if job.world_size > 1:
            dist.broadcast_object_list(told, src=0, device=job.device)
        found: Remedies = told[0]
        return found

    def _hopeless(self, error: Exception, lack: _Lack, found: Remedies) -> TrainingError:
        rows = "\n".join(described(found, lambda number: ""))
        hopeless = TrainingError(
            f"A step ran out of memory, and nothing that keeps the global batch fits: {lack.what}",
            numbers=rows,
            hint="a smaller batch_size, or more ranks; trainer.fit(...) goes on from here",
        )
        hopeless.__cause__ = error
        return hopeless


def _forget_frames(error: BaseException) -> None:
    """Nothing that was computed before `error` is held by it. A cleared frame still has what its function closes over,
    and torch's modules close over what they are called with."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    gc.collect()


def _room(job: Any) -> int | None:
    """Bytes that tensors of the training can take on this rank; None where nothing says."""
    free_memory.trim(job.device)
    left = free_memory.left(job.device)
    if left is None:
        return None
    return left + storage_bytes(tensor_limit.held_by(job.sharded_model, job.optimizer.inner), set())
