"""Switch a live training to another strategy, from the request to the proof.

1. Request: `switch` is called between two steps (`_between_steps`). During the training, prefetch.py has already
   prepared what needs no messages.
2. Gather: the ranks exchange the facts that do not follow from the strategies (`gather`, in consensus.py).
3. Prepare: make the groups, the module, its memory and the exchange that fills the memory (`prepare`).
4. Exchange: send exactly the boxes that are missing, and check that every box is filled.
5. Adopt: the training computes with the new sharded model. A `PendingSwitch` will tell the result. An error on any rank
   before that drops the new sharded model on all ranks, and training continues under the old strategy.
6. Prove or take back, in the first step under the new strategy (`first_step`). During its forward and backward passes,
   threads compare the two states (`Comparison`).
   If the states differ, the old one is restored, and the switch is repeated and compared at once. The reason: if the
   user's model itself changes its weights in its forward passes, the states differ although the switch was right.
   If the step fails on any rank, all ranks go back to the old strategy. If memory holds both states, they restore the
   old state, which is kept until the step is finished. If not, they switch back, as long as the optimizer has not
   begun. The step is then repeated with the same batch and random numbers, so the losses equal those of a run without
   a switch.

If memory holds both sharded models, the new one is built and filled beside the old one (`prepare`). If not, the state
moves tensor by tensor: see in_place.py.

A `Comparison` does not delay the first step. Forward and backward passes change no weights, so during them a thread of
each rank hashes both sharded models. Then one all-reduce adds up the hashes. On a GPU the thread uses its own stream.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from nbkit.errors import SwitchError, TrainingError
from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.process_groups import Connections
from nbkit.rank.parallel.reshard.redistribute import ROUND_BYTES, Exchange
from nbkit.rank.parallel.reshard.state_digest import digest, scratch_bytes, sums
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.estimate.free_memory import roomy
from nbkit.rank.train.step.weight_average import refuse_shown
from nbkit.rank.train.switch.consensus import RankKnowledge, agreed, gather, numbers_of
from nbkit.rank.train.switch.in_place import prepare_in_place, without_gradients
from nbkit.rank.train.transaction import (
    Ballot,
    KeptBuffers,
    KeptState,
    TrainingState,
    Transaction,
    free,
    held_back,
    let_go,
)
from nbkit.rank.world import meeting
from nbkit.rank.world.failure_alarm import Alarm
from nbkit.records.events import Failed, Switched
from nbkit.strategy import Strategy

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job


@dataclass(frozen=True)
class Prepared:
    """The new state, whose tensors are still empty, and the exchange that fills them from `before`."""

    state: TrainingState
    before: JobState
    target: JobState
    exchange: Exchange


def prepare(
    left: TrainingState, gathered: RankKnowledge, connections: Connections, builder: Builder, ranks: Ballot
) -> Prepared:
    """Return the new sharded model with empty weights and state, and the exchange that fills it. Collective."""
    memory, old = gathered.memory, left.sharded_model.plan
    before = job_state.state(left.sharded_model, left.optimizer)
    exchange: Exchange | None = None
    try:
        with ranks.all_or_none("building the new sharded model", numbers=3) as said:
            sharded_model, inner = builder.build(builder.plan(gathered.strategy), connections, like=left.optimizer)
            said.doing = "making room for the new sharded model"
            job_state.allocate(sharded_model, inner, memory.kinds, memory.numbers)
            target = job_state.state(sharded_model, inner)
            said.doing = "planning the exchange"
            kinds = builder.exchanges.kinds(memory.kinds)
            exchange = builder.exchanges.exchange(old, sharded_model.plan, kinds, limit=gathered.round_bytes)
            said.numbers = numbers_of(exchange, before, target, kinds)
            said.doing = "making room for the exchange"
            if not said.numbers[0]:
                try:
                    _make_room(exchange, before, target, ranks.device)
                except Exception as error:
                    if exchange.limit <= ROUND_BYTES or not accelerator().out_of_memory(error):
                        raise
                    said.numbers[0] = 1  # free memory may be in pieces: all ranks plan again, with small rounds
        if (other := agreed(exchange, said.largest, before, target)) is not exchange:
            exchange.give_back()
            exchange = other
            with ranks.all_or_none("making room for the exchange"):
                _make_room(exchange, before, target, ranks.device)
    except BaseException:
        if exchange is not None:
            exchange.give_back()  # the cache keeps the exchange, which would keep its memory
        raise
    there = left.under(sharded_model, inner)
    return Prepared(there, before, target, exchange)


def _make_room(exchange: Exchange, before: JobState, target: JobState, device: torch.device) -> None:
    # Reserve memory for the digests now. The allocator later gives it to the digests or to the exchange's buffers.
    torch.empty(scratch_bytes(before, target), dtype=torch.uint8, device=device)
    exchange.make_room(before, target, device=device)


class Comparison:
    """A comparison of two states in a thread. Tensors of `new` that a forward pass changes are copied first."""

    def __init__(self, old: JobState, new: JobState, plan: ExchangePlan, *, rank: int, device: torch.device) -> None:
        self._device, self._failed = device, False
        self._keys = sorted({key for holding in (*plan.old, *plan.new) for key in holding})
        self._sums = torch.zeros(2, len(self._keys), dtype=torch.int64)
        # Running statistics are buffers, and change with every forward pass.
        kept = {key: (tensor.clone() if _changes(key) else tensor, layout) for key, (tensor, layout) in new.items()}
        begun = accelerator().event(device) if accelerator().holds(device) else None

        def run() -> None:
            try:
                with nullcontext() if begun is None else accelerator().beside(device, after=begun):
                    for row, (state, holdings) in enumerate(((old, plan.old), (kept, plan.new))):
                        self._sums[row] = sums(state, holdings, self._keys, rank=rank).cpu()
            except Exception as error:
                self._failed = True
                print(f"no proof of a switch: {type(error).__name__}: {error}", file=sys.__stderr__)

        self._thread = threading.Thread(target=run, name="nbkit-proof", daemon=True)
        self._thread.start()

    def identical(self) -> bool:
        """Wait for the thread, and return True if the states are the same on all ranks. Collective."""
        self._thread.join()
        totals = torch.cat([self._sums.flatten(), torch.tensor([int(self._failed)])]).to(self._device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(totals)
        *found, failed = totals.tolist()
        half = len(self._keys)
        return not failed and found[:half] == found[half:]

    def drop(self) -> None:
        """Wait for the thread. Its result is not needed any more."""
        self._thread.join()


def _changes(key: str) -> bool:
    return key.startswith("buffer/")


class PendingSwitch(Future[Switched]):
    """A switch whose first step is not finished yet. As a future, its result is the event of the switch.

    `result()` raises the error if the switch was taken back.
    event: the switch, with the result of the comparison, if known. old: the strategy of the last step, which is
    restored after a failure. switches: the number of switches before this one. previous: the state under `old`, kept
    until the first step is finished; None if memory does not hold both. comparison: the comparison of the two states,
    until it has shown that they are the same. guarded: the first step is under way.
    """

    def __init__(
        self,
        event: Switched,
        old: Strategy,
        switches: int,
        *,
        previous: TrainingState | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        super().__init__()
        self.event, self.old, self.switches = event, old, switches
        self.previous, self.comparison = previous, comparison
        self.guarded = False

    def resolve(self, error: BaseException | None = None) -> None:
        """Set the result: the switch stays, or `error` has ended it. Does nothing if the result is already set."""
        if self.done():
            return
        if error is None:
            self.set_result(self.event)
        else:
            self.set_exception(error)

    def refusal(self, step: int, why: str) -> SwitchError:
        """Return the error for a first step that failed. step: the number of finished steps before it."""
        return SwitchError(
            f"{self.old} → {self.event.new} was taken back after step {step}: the first step under it failed, and "
            f"training continues under {self.old}.",
            numbers=why,
            hint="%strategy shows what can be picked",
        )

    def follow(self, other: Future[Switched]) -> None:
        """Take over the result of `other`, which repeats this switch."""
        if (error := other.exception()) is None:
            self.event = other.result()
        self.resolve(error)


class Switcher:
    """Changes the strategy of a job between two steps, and takes a switch back if the first step under it fails.

    made: the switches that stay. pending: the last switch, until a step under it is finished.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.made: list[Switched] = []
        self.pending: PendingSwitch | None = None

    @property
    def previous(self) -> str | None:
        """The strategy before the last switch, proven or not. From any thread."""
        if (pending := self.pending) is not None and pending.previous is not None:
            return pending.event.old
        return self.made[-1].old if self.made else None

    def switch(self, strategy: str, *, beside: bool = False) -> Switched:
        """Continue training under another strategy: see Job.switch. Collective, between two steps."""
        job = self._job
        with job.ledger.clock.stopped():
            meeting.meet("switch")
            self._between_steps()
            job.ledger.settle(keep=1)
            # In the user's own loop or in a cell, other code may change the weights before the next step.
            owner = step_boundary.training()
            own_steps = getattr(owner, "job", owner) is job and job.feed.remakes and not step_boundary.is_held()
            self.close_left_groups(new := job.parsed(strategy))
            return self._switch(new, beside=beside and own_steps)

    def undo(self, *, beside: bool = False) -> Switched:
        """Switch back to the strategy before the last switch. The weights stay as they are now. Collective."""
        if self.previous is None:
            raise SwitchError(
                "There is no switch to undo.",
                numbers=f"strategy {self._job.strategy} since step 0",
                hint="trainer.switch('zero3')   or   %strategy zero3",
            )
        return self.switch(self.previous, beside=beside)

    def close_left_groups(self, coming: Strategy | None = None) -> None:
        """Close process groups that are no longer needed, if they hold memory of a device.

        Groups of the strategy in force, and of those that an undo or a failure would restore, are needed. coming: the
        strategy of the switch that follows. Then an undo restores the one in force now. Collective, between two steps.
        """
        job = self._job
        kept = {job.strategy, job.strategy if coming is None else coming}
        if len(kept) == 1 and self.previous is not None:
            kept.add(job.parsed(self.previous))
        if self.pending is not None:
            kept.add(self.pending.old)
        job.builder.close_groups(kept=kept)

    def _between_steps(self) -> None:
        """Bring all ranks to the same step boundary, and prove the strategy in force. Collective.

        Raises TrainingError if the optimizer has not used the gradients yet: the switch would lose them.
        """
        job = self._job
        refuse_shown(job, "A switch")
        job.sync.resync()
        job.sync.compare_settings()
        if job.waits_for_update or job.own_forward.losses:
            raise TrainingError(
                "A switch between backward() and optimizer.step() would drop the update.",
                numbers=f"step {job.step + 1}",
                hint="switch after job.optimizer.step()",
            )
        # Two comparisons at a time would need two old states. No step has begun, so no step must be repeated.
        self.prove()
        job.sync.average_replicas()

    def _switch(self, new: Strategy, *, keep: bool = False, beside: bool = False) -> Switched:
        """Switch to `new`. `pause_s` of the event does not include the comparison.

        keep: the caller keeps the old state and will restore it.
        """
        job, old = self._job, self._job.strategy
        job.feed.fits(new)
        if str(new) == str(old) and not keep:
            return Switched(job.step, old=str(old), new=str(new), identical=True)
        job.model_handle.check_alone(new)
        job.builder.check_moves(old, new)
        job.builder.finder.sync([new])
        began, ranks = time.perf_counter(), Ballot(old, job.world_size, job.device)
        try:
            gathered = gather(job.sharded_model, job.optimizer.inner, job.builder, job.cost_model, new, ranks)
            if gathered.crowded and keep:
                raise SwitchError(
                    f"A trial of {new} needs {old} in memory too, and memory does not hold both.",
                    numbers="a switch would be made in place",
                    hint=f"%strategy {new}, and %strategy --undo",
                )
            if gathered.crowded:
                event = self._switch_in_place(gathered, ranks, began)
            else:
                event = self._switch_beside(gathered, ranks, began, keep=keep, beside=beside)
        except SwitchError as error:
            # All ranks raise the same error.
            job.ledger.emit(Failed(job.step, error="SwitchError", what=f"{error.what} {error.numbers}"))
            let_go(error)
            raise
        if self.pending is None or self.pending.previous is None:
            job.ledger.emit(event)  # otherwise `commit` emits it after the first step
        return event

    def _switch_beside(
        self, gathered: RankKnowledge, ranks: Ballot, began: float, *, keep: bool, beside: bool
    ) -> Switched:
        """Switch with the new sharded model beside the old one."""
        job, old, new = self._job, self._job.strategy, gathered.strategy
        left, beside_s = job.state, job.builder.beside(new)
        connections = job.builder.connect(new, alike=gathered.alike)
        prepared = prepare(left, gathered, connections, job.builder, ranks)
        ready = time.perf_counter()
        # Not in `all_or_none`: a rank that raises here would wait for ranks that wait for its messages.
        prepared.exchange.run(prepared.before, prepared.target, device=job.device)
        with ranks.all_or_none("moving the state", numbers=1) as said:
            prepared.state.sharded_model.data.refresh()
            said.numbers = [int(not roomy(job.device, job.recorder.peak_bytes))]
        moved = time.perf_counter()
        plan, before, target = prepared.exchange.plan, prepared.before, prepared.target
        # A switch back to the strategy of the last step has no first step to prove it: see `_adopted`.
        first = self.pending.old if self.pending is not None else None
        beside = beside and not keep and Alarm.possible() and not said.largest[0] and str(first) != str(new)
        here: Any = {"rank": job.rank, "device": job.device}
        if not beside and digest(before, plan.old, **here) != digest(target, plan.new, **here):
            raise SwitchError(
                f"The state under {new} differs from the state under {old}.",
                numbers="the digests of weights and optimizer state differ",
                hint=f"training continues under {old}; please report this",
            )
        proven = time.perf_counter()
        with held_back():
            job.adopt(prepared.state)
            event = Switched(
                job.step,
                old=str(old),
                new=str(new),
                moved_bytes=plan.total_bytes,
                beside_s=beside_s,
                prepare_s=ready - began,
                pause_s=time.perf_counter() - began - (proven - moved),
                proof_s=proven - moved,
                identical=None if beside else True,
            )
            if beside:
                comparison = Comparison(before, target, plan, rank=job.rank, device=job.device)
                self._adopted(event, old, previous=left, comparison=comparison)
                # The first step under the new strategy is measured in detail. The event is emitted after it.
                job.recorder.look_closely()
                return event
            del before, target, prepared
            if not keep:
                self._adopted(event, old)
                kept = [left]
                del left
                free(kept)
            self.made.append(event)
        return event

    def _switch_in_place(self, gathered: RankKnowledge, ranks: Ballot, began: float) -> Switched:
        """Switch without memory for two sharded models: see in_place.py.

        A failure also loses the gradients, which no step needs any more. Raises TrainingError if the old state could
        not be restored, and MemoryError if memory no longer holds gradients under the old strategy. All ranks raise
        the same.
        """
        job, old, new = self._job, self._job.strategy, gathered.strategy
        beside_s, connections = job.builder.beside(new), job.builder.connect(new, alike=gathered.alike)
        try:
            with without_gradients(job.sharded_model, ranks):
                move = prepare_in_place(job, new, connections, gathered.memory, ranks)
                ready = time.perf_counter()
                move.look()
                proof_s = time.perf_counter() - ready
                with held_back():
                    with Transaction(job, move) as change, job.integrity.changing():
                        proof_s += move.make(ranks)
                        change.commit()
                    move.left.sharded_model.close()
                    event = Switched(
                        job.step,
                        old=str(old),
                        new=str(new),
                        moved_bytes=move.exchange.plan.total_bytes,
                        beside_s=beside_s,
                        prepare_s=ready - began,
                        pause_s=time.perf_counter() - began - proof_s,
                        proof_s=proof_s,
                        identical=True,
                        in_place=True,
                    )
                    # Without an interrupt in between. Otherwise an undo would lead ranks to different strategies.
                    self._adopted(event, old)
                    self.made.append(event)
        except BaseException as error:
            # An interrupt may leave only some ranks without memory for gradients. `resync` repairs this later.
            job.integrity.broken_off |= not isinstance(error, SwitchError)
            raise
        del move
        gc.collect()
        return event

    def _adopted(
        self,
        event: Switched,
        old: Strategy,
        *,
        previous: TrainingState | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        """Remember how to go back, until a step under the strategy in force is finished."""
        before, self.pending = self.pending, None
        first, switches = (before.old, before.switches) if before is not None else (old, len(self.made))
        if str(first) != str(self._job.strategy):
            self.pending = PendingSwitch(event, first, switches, previous=previous, comparison=comparison)

    def first_step(self) -> AbstractContextManager[FirstStep | SteadyStep]:
        """Return the context around a whole step. Except in the first step under a strategy it does nothing."""
        pending = self.pending
        if pending is None or pending.guarded or not Alarm.possible():
            return STEADY
        return FirstStep(self._job, self, pending)

    def prove(self) -> None:
        """Finish a running comparison. If the states are equal, the switch stays. Collective, between two steps."""
        if self.pending is not None and self.compare():
            self.commit()

    def compare(self, told: Callable[[bool], None] = lambda identical: None) -> bool:
        """Finish a running comparison. If the states differ, restore the old state and switch again.

        Return True if the step that has begun may go on, and False if it must begin again. Collective, before the
        optimizer steps. told: called with the result of the comparison; it may raise.
        """
        job, pending = self._job, self.pending
        if pending is None or pending.comparison is None:
            return True
        if accelerator().holds(job.device):
            # The host runs ahead of the device. Without this wait, proof_s would include the rest of the step.
            accelerator().wait_for_stream(job.device)
        began = time.perf_counter()
        with job.ledger.clock.stopped():
            identical = pending.comparison.identical()
            told(identical)
            if identical:
                pending.comparison = None
                pending.event = replace(pending.event, identical=True, proof_s=time.perf_counter() - began)
                return True
            previous, new = pending.previous, job.strategy
            assert previous is not None
            with held_back():
                self.forget()
                job.restore(previous)
            del previous
            gc.collect()
            try:
                self._switch(new)
            except BaseException as error:
                pending.resolve(error)
                if not isinstance(error, SwitchError):
                    raise
            else:
                if self.pending is not None:
                    self.pending.add_done_callback(pending.follow)
        return False

    def commit(self, *, step_made: bool = False) -> None:
        """Let the last switch stay without a further comparison, and set its result. Not collective."""
        job, pending = self._job, self.pending
        if pending is None:
            return
        if pending.previous is not None:
            with held_back():
                kept = [pending.previous]
                pending.previous = pending.comparison = None
                free(kept)
                self.made.append(pending.event)
            job.ledger.emit(pending.event)
        pending.resolve()
        if step_made or job.integrity.broken_off:
            self.pending = None

    def forget(self) -> None:
        """Drop the pending switch, with its comparison and the old state."""
        pending, self.pending = self.pending, None
        if pending is not None:
            if pending.comparison is not None:
                pending.comparison.drop()
            pending.previous = pending.comparison = None

    @contextmanager
    def trial(self, new: Strategy) -> Iterator[tuple[Transaction, Switched]]:
        """Run the body under `new`, then restore the earlier state. Yield (the transaction, the switch)."""
        job = self._job
        self._between_steps()
        job.ledger.settle()
        earlier, self.pending = self.pending, None  # steps of a trial do not prove an earlier switch
        try:
            with job.ledger.silent(), Transaction(job, KeptState(job, job.state)) as trial:
                yield trial, self._switch(new, keep=True)
        finally:
            self.pending = earlier


class SteadyStep:
    """The context of a step that is not the first one after a switch. It does nothing."""

    taken_back = False

    def prove(self) -> None:
        """Do nothing: there is nothing to prove."""


STEADY = nullcontext(SteadyStep())


class FirstStep(Transaction):
    """The first step after a switch. If it fails, it takes the switch back.

    taken_back: the step failed, and must begin again under the old strategy.
    """

    taken_back = False

    def __init__(self, job: Job, switcher: Switcher, pending: PendingSwitch) -> None:
        there: Any = {"strategy": pending.old, "switches": pending.switches}
        kept = pending.previous
        super().__init__(job, KeptBuffers(job, **there) if kept is None else KeptState(job, kept, **there))
        self._switcher, self._pending, self._proven = switcher, pending, False

    def __enter__(self) -> Self:
        self._pending.guarded = True
        self.guard(f"{self.job.step} {self._pending.old} {self.job.strategy}")
        return self

    def prove(self) -> None:
        """Prove the switch before the optimizer steps. Collective.

        Proven means: all ranks have come to this point, and the switch did not change the state.
        """
        if self._proven or not self._pending.guarded:
            return
        if self._pending.previous is None:
            # No old state is kept. Once the optimizer changes the weights, there is no way back.
            self.agree()
            self.unguard()
        elif not self._switcher.compare(self._compared):
            raise _Differs
        self._proven = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        pending = self._pending
        found = error if error is not None else self._end()
        pending.guarded = False
        if isinstance(found, _Differs):
            self.taken_back = True
        elif isinstance(found, Exception) and self.concerns(found):
            self._take_back(found)
        elif isinstance(found, Exception) and self._proven and pending.previous is None:
            found.add_note(f"nbkit cannot go back to {pending.old}: the optimizer had begun to change the weights.")
        self.commit()
        if found is None:
            with self.job.ledger.clock.stopped():
                self._switcher.commit(step_made=True)
        if found is not None and found is not error and not self.taken_back:
            raise found
        return self.taken_back

    def _compared(self, identical: bool) -> None:
        self.check()
        if not identical:
            self.savepoint = None  # `compare` has restored the old state, and switches again

    def _end(self) -> BaseException | None:
        """Check that all ranks have finished the step. Return the error if one has not, and None otherwise."""
        try:
            self.prove()
            if self._pending.previous is not None:
                self.agree()
        except BaseException as error:
            return error
        return None

    def _take_back(self, error: Exception) -> None:
        """Bring all ranks back to the old strategy.

        If that fails too, the second error becomes the cause of `error`, which is raised.
        """
        job, pending = self.job, self._pending
        try:
            why = self.roll_back(error)
        except Exception as second:
            error.__cause__ = second
            error.add_note(f"nbkit could not go back to {pending.old}: {type(second).__name__}: {second}")
            return
        self.taken_back = True
        refusal = pending.refusal(job.step, why.words)
        job.ledger.remarks["taken_back"] = f"{pending.event.new}: {why.words}"
        job.ledger.emit(Failed(job.step, rank=why.rank, error="SwitchError", what=f"{refusal.what} {why.words}"))
        if job.rank == 0:
            warnings.warn(f"{refusal.what} {why.words}", stacklevel=4)
        pending.resolve(refusal)


class _Differs(Exception):
    """The states differed. The old state, or the state of the repeated switch, is in force. The step begins again."""
