"""Change a running job atomically: either all ranks make the change, or all go back to the step boundary before it.

A `Transaction` begins at a `Savepoint`, which keeps the state that the change may modify. During the change a `Guard`
is active: a rank that fails wakes the ranks that wait for it. `agree` and `Ballot` tell all ranks if all have come to
this point. Then `commit` keeps the change, or `roll_back` brings all ranks back. A transaction that is left without a
commit is rolled back. These changes are transactions:

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

After an error without a guard there are two more ways back. `RankSync.resync` brings ranks that were interrupted in
different steps to the same step (control/rank_sync.py). `recover` restores the state of a dead rank
(replace/recover.py).

`held_back` delays interrupts during a few lines that all ranks must run, or none. `TrainingState` is the state that a
switch replaces and a rollback restores, as one value.
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

    shown: class and attributes of the modules of the sharded model. They may be the user's own module objects, which
    take over the attributes of the state in force. position: the position in the data. precision: the loss scale (see
    Precision.state_dict).
    """

    sharded_model: ShardedModel
    optimizer: torch.optim.Optimizer
    shown: Shown
    step: int
    position: Any
    precision: dict[str, Any]

    def under(self, sharded_model: ShardedModel, optimizer: torch.optim.Optimizer) -> TrainingState:
        """Return this state with another sharded model and its optimizer.

        Copy the plain attributes of the old module to the new one, and other attributes that the model is known to
        change while it runs.
        """
        old, facts = self.sharded_model, sharded_model.plan.facts
        take_along(old.module, old.built, sharded_model.module, left=facts.caches)
        if facts.outside is not None:
            take_objects_along(self.sharded_model.module, sharded_model.module)
        return replace(self, sharded_model=sharded_model, optimizer=optimizer, shown=shown_by(sharded_model.module))


def free(states: list[TrainingState]) -> None:
    """Close the sharded model of the only element of `states`, remove the element, and free its memory.

    On a GPU the memory is returned to the device. NCCL allocates communicators there, and cannot use the reserve of
    torch's allocator.
    """
    device = next((tensor.device for tensor in states[0].sharded_model.data.tensors()), torch.device("cpu"))
    held = [weakref.ref(tensor) for tensor in states[0].sharded_model.data.tensors()]
    states[0].sharded_model.close()
    states.clear()
    # The next steps need the memory. Collect only if necessary: a collection takes longer than the rest of a switch.
    if any(tensor() is not None for tensor in held):
        gc.collect()
    if accelerator().holds(device):
        accelerator().trim()


class Transaction:
    """A change of `job` that all ranks make, or none. Without `commit`, leaving the context restores `savepoint`."""

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
        """Tell all ranks about errors from now on. name: equal on all ranks, and different for every change."""
        self._guard = Guard(name, world_size=self.job.world_size, device=self.job.device)

    def agree(self) -> None:
        """Check that all ranks have come to this point without an error. Collective."""
        if self._guard is not None:
            self._guard.agree()

    def check(self) -> None:
        """Raise AlarmHeard if this rank has been told that another rank failed. Sends nothing."""
        if self._guard is not None:
            self._guard.alarm.check()

    def unguard(self) -> None:
        """Do not tell other ranks about later errors."""
        if self._guard is not None:
            self._guard.end()

    def concerns(self, error: BaseException) -> bool:
        """Return True if all ranks are told about `error` and can roll back: see Guard.concerns."""
        return self._guard is not None and self._guard.concerns(error)

    def commit(self) -> None:
        """Keep the change, and drop the savepoint."""
        self.savepoint = None
        self.unguard()

    def roll_back(self, error: Exception) -> Failures:
        """Bring all ranks back after `error`, if it `concerns` the guard. Return the failures of all ranks. Collective.

        Raises an error if the ranks cannot go back.
        """
        assert self._guard is not None
        job, failures = self.job, self._guard.failures(error)
        savepoint, self.savepoint = self.savepoint, None
        if savepoint is None:
            raise TrainingError(
                "There is no earlier state to go back to.",
                numbers=failures.words,
                hint="trainer.load(path) of a checkpoint",
            )
        with job.ledger.clock.stopped():
            savepoint.restore_all(job, error)
        job.integrity.restored(ranks_agree=True)
        return failures


class Savepoint:
    """A step boundary that a job can go back to. Each subclass keeps the tensors in another way.

    strategy: the strategy to go back to; default: the one in force.
    """

    def __init__(self, job: Job, *, strategy: Strategy | None = None) -> None:
        self.step, self.strategy = job.step, job.strategy if strategy is None else strategy

    def restore(self, job: Job, error: BaseException | None = None) -> None:
        """Bring this rank back, without messages. error: the error that ended the transaction."""
        raise NotImplementedError

    def restore_all(self, job: Job, error: Exception | None = None) -> None:
        """Bring all ranks back. Collective. Raises SwitchError, on every rank, if one cannot."""
        with Ballot(job.strategy, job.world_size, job.device).all_or_none(f"going back to {self.strategy}"):
            self.restore(job)
        meet_groups(job.sharded_model.connections, job.device)


class BeforeSteps(Savepoint):
    """A savepoint that also drops later steps and switches when it is restored.

    switches: the number of switches before it. drawn: the generators of Python and numpy, which steps do not seed.
    """

    def __init__(self, job: Job, *, strategy: Strategy | None = None, switches: int | None = None) -> None:
        super().__init__(job, strategy=strategy)
        self.switches = len(job.switches) if switches is None else switches
        self.drawn = Drawn.so_far()

    def forget_steps(self, job: Job) -> None:
        """Drop the steps and switches that the job has made since the savepoint."""
        job.ledger.forget(self.step)
        del job.switches[self.switches :]
        self.drawn.restore()


class KeptState(BeforeSteps):
    """Keeps `state` unchanged, while another sharded model computes."""

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
            gc.collect()  # the next step needs the memory


class KeptBuffers(BeforeSteps):
    """Keeps copies of the buffers, which forward passes change. Weights do not change before the optimizer begins."""

    def __init__(self, job: Job, *, strategy: Strategy | None = None, switches: int | None = None) -> None:
        super().__init__(job, strategy=strategy, switches=switches)
        self.position = job.feed.position()
        self._copies = {key: tensor.clone() for key, (tensor, _) in job_state.buffers(job.sharded_model).items()}

    @torch.no_grad()
    def restore(self, job: Job, error: BaseException | None = None) -> None:
        """Restore the buffers."""
        for key, (tensor, _) in job_state.buffers(job.sharded_model).items():
            tensor.copy_(self._copies[key])

    def restore_all(self, job: Job, error: Exception | None = None) -> None:
        """Go back by another switch, because the old state was not kept. Collective."""
        self.restore(job)
        job.optimizer.zero_grad()
        job.ledger.forget(self.step)
        job.switcher.forget()
        job.sync.restored()
        job.switch(str(self.strategy))
        job.switcher.forget()  # this switch itself cannot be taken back
        job.feed.go_to(self.position)
        self.forget_steps(job)


@dataclass
class RankVote:
    """The report of a rank about an action.

    doing: the current action in words, for the error. numbers: numbers to compare. largest: the maximum of each number
    over all ranks, known afterwards.
    """

    doing: str
    numbers: list[int]
    largest: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Ballot:
    """Makes all ranks agree about a switch. goes_on: the strategy that stays in force if the switch fails."""

    goes_on: Strategy
    world_size: int
    device: torch.device

    def gather(self, own: Any, doing: str, failure: Exception | None = None) -> list[Any]:
        """Return `own` of every rank, by rank. Collective. Raises SwitchError, on every rank, if one had a failure."""
        everyone = all_gather_objects((_first_line(failure), own), world_size=self.world_size, device=self.device)
        self._check(doing, [spoken for spoken, _ in everyone], failure)
        return [each for _, each in everyone]

    @contextmanager
    def all_or_none(self, doing: str, *, numbers: int = 0) -> Iterator[RankVote]:
        """Run the body on every rank. If it fails on any rank, raise SwitchError on every rank.

        numbers: how many numbers to compare; they are 0 unless the body sets them. Collective: one small all-reduce.
        Waits for the device.
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
                f"The switch failed while {doing}; training continues under {self.goes_on}, unchanged.",
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
    """Guards a step from its construction until `end`. name: equal on all ranks, and different for every step."""

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
            all_here = int(here) == self._world_size  # wait: on a GPU an aborted collective raises nothing
            self.alarm.check()
            if not all_here:
                raise AlarmHeard("another rank has failed")

    def end(self) -> None:
        """End the guard: a later failure does not concern the other ranks."""
        self._ended = True
        self.alarm.end()

    def concerns(self, error: BaseException) -> bool:
        """Return True if `error` is a failure of the guarded step that all ranks can be told about.

        An interrupt and the death of a rank are not. NotFinite is not either: its cause is the data, and all ranks
        raise it.
        """
        if self._ended or not isinstance(error, Exception) or isinstance(error, NotFinite) or self.alarm.world.dirty:
            return False
        try:
            return not waited(error) or self.alarm.rung()
        except Exception:
            return False  # the store is gone, because rank 0 is gone

    def failures(self, error: Exception) -> Failures:
        """Return the failures of all ranks. error: the failure of this rank. Collective.

        Afterwards no rank is in a collective. Raises TrainingError, on every rank, if a device no longer computes, and
        ClusterError if the ranks do not meet.
        """
        alarm = self.alarm
        self.end()
        try:
            if not waited(error):
                alarm.ring()
            said = [json.loads(each) for each in alarm.meet(json.dumps([_spoken(error), _unfit(self._device)]))]
            alarm.mend()
        except BaseException:
            # Other ranks may have been woken already, which breaks their groups.
            alarm.world.dirty = alarm.world.dirty or "a step failed, and the ranks did not come together"
            raise
        if unfit := [f"rank {rank}: {why}" for rank, (_, why) in enumerate(said) if why]:
            raise TrainingError("A device no longer computes.", numbers=unfit[0], hint="%cluster restart")
        let_go(error)
        return Failures([text for text, _ in said])


def waited(error: BaseException) -> bool:
    """Return True if this rank failed only because it waited for a failed rank, or because its wait was aborted."""
    # The first use of an NCCL communicator is a rendezvous in Python, which raises another error.
    return isinstance(error, AlarmHeard) or any(sign in str(error) for sign in (*PEER_GONE, BROKEN_OFF))


def let_go(failed: BaseException) -> None:
    """Free the objects that the traceback of `failed` and reference cycles keep alive. Their memory is needed next."""
    link: BaseException | None = failed
    while link is not None:
        clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    gc.collect()


@contextmanager
def held_back() -> Iterator[None]:
    """Delay a SIGINT that arrives inside until the end. Use it only for short code that does not wait."""
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
    """Return why the device of this rank cannot compute any more, as after an assert in a kernel; "" if it can."""
    if not accelerator().holds(device):
        return ""
    try:
        accelerator().wait_for_all(device)
    except Exception as error:
        return _spoken(error)
    return ""
