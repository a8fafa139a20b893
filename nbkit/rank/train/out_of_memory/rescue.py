"""Undo a step of `fit` that runs out of memory on any rank, and continue with another setting.

OomGuard: while steps are made, an alarm wakes the ranks that wait for a failed rank. All groups are formed again.
Weights, optimizer, random state and position in the data go back to before the step. Rank 0 computes which settings
would fit, and all ranks apply the same one. The global batch does not change, and so neither does the loss curve.

`apply` applies a setting between two steps: rows of a forward pass, recomputation, offload and strategy.

Question asks the user which of the settings to use. It is open on all ranks, from the undone step until the user
chooses a row or a step is made. In a detached cell the training is held meanwhile. Otherwise `fit` has ended with an
error, and the next `fit` continues.

DeviceMemory finds other reasons than the step for the lack of memory, if the numbers show them: a leak, gaps, other
processes.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbkit.errors import SwitchError, TrainingError, UsageError
from nbkit.rank.comm.agree import all_gather_objects
from nbkit.rank.data.batch import BatchSplit
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.module.forward_wrapper import recompute
from nbkit.rank.parallel.parallelize import blocks_held
from nbkit.rank.parallel.process_groups import meet_groups
from nbkit.rank.telemetry.health import storage_bytes
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.step_boundary import DETACHED
from nbkit.rank.train.estimate import free_memory
from nbkit.rank.train.job import Job
from nbkit.rank.train.out_of_memory import tensor_limit
from nbkit.rank.train.out_of_memory.remedies import Remedies, Remedy, Setting, alternatives, described, remedies
from nbkit.rank.train.replace import resume_fit
from nbkit.rank.train.step.optimizer_state import forget, offload, to_host
from nbkit.rank.train.transaction import KeptBuffers, Transaction, waited
from nbkit.rank.world import world
from nbkit.rank.world.failure_alarm import Alarm
from nbkit.records.events import OutOfMemory

if TYPE_CHECKING:
    from nbkit.rank.train.trainer import Trainer


def apply(job: Job, setting: Setting, batch: int) -> None:
    """Apply `setting` from the next step on. Collective. batch: rows of the global batch.

    Raises SwitchError if the switch to its strategy fails. Then the old strategy stays, with the rest of `setting`.
    """
    now = Setting.of(job, batch)
    if setting.recompute != now.recompute:
        _recompute(job, setting.recompute)
    if setting.offload and not now.offload:
        offload(job.optimizer.inner)
        to_host(job.optimizer.inner)
        job.configure(offload="cpu")
        job.builder.offload = True
    most = BatchSplit.of(batch, setting.strategy, microbatch_size=None).micro
    if setting.strategy.pp == 1 and (setting.microbatch_size < most or job.config.compute.microbatch_size is not None):
        _cut(job, setting)
    job.forget_estimates()
    job.switch(str(setting.strategy))
    job.feed.recut()


def _cut(job: Job, setting: Setting) -> None:
    job.configure(microbatch_size=setting.microbatch_size)
    job.builder.choose(cut=True)


def _recompute(job: Job, how: bool | str) -> None:
    job.configure(recompute=how)
    job.builder.choose(recompute=how)
    module, facts = job.sharded_model.module, job.builder.facts
    blocks = blocks_held(module, facts, job.builder.skeleton, job.strategy)
    recompute(module, blocks, selective=how == "selective")


COMMAND = "%train fit"


@dataclass(frozen=True)
class Question:
    """The open question of a job: which of the settings in `found` to use. batch: rows of the global batch."""

    job: weakref.ref[Job]
    batch: int
    found: Remedies

    @property
    def text(self) -> str:
        """The table of settings, with the command for each row."""
        return "\n".join(described(self.found, lambda number: f"{COMMAND} {number}"))


_open: Question | None = None


def put(question: Question | None) -> None:
    """Make `question` the open one; None: no question is open."""
    global _open
    _open = question


def answer(job: Job | None, number: int = 0) -> dict[str, Any]:
    """Apply row `number` of the open question, and return this row. Collective, between two steps.

    number: 0 takes the first row that fits. Raises UsageError if there is no such row or no open question, and the
    errors of `apply`.
    """
    question = _open
    if job is None or question is None or question.job() is not job:
        raise UsageError("No step has run out of memory, so there is nothing to fit.", hint="%strategy, %train pause")
    rows = question.found.rows
    if not 0 <= number <= len(rows):
        raise UsageError(f"There is no row {number}.", numbers=f"rows 1 to {len(rows)}", hint=f"{COMMAND} 1")
    row = rows[number - 1] if number else question.found.first
    if row is None:
        raise UsageError(
            "No setting fits according to the computed memory.",
            numbers=question.text,
            hint=f"{COMMAND} 1 tries it anyway",
        )
    apply(job, row.setting, question.batch)
    put(None)
    return {"changes": row.changes, "peak": row.peak, "fits": row.fits, "seconds": row.seconds}


LEVELS = 6
"""If the bytes at the beginning of a step grow over so many successive steps, there is a leak."""
_SHARE = 0.02  # least growth that shows a leak, as a fraction of the bytes in use
_MUCH = 0.1  # least size of a finding, as a fraction of the device's memory
_OWN = 10**9  # bytes that CUDA, cuBLAS and NCCL use in this process outside of torch's allocator


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on a rank's device when an allocation failed; 0 if unknown.

    total: the size of the memory. used: bytes used by all processes. reserved: bytes that torch's allocator has
    reserved. allocated: bytes of tensors of this process. levels: the allocated bytes at the beginning of each of the
    last steps.
    """

    total: int = 0
    used: int = 0
    reserved: int = 0
    allocated: int = 0
    levels: Sequence[int] = ()

    def findings(self) -> list[str]:
        """Return the findings as sentences; an empty list if the step itself is too large."""
        found = []
        last = list(self.levels)[-LEVELS:]
        grown = last[-1] - last[0] if last else 0
        rises = all(after > before for before, after in pairwise(last))
        if len(last) == LEVELS and rises and grown > _SHARE * last[-1]:
            found.append(
                f"live tensors grew by {_mb(grown / (LEVELS - 1))} a step over {LEVELS - 1} steps: "
                "something keeps them, such as a list of losses without .item()"
            )
        if (gaps := self.reserved - self.allocated) > _MUCH * self.total > 0:
            found.append(
                f"{_mb(gaps)} of {_mb(self.reserved)} that torch has reserved lie in gaps between tensors: "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before %cluster start"
            )
        if (others := self.used - self.reserved - _OWN) > _MUCH * self.total > 0:
            found.append(f"{_mb(others)} of {_mb(self.total)} are held by others on this device: see nvidia-smi")
        return found


def level(device: torch.device) -> int:
    """Return the bytes of this rank's tensors now; 0 if unknown."""
    if accelerator().holds(device):
        return accelerator().memory(device)[0]
    limit = tensor_limit.in_force()
    return limit.now if limit is not None else 0


def look(device: torch.device, levels: Sequence[int]) -> DeviceMemory:
    """Measure the memory now. Call it while the tensors of the step still exist. levels: see DeviceMemory."""
    if not accelerator().holds(device):
        return DeviceMemory(levels=tuple(levels))
    total, used, reserved = accelerator().occupied(device)
    return DeviceMemory(total, used, reserved, accelerator().memory(device)[0], tuple(levels))


def _mb(size: float) -> str:
    return f"{size / 1e6:,.4g} MB"


class KeptStep(KeptBuffers):
    """Keeps the state that a step changes before the optimizer's step. Ranks can go back from any point of the step."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer.job)
        self._trainer = trainer
        # The versions of the parameters, if the optimizer has no state yet.
        self._versions = None if trainer.job.optimizer.state else _versions(trainer.job)

    def restore_all(self, job: Job, error: Exception | None = None) -> None:
        """Bring all ranks to the boundary before the step, or after it if some ranks have finished it. Collective."""
        if error is not None:
            _forget_frames(error)
        job.break_off()
        job.backups.break_off()
        if job.integrity.half_way and self._versions is not None and self._versions == _versions(job):
            # The optimizer had made its state, but had not updated a parameter.
            forget(job.optimizer.inner)
            job.integrity.half_way = False
        if not job.integrity.half_way and job.step == self.step:
            self.restore(job)
        job.integrity.broken_off = True
        try:
            job.sync.resync_now()
        except TrainingError:  # raised on all ranks: state that only one rank holds is half-way
            if resume_fit.host is None or not job.backups.on:
                raise
            resume_fit.host.recover(self._trainer, ())
        if job.step == self.step:
            self.drawn.restore()
        job.switcher.forget()
        meet_groups(job.sharded_model.connections, job.device)
        job.sync.sync_step(job.backups.asked)
        step_boundary.meet(job.device)
        job.ledger.begin_again()


def _versions(job: Job) -> tuple[int, ...]:
    return tuple(p._version for group in job.optimizer.inner.param_groups for p in group["params"])


@dataclass(frozen=True)
class OomReport:
    """A lack of memory. rank: the rank that ran out; None if several. what: errors and findings. since: time.time()."""

    rank: int | None
    what: str
    since: float


@contextmanager
def rescue(trainer: Trainer, on_oom: str | None) -> Iterator[OomGuard]:
    """Yield the guard for the steps of a `fit`. on_oom: see Recovery. None is "ask" if a notebook can answer."""
    rescuing = OomGuard(trainer, on_oom or ("ask" if "control" in step_boundary.handlers else "raise"))
    try:
        yield rescuing
    finally:
        rescuing.end()


class OomGuard:
    """Guards the steps of one `fit` against a lack of memory. It remembers the settings that did not fit."""

    def __init__(self, trainer: Trainer, on_oom: str) -> None:
        # An undone step reads its batch again, and not all data can be read again.
        self._on = on_oom != "raise" and Alarm.possible() and trainer.job.feed.remakes
        self._trainer, self._policy = trainer, on_oom
        self._tried: set[Setting] = set()
        self._step: Transaction | None = None
        self._key = ""
        self._levels: deque[int] = deque(maxlen=LEVELS)

    def end(self) -> None:
        """End the guard."""
        if self._step is not None:
            self._step.commit()
            self._step = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Guard one step, and the work at the boundary after it, inside."""
        job = self._trainer.job
        if self._on:
            here = world.current()
            assert here is not None
            savepoint = KeptStep(self._trainer)
            if self._step is None or self._key != here.key:  # the groups were formed again since
                self.end()
                self._key = here.key
                self._step = Transaction(job, savepoint)
                self._step.guard("memory")
            self._step.savepoint = savepoint
            self._levels.append(level(job.device))
        if (limit := tensor_limit.in_force()) is None:
            yield
            return
        with limit.counting(tensor_limit.held_by(job.sharded_model, job.optimizer.inner)):
            yield

    def rolled_back(self, error: Exception) -> bool:
        """Return True if `error` was a lack of memory on any rank, and all ranks are at a boundary again.

        Collective in this case. Raises TrainingError, on every rank, if nothing fits or the step cannot be undone.
        """
        own, step, job = accelerator().out_of_memory(error), self._step, self._trainer.job
        if step is None or not (own or waited(error)) or not step.concerns(error):
            return False
        began, self._step = time.time(), None
        findings = look(job.device, self._levels).findings() if own else []
        failures = step.roll_back(error)
        with job.ledger.clock.stopped():
            told = all_gather_objects(findings, world_size=job.world_size, device=job.device)
            what = "; ".join([failures.words, *dict.fromkeys(each for one in told for each in one)])
            self._go_on(error, OomReport(failures.rank, what, began))
        return True

    def _go_on(self, error: Exception, lack: OomReport) -> None:
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

    def _take_first(self, error: Exception, lack: OomReport, found: Remedies, batch: int) -> None:
        while True:
            if (chosen := found.first) is None:
                raise self._hopeless(error, lack, found)
            try:
                apply(self._trainer.job, chosen.setting, batch)
                return
            except SwitchError:  # raised on all ranks, so try the next one
                self._tried.add(chosen.setting)
                found = self._found(batch)

    def _ask(self, error: Exception, lack: OomReport, found: Remedies, batch: int) -> None:
        """Hold the training until the user answers. If the user cannot answer while the cell runs, end `fit`."""
        job = self._trainer.job
        asked = Question(weakref.ref(job), batch, found)
        put(asked)
        if not DETACHED.get():
            wanting = TrainingError(
                f"A step ran out of memory, and was taken back: {lack.what}",
                numbers=asked.text,
                hint=f"{COMMAND} or {COMMAND} N, then this cell again: fit continues from here",
            )
            wanting.__cause__ = error
            raise wanting
        if job.rank == 0:
            print(f"\rOut of memory in step {job.step + 1}, which was taken back: {lack.what}\n{asked.text}")
            print(f"The training waits: {COMMAND}, or %strategy and %train resume", flush=True)
        step_boundary.report(waits=f"out of memory: {COMMAND}")
        try:
            step_boundary.hold(job.device)
        finally:
            step_boundary.report(waits="")
            put(None)

    def _tell(self, lack: OomReport, found: Remedies, chosen: Remedy | None) -> None:
        """Emit an event about the lack of memory and about the remedy that was chosen."""
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
        """Return the same remedies on every rank. Collective. Rank 0 computes them for the rank with the least room."""
        job = self._trainer.job
        job.builder.finder.sync(alternatives(job))
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

    def _hopeless(self, error: Exception, lack: OomReport, found: Remedies) -> TrainingError:
        rows = "\n".join(described(found, lambda number: ""))
        hopeless = TrainingError(
            f"A step ran out of memory, and nothing that keeps the global batch fits: {lack.what}",
            numbers=rows,
            hint="a smaller batch_size, or more ranks; trainer.fit(...) continues from here",
        )
        hopeless.__cause__ = error
        return hopeless


def _forget_frames(error: BaseException) -> None:
    """Drop the frames of `error`, so that it keeps no results of the step alive.

    Clearing the frames is not enough: a cleared frame keeps the closure of its function, and torch's modules close over
    their arguments.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    gc.collect()


def _room(job: Any) -> int | None:
    """Return the bytes that tensors of the training can use on this rank; None if unknown."""
    free_memory.trim(job.device)
    left = free_memory.left(job.device)
    if left is None:
        return None
    return left + storage_bytes(tensor_limit.held_by(job.sharded_model, job.optimizer.inner), set())
