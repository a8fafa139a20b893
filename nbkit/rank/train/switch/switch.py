"""Switch a live training to another strategy, from the request to the proof.

1. Request: `switch`, between two steps (`_between_steps`). What needs no message was made beside the training by then,
   if there is one; see prefetch.py.
2. Gather: the little that ranks cannot know of each other from the strategies (`gather`, in consensus.py).
3. Prepare: groups, module, memory and the exchange that fills it (`prepare`), a value.
4. Exchange: exactly the boxes that are missing; every one is checked to be filled. If memory does not hold both sharded
   models, tensor by tensor: `_switch_in_place`.
5. Adopt: the training computes with the new one, and a `PendingSwitch` says what comes of it. An error on any rank
   before that drops the new one on all of them, and the old strategy trains on.
6. Prove or take back, in the first step under the new strategy (`first_step`). Beside its forward and backward passes
   threads compare the two states (see pending_switch.py). If they differ, the old one, which was kept, is in force
   again, and the switch is made once more and compared at once: a model that changes its weights in its forward passes
   looks like a mistake here. If the step fails on any rank, all go back to the old strategy. If memory holds both, they
   go back to the old state, which is kept until the step has been made. If not, they go back by another switch, while
   the optimizer has not begun. The step is made again from the same batch and random numbers: the losses are those of a
   run never switched.

If memory holds both sharded models, the new one is built and filled beside the old one (`prepare`).

If not, the exchange goes tensor by tensor: `without_gradients`, `prepare_in_place`, `in_pieces`, `exchange_in_place`.
The new sharded model is built hollow, and gradients are let go. Then every tensor gets memory only when it is its turn,
and gives its old one back. An error on any rank, at any stage, leads all ranks back: the old strategy trains on. This
is slower, and there is no way out between the first and the last round. An interrupt waits. If a rank is lost in
between, the state is in pieces, and the job says so.
"""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from nbkit.errors import SwitchError, TrainingError
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.pipeline.p2p import meet
from nbkit.rank.parallel.process_groups import Connections
from nbkit.rank.parallel.reshard.redistribute import Exchange, InPlace, SourceStorage, TargetStorage, hollow
from nbkit.rank.parallel.reshard.state_digest import digest, scratch_bytes
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.rng.seeding import Drawn
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.active_job import Integrity
from nbkit.rank.train.control.collective_guard import Guard, held_back, let_go
from nbkit.rank.train.estimate.free_memory import roomy, trim
from nbkit.rank.train.switch.consensus import Ballot, OptimizerMemory, RankKnowledge, agreed, gather, planned
from nbkit.rank.train.switch.pending_switch import Comparison, PendingSwitch, free
from nbkit.rank.train.training import Training
from nbkit.rank.train.training_state import TrainingState
from nbkit.rank.world import meeting
from nbkit.rank.world.failure_alarm import Alarm
from nbkit.records.events import Failed, Switched
from nbkit.strategy import Strategy


@dataclass
class SwitchMove:
    """A move from the state in force to another one. taken: the training computes with the other one already."""

    left: TrainingState
    state: TrainingState
    old: SourceStorage
    new: TargetStorage
    exchange: InPlace
    rank: int
    device: torch.device
    taken: bool = False

    def digest(self, sharded_model: SourceStorage | TargetStorage) -> str:
        """Return the digest of the old state or the new one, over all ranks. Collective."""
        plan = self.exchange.plan
        return digest(
            sharded_model.state, plan.old if sharded_model is self.old else plan.new, rank=self.rank, device=self.device
        )


@contextmanager
def without_gradients(sharded_model: ShardedModel, ranks: Ballot) -> Iterator[None]:
    """Take away the memory of `sharded_model`'s gradients inside. After a SwitchError they have it again.

    Raises MemoryError, on every rank, if one of them does not get it.
    """
    sharded_model.data.let_go()
    trim(ranks.device)
    try:
        yield
    except SwitchError as error:
        try:
            with ranks.all_or_none("taking memory for gradients again"):
                sharded_model.data.begin_again()
        except SwitchError as failed:
            # Some ranks can make a step and some cannot. After a SwitchError all would go on, so raise another error.
            raise MemoryError(f"{error.what} {failed.what} {failed.numbers}") from failed
        raise


def prepare_in_place(
    left: TrainingState,
    new: Strategy,
    connections: Connections,
    memory: OptimizerMemory,
    builder: Builder,
    ranks: Ballot,
) -> SwitchMove:
    """Return the new sharded model, hollow, and the exchange that fills it. Collective."""
    before = job_state.state(left.sharded_model, left.optimizer)
    with ranks.all_or_none("building the new sharded model"), hollow() as spaces:
        sharded_model, inner = builder.build(builder.plan(new), connections, like=left.optimizer)
        sharded_model.data.let_go()
        job_state.allocate(sharded_model, inner, memory.kinds, memory.numbers)
        target = TargetStorage(job_state.state(sharded_model, inner), spaces)
    to = dict(target.state)
    with ranks.all_or_none("planning the exchange", numbers=3) as said:
        kinds = builder.exchanges.kinds(memory.kinds)
        own, said.numbers = planned(builder.exchanges, kinds, left.sharded_model.plan, sharded_model.plan, before, to)
    plan = agreed(own, said.largest, before, to, rank=builder.rank).plan
    with ranks.all_or_none("planning the way"):
        exchange, old = InPlace(plan, builder.rank), SourceStorage(before, left.sharded_model.data.tensors())
        exchange.check(old, target)
    there = left.under(sharded_model, inner)
    return SwitchMove(
        left,
        there,
        old,
        target,
        exchange,
        builder.rank,
        builder.device,
    )


def exchange_in_place(move: SwitchMove, before: str, ranks: Ballot, adopt: Callable[[TrainingState], None]) -> float:
    """Move everything and adopt it. If that fails on any rank, move all back. Return the seconds of the proof.

    before: the digest of the old state.
    """
    move.exchange.run(move.old, move.new, device=move.device, freed=lambda: trim(move.device))
    sharded_model = move.state.sharded_model
    try:
        with ranks.all_or_none("looking at what has come"):
            sharded_model.data.refresh()
        began = time.perf_counter()
        if move.digest(move.new) != before:
            raise SwitchError(
                f"The state under {sharded_model.strategy} is not the one under {ranks.goes_on}.",
                numbers="the digests of weights and optimizer state differ",
                hint=f"{ranks.goes_on} goes on; please report this",
            )
        proof_s = time.perf_counter() - began
        with ranks.all_or_none("taking memory for gradients"):
            sharded_model.data.begin_again()
        with ranks.all_or_none("taking over"):
            move.taken = True
            adopt(move.state)
    except SwitchError as failed:
        _go_back(move, failed, before, adopt)
        raise
    return proof_s


def _go_back(move: SwitchMove, error: SwitchError, before: str, adopt: Callable[[TrainingState], None]) -> None:
    """Bring the old state back in force, filled as it was, after everything was moved and cannot stay. Collective."""
    if move.taken:
        move.taken = False
        adopt(move.left)
    move.state.sharded_model.close()
    move.state.sharded_model.data.let_go()
    move.exchange.run_back(move.old, move.new, device=move.device, why=error.what, freed=lambda: trim(move.device))
    move.left.sharded_model.data.refresh()
    if move.digest(move.old) != before:
        raise TrainingError(
            "The switch failed, and what came back is not what there was.",
            numbers=str(error),
            hint="trainer.load(path)",
        ) from error


@contextmanager
def in_pieces(move: SwitchMove, integrity: Integrity) -> Iterator[None]:
    """Note that no rank has whole weights inside. They are whole when this is left, or when all was led back."""
    try:
        with integrity.changing():
            yield
    except SwitchError:
        integrity.restored(ranks_agree=False)
        raise
    except BaseException:
        # Nothing brings the state back. But what shows the weights needs memory, so that a checkpoint can be loaded.
        gone, shown = (move.old, move.new) if move.taken else (move.new, move.old)
        with suppress(Exception):
            for key in gone.state:
                gone.let_go(key)
            for key in shown.state:
                shown.take(key)
        raise


@dataclass(frozen=True)
class Prepared:
    """A state that could take over, with empty tensors, and the exchange that fills them from `before`."""

    state: TrainingState
    before: JobState
    target: JobState
    exchange: Exchange


def prepare(
    left: TrainingState,
    new: Strategy,
    connections: Connections,
    memory: OptimizerMemory,
    builder: Builder,
    ranks: Ballot,
) -> Prepared:
    """Return the new sharded model with empty weights and state, and the exchange that fills it. Collective."""
    before = job_state.state(left.sharded_model, left.optimizer)
    exchange: Exchange | None = None
    try:
        with ranks.all_or_none("building the new sharded model", numbers=3) as said:
            sharded_model, inner = builder.build(builder.plan(new), connections, like=left.optimizer)
            said.doing = "making room for the new sharded model"
            job_state.allocate(sharded_model, inner, memory.kinds, memory.numbers)
            target = job_state.state(sharded_model, inner)
            said.doing = "planning the exchange"
            kinds = builder.exchanges.kinds(memory.kinds)
            exchange, said.numbers = planned(
                builder.exchanges, kinds, left.sharded_model.plan, sharded_model.plan, before, target
            )
            said.doing = "making room for the exchange"
            if not said.numbers[0]:
                _make_room(exchange, before, target, ranks.device)
        if (other := agreed(exchange, said.largest, before, target, rank=builder.rank)) is not exchange:
            exchange.give_back()
            exchange = other
            with ranks.all_or_none("making room for the exchange"):
                _make_room(exchange, before, target, ranks.device)
    except BaseException:
        if exchange is not None:
            exchange.give_back()  # plans are kept, with the memory that they hold
        raise
    there = left.under(sharded_model, inner)
    return Prepared(there, before, target, exchange)


def _make_room(exchange: Exchange, before: JobState, target: JobState, device: torch.device) -> None:
    # Room for the digests, which the exchange's buffers may share: later both get what is reserved here.
    torch.empty(scratch_bytes(before, target), dtype=torch.uint8, device=device)
    exchange.make_room(before, target, device=device)


class Switchable(Training):
    """A training that changes its strategy between two steps."""

    def switch(self, strategy: str, *, beside: bool = False) -> Switched:
        """Train on under another strategy; the global batch stays what it is. Collective, between two steps.

        If the first step under it fails, the old one is in force again. beside: compare the states beside the next
        step, if a Trainer makes it and memory holds both. Then the returned event is not proven yet. Use it only if no
        weight is touched before that step. A switch that waits for its proof is proven first.

        Raises StrategyError for a strategy that does not fit, and SwitchError if the change failed on any rank. Either
        way the old strategy is in force, and nothing has changed.
        """
        with self.ledger.clock.stopped():
            meeting.meet("switch")
            self._between_steps()
            self.ledger.settle(keep=1)
            # In a loop of the user's own, or in a cell, anything may happen to the weights before the next step.
            owner = step_boundary.training()
            own_steps = getattr(owner, "job", owner) is self and self.feed.remakes and not step_boundary.is_held()
            self.close_left_groups(new := self.parsed(strategy))
            return self._switch(new, beside=beside and own_steps)

    def undo(self, *, beside: bool = False) -> Switched:
        """Switch back to the strategy before the last switch. The weights stay as they are now. Collective."""
        if self.previous is None:
            raise SwitchError(
                "There is no switch to undo.",
                numbers=f"strategy {self.strategy} since step 0",
                hint="trainer.switch('zero3')   or   %strategy zero3",
            )
        return self.switch(self.previous, beside=beside)

    def _between_steps(self) -> None:
        """Bring the ranks between the same two steps, under a strategy that is proven. Collective.

        Raises TrainingError if gradients wait for the optimizer: another sharded model would not have them.
        """
        self.level()
        self.compare_ranks()
        if self.waits_for_update:
            raise TrainingError(
                "A switch between backward() and optimizer.step() would drop the update.",
                numbers=f"step {self.step + 1}",
                hint="switch after job.optimizer.step()",
            )
        # Two comparisons at a time would need two states to go back to. No step was begun, so none begins again.
        self._prove()
        self.unite()

    def _switch(self, new: Strategy, *, keep: bool = False, beside: bool = False) -> Switched:
        """Switch to `new`. The time of the comparison is no part of the pause.

        keep: the caller keeps the old state, to restore it.
        """
        old = self.strategy
        self.feed.fits(new)
        if str(new) == str(old) and not keep:
            return Switched(self.step, old=str(old), new=str(new), identical=True)
        self._handle.check_alone(new)
        self.builder.check_moves(old, new)
        self.builder.finder.sync([new])
        began, ranks = time.perf_counter(), Ballot(old, self.world_size, self.device)
        try:
            gathered = gather(self.sharded_model, self.optimizer.inner, self.builder, self.cost_model, new, ranks)
            if gathered.crowded and keep:
                raise SwitchError(
                    f"A trial of {new} keeps {old} beside it, and memory does not hold both.",
                    numbers="a switch would go in place",
                    hint=f"%strategy {new}, and %strategy --undo",
                )
            if gathered.crowded:
                event = self._switch_in_place(gathered, ranks, began)
            else:
                event = self._switch_beside(gathered, ranks, began, keep=keep, beside=beside)
        except SwitchError as error:
            # All ranks raise it alike.
            self.ledger.emit(Failed(self.step, error="SwitchError", what=f"{error.what} {error.numbers}"))
            let_go(error)
            raise
        if self.pending is None or self.pending.previous is None:
            self.ledger.emit(event)  # else listeners hear of it after the first step
        return event

    def _switch_beside(
        self, gathered: RankKnowledge, ranks: Ballot, began: float, *, keep: bool, beside: bool
    ) -> Switched:
        """Switch with the new sharded model beside the old one."""
        old, new, beside_s = self.strategy, gathered.strategy, self.builder.beside(gathered.strategy)
        left = self.state
        connections = self.builder.connect(new, alike=gathered.alike)
        prepared = prepare(left, new, connections, gathered.memory, self.builder, ranks)
        ready = time.perf_counter()
        # Not guarded: a rank that raises between two messages would wait for ranks that wait for its messages.
        prepared.exchange.run(prepared.before, prepared.target, device=self.device)
        with ranks.all_or_none("moving the state", numbers=1) as said:
            prepared.state.sharded_model.data.refresh()
            said.numbers = [int(not roomy(self.device, self.recorder.peak_bytes))]
        moved = time.perf_counter()
        plan, before, target = prepared.exchange.plan, prepared.before, prepared.target
        # A switch back to the strategy of the last step has no first step that could prove it.
        first = self.pending.old if self.pending is not None else None
        beside = beside and not keep and Alarm.possible() and not said.largest[0] and str(first) != str(new)
        here: Any = {"rank": self.rank, "device": self.device}
        if not beside and digest(before, plan.old, **here) != digest(target, plan.new, **here):
            raise SwitchError(
                f"The state under {new} is not the one under {old}.",
                numbers="the digests of weights and optimizer state differ",
                hint=f"{old} goes on; please report this",
            )
        proven = time.perf_counter()
        with held_back():
            self.adopt(prepared.state)
            event = Switched(
                self.step,
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
                comparison = Comparison(before, target, plan, rank=self.rank, device=self.device)
                self._adopted(event, old, previous=left, comparison=comparison)
                # Listeners hear of the switch after the first step under it, which is one of those looked at closely.
                self.recorder.look_closely()
                return event
            del before, target, prepared
            if keep:
                self.switches.append(event)
                return event
            self._adopted(event, old)
            kept = [left]
            del left
            free(kept)
            self.switches.append(event)
        return event

    def _switch_in_place(self, gathered: RankKnowledge, ranks: Ballot, began: float) -> Switched:
        """Switch within the memory of the larger sharded model.

        If it fails, gradients are gone too: no step needs them. Raises TrainingError if the way back failed, and
        MemoryError, on every rank too, if the old strategy has no memory for gradients any more.
        """
        old, new, beside_s = self.strategy, gathered.strategy, self.builder.beside(gathered.strategy)
        connections, left = self.builder.connect(new, alike=gathered.alike), self.state
        try:
            with without_gradients(left.sharded_model, ranks):
                move = prepare_in_place(left, new, connections, gathered.memory, self.builder, ranks)
                ready = time.perf_counter()
                before = move.digest(move.old)
                proof_s = time.perf_counter() - ready
                with held_back():
                    with in_pieces(move, self.integrity):
                        proof_s += exchange_in_place(move, before, ranks, self.adopt)
                    left.sharded_model.close()
                    event = Switched(
                        self.step,
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
                    # Adopted together with the state. Else an undo would lead ranks to different strategies.
                    self._adopted(event, old)
                    self.switches.append(event)
        except BaseException as error:
            # An interrupt may leave only some ranks without memory for gradients. All are levelled later.
            self.integrity.broken_off |= not isinstance(error, SwitchError)
            raise
        del move, left
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
        """Keep a way back until a step is made under the strategy in force now."""
        before, self.pending = self.pending, None
        first, switches = (before.old, before.switches) if before is not None else (old, len(self.switches))
        if str(first) != str(self.strategy):
            self.pending = PendingSwitch(event, first, switches, previous=previous, comparison=comparison)

    def first_step(self) -> FirstStep:
        """Return the context around everything that makes a step. It acts in the first one under a strategy."""
        pending = self.pending if Alarm.possible() else None
        return FirstStep(self, pending if pending is None or pending.guard is None else None)

    def _prove(self) -> None:
        """Finish a comparison that is under way: the switch stays if it holds. Collective, between two steps."""
        if self.pending is not None and self._compare():
            self._stays()

    def _compare(self) -> bool:
        """Return True if the step that was begun goes on, False if it begins again.

        Collective, before the optimizer steps.
        """
        pending = self.pending
        if pending is None or pending.comparison is None:
            return True
        if accelerator().holds(self.device):
            # The host is ahead of it. Without a wait, the rest of the step would count as time of the proof.
            accelerator().wait_for_stream(self.device)
        began = time.perf_counter()
        with self.ledger.clock.stopped():
            identical = pending.comparison.identical()
            if pending.guard is not None:
                pending.guard.alarm.check()
            if identical:
                pending.comparison = None
                pending.event = replace(pending.event, identical=True, proof_s=time.perf_counter() - began)
                return True
            new = self.strategy
            with held_back():
                self._take_up_previous()
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

    def _take_up_previous(self) -> None:
        """Bring the state that was kept back in force."""
        pending, self.pending = self.pending, None
        assert pending is not None and pending.previous is not None
        if pending.comparison is not None:
            pending.comparison.drop()
        previous, pending.previous, pending.comparison = pending.previous, None, None
        self.restore(previous)

    def go_back(self, pending: PendingSwitch, buffers: Mapping[str, Tensor], position: Any) -> None:
        """Bring the old strategy back in force, with the weights, steps and gradients of before the step. Collective.

        buffers, position (in the data): those of before the step, used if the old state was not kept.
        """
        if pending.previous is not None:
            tensors = [weakref.ref(tensor) for tensor in self.sharded_model.data.tensors()]
            ranks = Ballot(self.strategy, self.world_size, self.device)
            with ranks.all_or_none(f"going back to {pending.old}"), held_back():
                self._take_up_previous()
            if any(tensor() is not None for tensor in tensors):
                gc.collect()  # the step wants the memory
            meet(self.sharded_model.connections.edges, self.device)
        else:
            with torch.no_grad():
                for key, (tensor, _) in job_state.buffers(self.sharded_model).items():
                    tensor.copy_(buffers[key])
            self.optimizer.zero_grad()
            self.ledger.forget(self.step)
            self.pending = None
            self._whole_again()
            self.switch(str(pending.old))
            self.feed.go_to(position)
        self.ledger.forget(self.step)
        self.pending = None
        self.integrity.restored(ranks_agree=True)
        del self.switches[pending.switches :]

    def _stays(self, *, step_made: bool = False) -> None:
        """Let the last switch stay without a further comparison, and tell whoever asked for it. Not collective."""
        pending = self.pending
        if pending is None:
            return
        if pending.previous is not None:
            with held_back():
                kept = [pending.previous]
                pending.previous = pending.comparison = None
                free(kept)
                self.switches.append(pending.event)
            self.ledger.emit(pending.event)
        pending.resolve()
        if step_made or self.integrity.broken_off:
            self.pending = None

    @contextmanager
    def on_trial(self, new: Strategy) -> Iterator[tuple[TrainingState, Switched]]:
        """Run the body under `new`, then restore state, records and switches. Yield (the state before, event)."""
        self._between_steps()
        self.ledger.settle()
        state, records, switches, drawn = self.state, len(self.ledger.records), len(self.switches), Drawn.so_far()
        pending, self.pending = self.pending, None  # of an earlier switch, for which these steps do not count
        with self.ledger.silent():
            try:
                yield state, self._switch(new, keep=True)
            finally:
                with held_back():
                    self.ledger.drop()
                    self.restore(state)
                    drawn.restore()
                    self.pending = pending
                    del self.ledger.records[records:], self.switches[switches:]
                gc.collect()


class FirstStep:
    """The context of a step. If it is the first one after a switch and fails, it takes the switch back.

    taken_back: it failed, and must begin again under the old strategy. pending: the switch whose first step this is;
    without one it does nothing.
    """

    taken_back = False

    def __init__(self, job: Switchable, pending: PendingSwitch | None) -> None:
        self._job, self._pending, self._proven = job, pending, False

    def __enter__(self) -> FirstStep:
        job, pending = self._job, self._pending
        if pending is None:
            return self
        self._drawn, self._buffers = Drawn.so_far(), dict[str, Tensor]()
        if pending.previous is None:
            self._buffers = {key: tensor.clone() for key, (tensor, _) in job_state.buffers(job.sharded_model).items()}
        self._position = job.feed.position()
        name = f"{job.step} {pending.old} {job.strategy}"
        pending.guard = Guard(name, world_size=job.world_size, device=job.device)
        return self

    def prove(self) -> None:
        """Prove the switch before the optimizer steps. Collective.

        All ranks have come so far, and the switch has kept the state.
        """
        pending = self._pending
        if self._proven or pending is None or pending.guard is None:
            return
        if pending.previous is None:
            # No other weights are kept: once the optimizer changes these, there is no way back.
            pending.guard.agree()
            pending.guard.end()
        elif not self._job._compare():
            raise _Differs
        self._proven = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        job, pending = self._job, self._pending
        if pending is None or (guard := pending.guard) is None:
            return False
        found = error if error is not None else self._end(pending, guard)
        pending.guard = None
        if isinstance(found, _Differs):
            self.taken_back = True
        elif isinstance(found, Exception) and guard.concerns(found):
            self._go_back(found, pending, guard)
        elif isinstance(found, Exception) and self._proven and pending.previous is None:
            found.add_note(f"There is no way back to {pending.old}: the optimizer had begun to change the weights.")
        guard.end()
        if found is None:
            with job.ledger.clock.stopped():
                job._stays(step_made=True)
        if found is not None and found is not error and not self.taken_back:
            raise found
        return self.taken_back

    def _end(self, pending: PendingSwitch, guard: Guard) -> BaseException | None:
        """Return the error that comes up when all ranks agree that they have made the step; None if there is none."""
        try:
            self.prove()
            if pending.previous is not None:
                guard.agree()
        except BaseException as error:
            return error
        return None

    def _go_back(self, error: Exception, pending: PendingSwitch, guard: Guard) -> None:
        """Bring all ranks back to the old strategy.

        If that fails, `error` is raised, with that failure as its cause.
        """
        job = self._job
        try:
            why = guard.failures(error)
            with job.ledger.clock.stopped():
                job.go_back(pending, self._buffers, self._position)
        except Exception as second:
            error.__cause__ = second
            error.add_note(f"There was no way back to {pending.old}: {type(second).__name__}: {second}")
            return
        self._drawn.restore()
        self.taken_back = True
        refusal = pending.refusal(job.step, why.words)
        job.ledger.remarks["taken_back"] = f"{pending.event.new}: {why.words}"
        job.ledger.emit(Failed(job.step, rank=why.rank, error="SwitchError", what=f"{refusal.what} {why.words}"))
        if job.rank == 0:
            warnings.warn(f"{refusal.what} {why.words}", stacklevel=4)
        pending.resolve(refusal)


class _Differs(Exception):
    """The states differ. The old one, or that of a repeated switch, is in force, and the step begins again."""
