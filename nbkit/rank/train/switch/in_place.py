"""The exchange where memory does not hold both sharded models: tensor by tensor, and it can be led back.

The new sharded model is built hollow, gradients are let go, and then every tensor gets memory only when it is its turn,
and gives its old one back. An error on any rank, at any stage, leads all ranks back: the old strategy trains on. Slower
than a switch with both, and with no way out between its first and its last round: an interrupt waits; where a rank is
lost in between, the state is in pieces, and the job says so. In the order of `switch.py`: `without_gradients`,
`prepare_in_place`, `in_pieces`, `exchange_in_place`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from nbkit.errors import SwitchError, TrainingError
from nbkit.rank.parallel.process_groups import Connections
from nbkit.rank.parallel.reshard.redistribute_in_place import InPlace
from nbkit.rank.parallel.reshard.resizable_storage import Emptying, Filling, hollow
from nbkit.rank.parallel.reshard.state_digest import digest
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.control.integrity import Integrity
from nbkit.rank.train.estimate.free_memory import trim
from nbkit.rank.train.switch.consensus import Consensus, agreed, planned
from nbkit.rank.train.switch.optimizer_reports import Memory
from nbkit.rank.train.training_state import TrainingState
from nbkit.strategy import Strategy


@dataclass
class Move:
    """From the state in force to another one. taken: whether the training computes with the other one already."""

    left: TrainingState
    state: TrainingState
    old: Emptying
    new: Filling
    exchange: InPlace
    rank: int
    device: torch.device
    taken: bool = False

    def digest(self, sharded_model: Emptying | Filling) -> str:
        """Of the old state or the new one, over all ranks. Collective."""
        plan = self.exchange.plan
        return digest(
            sharded_model.state, plan.old if sharded_model is self.old else plan.new, rank=self.rank, device=self.device
        )


@contextmanager
def without_gradients(sharded_model: ShardedModel, ranks: Consensus) -> Iterator[None]:
    """The gradients of `sharded_model` have no memory inside. After a SwitchError they have it again.

    Raises MemoryError, on every rank, when one of them does not get it.
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
            # Some ranks can make a step and some cannot: no refusal, after which all would go on.
            raise MemoryError(f"{error.what} {failed.what} {failed.numbers}") from failed
        raise


def prepare_in_place(
    left: TrainingState, new: Strategy, connections: Connections, memory: Memory, builder: Builder, ranks: Consensus
) -> Move:
    """The new sharded model, hollow, and the exchange that fills it. Collective."""
    before = job_state.state(left.sharded_model, left.optimizer)
    with ranks.all_or_none("building the new sharded model"), hollow() as spaces:
        sharded_model, inner = builder.build(new, connections, like=left.optimizer)
        sharded_model.data.let_go()
        job_state.allocate(sharded_model, inner, memory.kinds, memory.numbers)
        target = Filling(job_state.state(sharded_model, inner), spaces)
    to = dict(target.state)
    with ranks.all_or_none("planning the exchange", numbers=3) as said:
        kinds = builder.plans.kinds(memory.kinds)
        own, said.numbers = planned(builder.plans, kinds, left.sharded_model.strategy, new, before, to)
    plan = agreed(own, said.largest, before, to, rank=builder.rank).plan
    with ranks.all_or_none("planning the way"):
        exchange, old = InPlace(plan, builder.rank), Emptying(before, left.sharded_model.data.tensors())
        exchange.check(old, target)
    there = left.under(sharded_model, inner, builder.options)
    return Move(
        left,
        there,
        old,
        target,
        exchange,
        builder.rank,
        builder.device,
    )


def exchange_in_place(move: Move, before: str, ranks: Consensus, adopt: Callable[[TrainingState], None]) -> float:
    """Move everything and adopt it; all back when that fails on any rank. Returns the seconds of the proof.

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


def _go_back(move: Move, error: SwitchError, before: str, adopt: Callable[[TrainingState], None]) -> None:
    """Everything has been moved, and cannot stay: the old state is in force again, filled as it was. Collective."""
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
def in_pieces(move: Move, integrity: Integrity) -> Iterator[None]:
    """No rank has whole weights until this is left, or led back: whatever comes next must know."""
    try:
        with integrity.changing():
            yield
    except SwitchError:
        integrity.restored(ranks_agree=False)
        raise
    except BaseException:
        # Nothing brings it back, but what shows the weights must be there to be loaded into.
        gone, shown = (move.old, move.new) if move.taken else (move.new, move.old)
        with suppress(Exception):
            for key in gone.state:
                gone.let_go(key)
            for key in shown.state:
                shown.take(key)
        raise
