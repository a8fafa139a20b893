"""The first step under a new strategy, and the way back to the old one where that step fails on any rank.

Until it has been made the weights are those of before the switch: on the old side, which is kept where memory holds
both (see proof.py), or, while the optimizer has not begun, on the new one, from where they are moved as by any switch.
All ranks go back together, whichever failed, and the step is made again from the same batch and the same random
numbers: the losses are those of a run that was never switched. What fails there too is raised as ever.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nbkit.errors import SwitchError, TrainingError
from nbkit.rank.data.batch import Shard
from nbkit.rank.parallel.pipeline.p2p_groups import meet
from nbkit.rank.rng.seeding import Drawn
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.control.collective_guard import Guard
from nbkit.rank.train.control.deferred_interrupt import held_back
from nbkit.rank.train.switch.consensus import all_or_none
from nbkit.rank.world.failure_alarm import Alarm
from nbkit.records.events import Failed, Switched
from nbkit.strategy import Strategy

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["Fallback", "FirstStep", "first_step", "took_up"]

Told = Callable[[Switched | None, BaseException | None], None]
"""What came of a switch: the event, or what the ranks raised."""


@dataclass
class Fallback:
    """Of a switch under which no step has been made. old: what the last step was made under, or the job began with.

    event: the switch; with what the proof found, when it has. switches: how many of the job's were made before it.
    listeners: hear once what comes of it. guard: of the first step, while it is being made.
    """

    old: Strategy
    event: Switched
    switches: int
    listeners: list[Told] = field(default_factory=list)
    guard: Guard | None = None

    def tell(self, error: BaseException | None = None) -> None:
        """The switch stays, or the ranks have raised `error`."""
        listeners, self.listeners = self.listeners, []
        for told in listeners:
            told(self.event if error is None else None, error)

    def check(self) -> None:
        """Raises Heard when another rank's first step has failed."""
        if self.guard is not None:
            self.guard.alarm.check()


def took_up(job: Job, event: Switched, old: Strategy) -> None:
    """The job computes under another strategy from now on: until a step is made, there is a way back."""
    before = job.fallback
    first, switches = (before.old, before.switches) if before is not None else (old, len(job.switches))
    job.fallback = None if str(first) == str(job.strategy) else Fallback(first, event, switches)


class FirstStep:
    """Around everything that makes one step. taken_back: it failed, and is to be begun again, under the old strategy.

    Where the step is not the first one under a strategy it does nothing.
    """

    taken_back = False

    def __init__(self, job: Job, back: Fallback) -> None:
        self._job, self._back = job, back
        self._proven = False

    def __enter__(self) -> FirstStep:
        job, back = self._job, self._back
        self._drawn, self._buffers = Drawn.so_far(), dict[str, Tensor]()
        if job.proof is None:
            self._buffers = {key: tensor.clone() for key, (tensor, _) in job_state.buffers(job.side).items()}
        self._rows, self._position = _rows(job), job.feed.position()
        back.guard = Guard(job, f"{job.step} {back.old} {job.strategy}")
        return self

    def again(self, batch: Any) -> Any:
        """The batch, for the step that is begun again. Raises TrainingError for rows that are not this rank's now."""
        if isinstance(batch, Shard) and _rows(self._job) != self._rows:
            raise TrainingError(
                f"The rows of this batch were cut for {self._back.event.new}, which was taken back.",
                numbers=f"data-parallel place {self._rows}, now {_rows(self._job)}",
                hint="job.backward(batch) with the global batch, or the next one",
            )
        return batch

    def prove(self) -> None:
        """Before the optimizer steps: all ranks have come so far, and the switch has kept the state. Collective."""
        job, guard = self._job, self._back.guard
        if self._proven or guard is None:
            return
        if job.proof is None:
            # The optimizer changes the only weights that there are.
            guard.agree()
            guard.end()
        elif not job.proof.settle(job):
            raise _Differs
        self._proven = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        job, back, guard = self._job, self._back, self._back.guard
        assert guard is not None
        found = error if error is not None else self._end(guard)
        back.guard = None
        if isinstance(found, _Differs):
            self.taken_back = True
        elif isinstance(found, Exception) and guard.concerns(found):
            self._go_back(found, guard)
        elif isinstance(found, Exception) and self._proven and job.proof is None:
            found.add_note(f"There is no way back to {back.old}: the optimizer had begun to change the weights.")
        guard.end()
        if found is None:
            with job.ledger.clock.stopped():
                if job.proof is not None:
                    job.proof.stays(job)
                job.fallback = None
                back.tell()
        if found is not None and found is not error and not self.taken_back:
            raise found
        return self.taken_back

    def _end(self, guard: Guard) -> BaseException | None:
        """What fails when all ranks are to agree that they have made the step."""
        try:
            self.prove()
            if self._job.proof is not None:
                guard.agree()
        except BaseException as error:
            return error
        return None

    def _go_back(self, error: Exception, guard: Guard) -> None:
        """All ranks, to the old strategy; where that fails, `error` is raised, because of what failed then."""
        job, back, new = self._job, self._back, self._job.strategy
        try:
            why = guard.failures(error)
            with job.ledger.clock.stopped():
                self._lead_back()
        except Exception as second:
            error.__cause__ = second
            error.add_note(f"There was no way back to {back.old}: {type(second).__name__}: {second}")
            return
        self._drawn.restore()
        self.taken_back = True
        refusal = SwitchError(
            f"{back.old} → {new} was taken back after step {job.step}: the first step under it failed, "
            f"and training goes on under {back.old}.",
            numbers=why.words,
            hint="%strategy shows what can be picked",
        )
        job.ledger.remarks["taken_back"] = f"{new}: {why.words}"
        job.ledger.emit(Failed(job.step, rank=why.rank, error="SwitchError", what=f"{refusal.what} {why.words}"))
        if job.rank == 0:
            warnings.warn(f"{refusal.what} {why.words}", stacklevel=4)
        back.tell(refusal)

    def _lead_back(self) -> None:
        """The old strategy is in force again, with the weights, steps and gradients of before the step. Collective."""
        job, back, proof = self._job, self._back, self._job.proof
        if proof is not None:
            left = [weakref.ref(tensor) for tensor in job.side.data.tensors()]
            with all_or_none(job, f"going back to {back.old}"), held_back():
                job.proof = job.fallback = None
                if proof.comparison is not None:
                    proof.comparison.drop()
                proof.left.take_up(job)
            if any(tensor() is not None for tensor in left):
                gc.collect()  # the step wants the memory
            meet(job.side.connections.edges, job.device)
        else:
            with torch.no_grad():
                for key, (tensor, _) in job_state.buffers(job.side).items():
                    tensor.copy_(self._buffers[key])
            job.optimizer.zero_grad()
            job.ledger.forget(job.step)
            job.fallback = None
            job.whole_again()
            job.switch(str(back.old))
            job.feed.go_to(self._position)
        job.ledger.forget(job.step)
        job.fallback, job.broken_off = None, False
        del job.switches[back.switches :]


class _Differs(Exception):
    """The old side, or the new one of a switch that was made again, is in force, and the step begins again."""


def _rows(job: Job) -> tuple[int, int]:
    """(number of this rank's part of a global batch, how many parts there are)."""
    axes = job.side.axes
    return axes.index("dp"), axes.size("dp")


class _AnyStep(FirstStep):
    def __init__(self) -> None:
        pass

    def __enter__(self) -> FirstStep:
        return self

    def prove(self) -> None:
        return

    def __exit__(self, *raised: object) -> bool:
        return self.taken_back


_ANY = _AnyStep()


def first_step(job: Job) -> FirstStep:
    """Around a step of `job`."""
    back = job.fallback
    return _ANY if back is None or back.guard is not None or not Alarm.possible() else FirstStep(job, back)
