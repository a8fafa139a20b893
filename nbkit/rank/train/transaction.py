"""Change a running job so that every rank makes the change, or every rank comes back to the step boundary before it.

A `Transaction` begins at a `Savepoint`, which keeps what the change may touch. While the change is made, a `Guard` is
on: a rank that fails wakes the ranks that wait for it. `agree` and `Ballot` tell all ranks whether all have come so
far. Then `commit` lets the change stay, and `roll_back` brings every rank back. A transaction that is left without a
commit is rolled back. These changes are made so:

    change            keeps                           comes back by                         ranks agree by
    try, compare      the old state, by reference     putting it in force again, always     Guard on the first step
    a switch          the old state, by reference     putting it in force again             Guard until the first step
                                                                                            is made, Comparison
    ... if crowded    copies of the buffers           a switch back, before the optimizer   Guard until the optimizer
                                                      begins                                begins
    ... in place      the digest of the old state     the same exchange, backwards          Ballot after each stage
    out of memory     copies of the buffers           taking over the furthest whole step   Guard, RankSync
                                                      of all ranks, or the backups
    rewind            a copy in host memory           an exchange                           all ranks plan it

Two more ways lead back from an error that was not guarded. `RankSync.resync` brings ranks that were interrupted in
different steps to one step (control/rank_sync.py). `recover` restores what a dead rank held (replace/recover.py).

`held_back` delays interrupts for a few lines that every rank must run, or none. `TrainingState` is the state that a
switch replaces and that going back restores, as one value.
"""

from __future__ import annotations

import gc
import json
import signal
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from traceback import clear_frames
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.errors import NotFinite, SwitchError, TrainingError
from nbkit.rank.comm.agree import all_gather_objects, largest
from nbkit.rank.comm.background_creation import BROKEN_OFF
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.process_groups import meet_groups
from nbkit.rank.parallel.reshard.plain_attributes import take_along, take_objects_along
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.rng.host_generators import Drawn
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.step.failure import PEER_GONE
from nbkit.rank.train.step.model_handle import Shown, shown_by
from nbkit.rank.world.failure_alarm import Alarm, AlarmHeard
from nbkit.strategy import Strategy

Job = Any  # nbkit.rank.train.job's, which imports this file


@dataclass(frozen=True)
class TrainingState:
    """The state of a training between two steps on this rank.

    shown: what the modules of the sharded model show. They may be the user's own modules, which take on the attributes
    of the state in force. position: in the data. precision: the loss scale (see Precision.state_dict).
    """

    sharded_model: ShardedModel
    optimizer: torch.optim.Optimizer
    shown: Shown
    step: int
    position: Any
    precision: dict[str, Any]

    def under(self, sharded_model: ShardedModel, optimizer: torch.optim.Optimizer) -> TrainingState:
        """Return the same place in the training, with another sharded model and its optimizer.

        The model takes plain attributes along, and others too if it is known to change them as it runs.
        """
        old, facts = self.sharded_model, sharded_model.plan.facts
        take_along(old.module, old.built, sharded_model.module, left=facts.caches)
        if facts.outside is not None:
            take_objects_along(self.sharded_model.module, sharded_model.module)
        return replace(self, sharded_model=sharded_model, optimizer=optimizer, shown=shown_by(sharded_model.module))


def free(states: list[TrainingState]) -> None:
    """Close what computed under the only one of `states`, take it out, and free its memory.

    On a GPU the memory goes back to the device: NCCL takes the memory of a communicator from there, and cannot have
    what torch's allocator keeps in reserve.
    """
    device = next((tensor.device for tensor in states[0].sharded_model.data.tensors()), torch.device("cpu"))
    held = [weakref.ref(tensor) for tensor in states[0].sharded_model.data.tensors()]
    states[0].sharded_model.close()
    states.clear()
    # The next steps need its memory. Collect only if necessary: a collection takes longer than the rest of a switch.
    if any(tensor() is not None for tensor in held):
        gc.collect()
    if accelerator().holds(device):
        accelerator().trim()


class Transaction:
    """A change of `job` that every rank makes, or none. Left without `commit`, it comes back to `savepoint`."""

    def __init__(self, job: Job, savepoint: Savepoint) -> None:
        self.job = job
        self.savepoint: Savepoint | None = savepoint
        self._guard: Guard | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self.unguard()
        if (savepoint := self.savepoint) is not None:
            self.savepoint = None
            savepoint.restore(self.job, error)
        return None

    def guard(self, name: str) -> None:
        """Have all ranks hear of an error from now on. name: the same on every rank, different for every change."""
        self._guard = Guard(name, world_size=self.job.world_size, device=self.job.device)

    def agree(self) -> None:
        """Check that all ranks have come so far without an error. Collective."""
        if self._guard is not None:
            self._guard.agree()

    def check(self) -> None:
        """Raise AlarmHeard if another rank has failed, as far as this rank has heard."""
        if self._guard is not None:
            self._guard.alarm.check()

    def unguard(self) -> None:
        """Let a later error concern this rank alone."""
        if self._guard is not None:
            self._guard.end()

    def concerns(self, error: BaseException) -> bool:
        """Return True if all ranks hear of `error`, and can come back: see Guard.concerns."""
        return self._guard is not None and self._guard.concerns(error)

    def commit(self) -> None:
        """Let the change stay, and drop what was kept."""
        self.savepoint = None
        self.unguard()

    def roll_back(self, error: Exception) -> Failures:
        """Bring all ranks back after `error`, which the guard `concerns`. Return what failed on which rank. Collective.

        Raises what keeps the ranks from coming back.
        """
        assert self._guard is not None
        job, failures = self.job, self._guard.failures(error)
        savepoint, self.savepoint = self.savepoint, None
        if savepoint is None:
            raise TrainingError(
                "Nothing was kept to come back to.", numbers=failures.words, hint="trainer.load(path) of a checkpoint"
            )
        with job.ledger.clock.stopped():
            savepoint.restore_all(job, error)
        job.integrity.restored(ranks_agree=True)
        return failures


class Savepoint:
    """A step boundary that a job can come back to. A subclass keeps the tensors, in its own way.

    strategy: in force then, or the one to come back to.
    """

    def __init__(self, job: Job, *, strategy: Strategy | None = None) -> None:
        self.step, self.strategy = job.step, job.strategy if strategy is None else strategy

    def restore(self, job: Job, error: BaseException | None = None) -> None:
        """Bring this rank back, without a message. error: what has ended the transaction."""
        raise NotImplementedError

    def restore_all(self, job: Job, error: Exception | None = None) -> None:
        """Bring all ranks back. Collective. Raises SwitchError, on every rank, if one cannot."""
        with Ballot(job.strategy, job.world_size, job.device).all_or_none(f"going back to {self.strategy}"):
            self.restore(job)
        meet_groups(job.sharded_model.connections, job.device)


class BeforeSteps(Savepoint):
    """A savepoint whose restoring forgets the steps and switches since then. switches: how many were made before it.

    drawn: the generators of Python and numpy, which steps do not seed.
    """

    def __init__(self, job: Job, *, strategy: Strategy | None = None, switches: int | None = None) -> None:
        super().__init__(job, strategy=strategy)
        self.switches = len(job.switches) if switches is None else switches
        self.drawn = Drawn.so_far()

    def forget_steps(self, job: Job) -> None:
        """Forget the steps and switches that the job has made since then."""
        job.ledger.forget(self.step)
        del job.switches[self.switches :]
        self.drawn.restore()


class KeptState(BeforeSteps):
    """Keeps `state` as it is: another sharded model computes in its place until it is in force again."""

    def __init__(
        self, job: Job, state: TrainingState, *, strategy: Strategy | None = None, switches: int | None = None
    ) -> None:
        super().__init__(job, strategy=strategy, switches=switches)
        self.state = state

    def restore(self, job: Job, error: BaseException | None = None) -> None:
        """Put the state in force again."""
        later: list[weakref.ref[Tensor]] = []
        if job.sharded_model is not self.state.sharded_model:
            later = [weakref.ref(tensor) for tensor in job.sharded_model.data.tensors()]
        with held_back():
            job.switcher.forget()
            job.restore(self.state)
            self.forget_steps(job)
        if any(tensor() is not None for tensor in later):
            gc.collect()  # the next step wants the memory


class KeptBuffers(BeforeSteps):
    """Copies the buffers, which forward passes change. The weights do not change before the optimizer begins."""

    def __init__(self, job: Job, *, strategy: Strategy | None = None, switches: int | None = None) -> None:
        super().__init__(job, strategy=strategy, switches=switches)
        self.position = job.feed.position()
        self._copies = {key: tensor.clone() for key, (tensor, _) in job_state.buffers(job.sharded_model).items()}

    @torch.no_grad()
    def restore(self, job: Job, error: BaseException | None = None) -> None:
        """Put the buffers back."""
        for key, (tensor, _) in job_state.buffers(job.sharded_model).items():
            tensor.copy_(self._copies[key])

    def restore_all(self, job: Job, error: Exception | None = None) -> None:
        """Go back by another switch, since the old state was not kept. Collective."""
        self.restore(job)
        job.optimizer.zero_grad()
        job.ledger.forget(self.step)
        job.switcher.forget()
        job.sync.restored()
        job.switch(str(self.strategy))
        job.switcher.forget()  # there is no way back from the way back
        job.feed.go_to(self.position)
        self.forget_steps(job)


@dataclass
class RankVote:
    """The report of a rank on something that was done.

    doing: what it is doing, for the error. numbers: compared by all. largest: of each of the numbers, the largest over
    all ranks, known afterwards.
    """

    doing: str
    numbers: list[int]
    largest: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Ballot:
    """The agreement of all ranks about a switch. goes_on: the strategy that stays in force when the switch fails."""

    goes_on: Strategy
    world_size: int
    device: torch.device

    def gather(self, own: Any, doing: str, failure: Exception | None = None) -> list[Any]:
        """Return what every rank has, by rank. Collective. Raises SwitchError, on every rank, if one had a failure."""
        everyone = all_gather_objects((_first_line(failure), own), world_size=self.world_size, device=self.device)
        self._check(doing, [spoken for spoken, _ in everyone], failure)
        return [each for _, each in everyone]

    @contextmanager
    def all_or_none(self, doing: str, *, numbers: int = 0) -> Iterator[RankVote]:
        """Run the body on every rank. If it fails on any rank, raise SwitchError on every rank.

        numbers: how many are compared; they are zeros unless set. Collective: one small all-reduce; waits for the
        device.
        """
        said, failure = RankVote(doing, [0] * numbers), None
        try:
            yield said
        except Exception as error:
            failure = error
        failed, *said.largest = largest([int(failure is not None), *said.numbers], device=self.device)
        if failed:
            own = _first_line(failure), said.doing
            everyone = all_gather_objects(own, world_size=self.world_size, device=self.device)
            done = next((doing for spoken, doing in everyone if spoken), doing)
            self._check(done, [spoken for spoken, _ in everyone], failure)

    def _check(self, doing: str, spoken: Sequence[str], own: Exception | None) -> None:
        if failed := [(rank, text) for rank, text in enumerate(spoken) if text]:
            raise SwitchError(
                f"The switch failed while {doing}; {self.goes_on} goes on, unchanged.",
                numbers="; ".join(f"rank {rank}: {text}" for rank, text in failed[:2]) + "; ..." * (len(failed) > 2),
                hint="%strategy shows what can be picked",
            ) from own


@dataclass(frozen=True)
class Failures:
    """The failures of all ranks. reported: the error of each rank; "" for a rank that only waited for another."""

    reported: Sequence[str]

    @property
    def rank(self) -> int | None:
        """The rank that failed; None if several did."""
        failed = [rank for rank, text in enumerate(self.reported) if text]
        return failed[0] if len(failed) == 1 and len(self.reported) > 1 else None

    @property
    def words(self) -> str:
        """The ranks that failed, with their errors."""
        if len(set(self.reported)) == 1:
            return self.reported[0]
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(self.reported) if text]
        return "; ".join(failed[:2]) + "; ..." * (len(failed) > 2)


class Guard:
    """Guards a step from its construction until `end`. name: the same on every rank, and different for every step."""

    def __init__(self, name: str, *, world_size: int, device: torch.device) -> None:
        self._world_size, self._device = world_size, device
        self.alarm, self._ended = Alarm(name), not Alarm.possible()
        if not self._ended:
            self.alarm.begin()

    def agree(self) -> None:
        """Check that all ranks have come here without a failure. Collective: one small all-reduce."""
        if self._world_size > 1:
            here = torch.ones((), device=self._device)
            dist.all_reduce(here)
            all_here = int(here) == self._world_size  # waits, since a collective broken off on a GPU raises nothing
            self.alarm.check()
            if not all_here:
                raise AlarmHeard("another rank has failed")

    def end(self) -> None:
        """End the guard: a later failure does not concern the other ranks."""
        self._ended = True
        self.alarm.end()

    def concerns(self, error: BaseException) -> bool:
        """Return True if `error` is a failure of the guarded step that all ranks can hear of.

        An interrupt is not, nor a rank that died. NotFinite is not either: its cause is the data, and all ranks raise
        it alike.
        """
        if self._ended or not isinstance(error, Exception) or isinstance(error, NotFinite) or self.alarm.world.dirty:
            return False
        try:
            return not waited(error) or self.alarm.rung()
        except Exception:
            return False  # the store is gone, and rank 0 with it

    def failures(self, error: Exception) -> Failures:
        """Return the failures of all ranks, `error` being this rank's. Collective.

        Afterwards all ranks are between two collectives. Raises TrainingError, on every rank, if a device no longer
        computes, and ClusterError if the ranks do not come together.
        """
        alarm = self.alarm
        self.end()
        try:
            if not waited(error):
                alarm.ring()
            said = [json.loads(each) for each in alarm.meet(json.dumps([_spoken(error), _unfit(self._device)]))]
            alarm.mend()
        except BaseException:
            # Whatever failed, other ranks may have been woken, and their groups are broken.
            alarm.world.dirty = alarm.world.dirty or "a step failed, and the ranks did not come together"
            raise
        if unfit := [f"rank {rank}: {why}" for rank, (_, why) in enumerate(said) if why]:
            raise TrainingError("A device does not compute any more.", numbers=unfit[0], hint="%cluster restart")
        let_go(error)
        return Failures([text for text, _ in said])


def waited(error: BaseException) -> bool:
    """Return True if this rank failed because it waited for one that had failed, or was broken out."""
    # The first use of an NCCL communicator is a rendezvous in Python, which raises a different error.
    return isinstance(error, AlarmHeard) or any(sign in str(error) for sign in (*PEER_GONE, BROKEN_OFF))


def let_go(failed: BaseException) -> None:
    """Free the objects held by the frames that `failed` passed through, and by cycles. The memory is needed next."""
    link: BaseException | None = failed
    while link is not None:
        clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    gc.collect()


@contextmanager
def held_back() -> Iterator[None]:
    """Delay a SIGINT that arrives inside until the end. Only for short code that waits for nobody."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals act only in the main thread
        return
    arrived: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
        if arrived:
            signal.raise_signal(signal.SIGINT)


def _spoken(error: BaseException) -> str:
    return "" if waited(error) else _first_line(error)


def _first_line(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]


def _unfit(device: torch.device) -> str:
    """Return why the device of this rank cannot go on, as after an assert in a kernel; "" if it can."""
    if not accelerator().holds(device):
        return ""
    try:
        accelerator().wait_for_all(device)
    except Exception as error:
        return _spoken(error)
    return ""
