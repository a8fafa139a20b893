"""Switch in the memory of one sharded model, if there is no room for two.

The new sharded model is built without memory ("hollow"), and the gradients are freed. Then tensors move one after the
other: a tensor gets its new memory when it moves, and its old memory is freed. After an error on any rank at any time,
all ranks move everything back and continue under the old strategy. This is slower than a switch beside the old model.
An interrupt must wait until all tensors have moved. If a rank dies before that, no rank has complete weights, and the
job says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nbkit.errors import SwitchError, TrainingError
from nbkit.rank.parallel.process_groups import Connections
from nbkit.rank.parallel.reshard.redistribute import InPlace, SourceStorage, TargetStorage, hollow
from nbkit.rank.parallel.reshard.state_digest import digest
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.estimate.free_memory import trim
from nbkit.rank.train.switch.consensus import OptimizerMemory, agreed, numbers_of
from nbkit.rank.train.transaction import Ballot, Savepoint, TrainingState
from nbkit.strategy import Strategy

Job = Any  # nbkit.rank.train.job.Job: that file imports this one


class MoveInPlace(Savepoint):
    """A move of the state in force to a new strategy, in the memory of one sharded model. It can move back too.

    Between the first and the last round of messages no rank has complete weights.
    """

    def __init__(
        self,
        job: Job,
        states: tuple[TrainingState, TrainingState],
        storages: tuple[SourceStorage, TargetStorage],
        exchange: InPlace,
    ) -> None:
        """states, storages: (old, new)."""
        super().__init__(job)
        self.left, self.state = states
        self.old, self.new = storages
        self.exchange = exchange
        self._job, self._rank, self._device = job, job.rank, job.device
        self._digest = ""  # the digest of the old state
        self._moved = self._taken = False

    def look(self) -> None:
        """Compute the digest of the old state, for the comparison with the new one. Collective."""
        self._digest = self._digest_of(self.old)

    def make(self, ranks: Ballot) -> float:
        """Move all tensors and adopt the new state. Return the seconds of the proof. Collective.

        Raises SwitchError, on every rank, if one rank failed.
        """
        sharded_model = self.state.sharded_model
        self.exchange.run(self.old, self.new, device=self._device, freed=lambda: trim(self._device))
        self._moved = True
        with ranks.all_or_none("checking the received tensors"):
            sharded_model.data.refresh()
        began = time.perf_counter()
        if self._digest_of(self.new) != self._digest:
            raise SwitchError(
                f"The state under {sharded_model.strategy} differs from the state under {ranks.goes_on}.",
                numbers="the digests of weights and optimizer state differ",
                hint=f"training continues under {ranks.goes_on}; please report this",
            )
        proof_s = time.perf_counter() - began
        with ranks.all_or_none("taking memory for gradients"):
            sharded_model.data.begin_again()
        with ranks.all_or_none("taking over"):
            self._taken = True
            self._job.adopt(self.state)
        return proof_s

    def restore(self, job: Job, error: BaseException | None = None) -> None:
        """Move all tensors back after a SwitchError, which all ranks raise. Collective in this case.

        After another error the state cannot be restored. But the tensors of the model in force get memory again, so
        that a checkpoint can be loaded into them.
        """
        try:
            if isinstance(error, SwitchError):
                if self._moved:
                    self._move_back(error)
                job.integrity.restored(ranks_agree=False)
                return
        except BaseException:
            self._let_weights_be_seen()
            raise
        self._let_weights_be_seen()

    def _move_back(self, error: SwitchError) -> None:
        if self._taken:
            self._taken = False
            self._job.adopt(self.left)
        self.state.sharded_model.close()
        self.state.sharded_model.data.let_go()
        self.exchange.run_back(
            self.old, self.new, device=self._device, why=error.what, freed=lambda: trim(self._device)
        )
        self.left.sharded_model.data.refresh()
        if self._digest_of(self.old) != self._digest:
            raise TrainingError(
                "The switch failed, and the restored state differs from the state before the switch.",
                numbers=str(error),
                hint="trainer.load(path)",
            ) from error

    def _let_weights_be_seen(self) -> None:
        gone, shown = (self.old, self.new) if self._taken else (self.new, self.old)
        with suppress(Exception):  # the caller raises the first error, which says more
            for key in gone.state:
                gone.let_go(key)
            for key in shown.state:
                shown.take(key)

    def _digest_of(self, storage: SourceStorage | TargetStorage) -> str:
        plan = self.exchange.plan
        held = plan.old if storage is self.old else plan.new
        return digest(storage.state, held, rank=self._rank, device=self._device)


@contextmanager
def without_gradients(sharded_model: ShardedModel, ranks: Ballot) -> Iterator[None]:
    """Free the memory of the gradients of `sharded_model` inside. After a SwitchError, allocate it again.

    Raises MemoryError, on every rank, if a rank cannot allocate it.
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
            # Only some ranks can make a step now. After a SwitchError all would continue, so raise another error.
            raise MemoryError(f"{error.what} {failed.what} {failed.numbers}") from failed
        raise


def prepare_in_place(
    job: Job, new: Strategy, connections: Connections, memory: OptimizerMemory, ranks: Ballot
) -> MoveInPlace:
    """Return the move to the new sharded model, which has no memory yet. Collective."""
    left, builder = job.state, job.builder
    before = job_state.state(left.sharded_model, left.optimizer)
    with ranks.all_or_none("building the new sharded model"), hollow() as spaces:
        sharded_model, inner = builder.build(builder.plan(new), connections, like=left.optimizer)
        sharded_model.data.let_go()
        job_state.allocate(sharded_model, inner, memory.kinds, memory.numbers)
        target = TargetStorage(job_state.state(sharded_model, inner), spaces)
    to = dict(target.state)
    with ranks.all_or_none("planning the exchange", numbers=3) as said:
        kinds = builder.exchanges.kinds(memory.kinds)
        own = InPlace(builder.exchanges.plan(left.sharded_model.plan, sharded_model.plan, kinds), builder.rank)
        said.numbers = numbers_of(own, before, to, kinds)
    exchange = agreed(own, said.largest, before, to)
    with ranks.all_or_none("checking the exchange"):
        old = SourceStorage(before, left.sharded_model.data.tensors())
        exchange.check(old, target)
    there = left.under(sharded_model, inner)
    return MoveInPlace(job, (left, there), (old, target), exchange)
