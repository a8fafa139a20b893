"""A switch where memory does not hold both sides: the state is led over tensor by tensor, and can be led back.

The new side is built hollow, gradients are let go, and then every tensor gets memory only when it is its turn, and
gives its old one back. An error on any rank, at any stage, leads all ranks back: the old strategy trains on. Slower
than a switch with both sides, and with no way out between its first and its last round: an interrupt waits; where a
rank is lost in between, the state is in pieces, and the job says so.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nbkit.errors import SwitchError, TrainingError
from nbkit.rank.parallel.process_groups import Connections
from nbkit.rank.parallel.reshard.redistribute_in_place import InPlace
from nbkit.rank.parallel.reshard.resizable_storage import Emptying, Filling, hollow
from nbkit.rank.parallel.reshard.state_digest import digest
from nbkit.rank.parallel.sharded_model import Side
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.control.deferred_interrupt import held_back
from nbkit.rank.train.estimate.free_memory import trim
from nbkit.rank.train.switch.consensus import News, agreed, all_or_none, planned, refused
from nbkit.rank.train.switch.fallback import took_up
from nbkit.rank.train.switch.previous_strategy import Left
from nbkit.rank.train.switch.rank_reports import Memory
from nbkit.records.events import Switched
from nbkit.strategy import Strategy

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["switch_in_place"]


@dataclass
class _Move:
    """From the side in force, with its optimizer, to another one."""

    left: Left
    side: Side
    inner: torch.optim.Optimizer
    old: Emptying
    new: Filling
    exchange: InPlace


def switch_in_place(job: Job, new: Strategy, known: News, *, verify: bool, began: float) -> Switched:
    """Train on under `new`, within the memory of the larger side. Collective, between two steps. began: the pause did.

    Raises SwitchError, on every rank alike, when it failed on any: the old strategy is in force and nothing has
    changed, but that gradients are gone, which no step needs any more. Raises TrainingError when the way back failed,
    and MemoryError, on every rank too, when the old strategy has no memory for gradients any more.
    """
    beside = job.blueprint.beside(new)
    connections = job.blueprint.connect(new, alike=known.alike)
    try:
        event = _switched(job, new, connections, known.memory, verify=verify, began=began, beside=beside)
    except BaseException as error:
        # An interrupt finds one rank without memory for gradients, and another not: they become one before a step.
        job.broken_off |= not isinstance(error, SwitchError)
        raise
    job.ledger.emit(event)
    gc.collect()
    return event


def _switched(
    job: Job, new: Strategy, connections: Connections, memory: Memory, *, verify: bool, began: float, beside: float
) -> Switched:
    left, old = job.side, job.strategy
    left.data.let_go()
    trim(job.device)
    try:
        move = _prepared(job, new, connections, memory)
        ready = time.perf_counter()
        before = _digest(job, move, move.old) if verify else None
        proof_s = time.perf_counter() - ready
        with held_back():
            with _in_pieces(job, move):
                proof_s += _carry_out(job, move, before)
            left.close()
            event = Switched(
                job.step,
                old=str(old),
                new=str(new),
                moved_bytes=move.exchange.plan.total_bytes,
                beside_s=beside,
                prepare_s=ready - began,
                pause_s=time.perf_counter() - began - proof_s,
                proof_s=proof_s,
                identical=True if verify else None,
                in_place=True,
            )
            # With the side, or an undo leads ranks to different strategies.
            took_up(job, event, old)
            job.switches.append(event)
    except SwitchError as error:
        try:
            with all_or_none(job, "taking memory for gradients again"):
                left.data.begin_again()
        except SwitchError as failed:
            # Some ranks can make a step and some cannot: no refusal, after which all would go on.
            raise MemoryError(f"{error.what} {failed.what} {failed.numbers}") from failed
        raise
    return event


def _prepared(job: Job, new: Strategy, connections: Connections, memory: Memory) -> _Move:
    """The new side, hollow, and the exchange that fills it. Collective."""
    left = Left.of(job)
    before = job_state.state(left.side, left.inner)
    with all_or_none(job, "building the new side"), hollow() as spaces:
        side, inner = job.blueprint.side(new, connections, like=left.inner)
        side.data.let_go()
        job_state.allocate(side, inner, memory.kinds, memory.numbers)
        target = Filling(job_state.state(side, inner), spaces)
    to = dict(target.state)
    with all_or_none(job, "planning the exchange", numbers=3) as said:
        own, said.numbers = planned(job, new, before, to, memory)
    plan = agreed(job, own, said.largest, before, to).plan
    with all_or_none(job, "planning the way"):
        exchange, old = InPlace(plan, job.rank), Emptying(before, left.side.data.tensors())
        exchange.check(old, target)
    return _Move(left, side, inner, old, target, exchange)


def _carry_out(job: Job, move: _Move, before: str | None) -> float:
    """Lead everything over and take it up; back when that fails on any rank. Returns the seconds of the proof."""
    try:
        move.exchange.run(move.old, move.new, device=job.device, freed=lambda: trim(job.device))
    except SwitchError as error:
        raise refused(job, error) from None
    try:
        with all_or_none(job, "looking at what has come"):
            move.side.data.refresh()
        began = time.perf_counter()
        if before is not None and _digest(job, move, move.new) != before:
            refusal = SwitchError(
                f"The state under {move.side.strategy} is not the one under {job.strategy}.",
                numbers="the digests of weights and optimizer state differ",
                hint=f"{job.strategy} goes on; please report this",
            )
            raise refused(job, refusal)
        proof_s = time.perf_counter() - began
        with all_or_none(job, "taking memory for gradients"):
            move.side.data.begin_again()
        with all_or_none(job, "taking over"):
            job.adopt(move.side, move.inner)
            job.feed.recut()
    except SwitchError as failed:
        _go_back(job, move, failed, before)
        raise
    return proof_s


def _go_back(job: Job, move: _Move, error: SwitchError, before: str | None) -> None:
    """Everything has been led over, and cannot stay: the old side is in force again, filled as it was. Collective."""
    if job.side is not move.left.side:
        move.left.take_over(job)
        job.feed.recut()
    move.side.close()
    move.side.data.let_go()
    move.exchange.run_back(move.old, move.new, device=job.device, why=error.what, freed=lambda: trim(job.device))
    move.left.side.data.refresh()
    if before is not None and _digest(job, move, move.old) != before:
        raise TrainingError(
            "The switch failed, and what came back is not what there was.",
            numbers=str(error),
            hint="trainer.load(path)",
        ) from error


@contextmanager
def _in_pieces(job: Job, move: _Move) -> Iterator[None]:
    """No rank has whole weights until this is left, or led back: whatever comes next must know."""
    job.half_way = True
    try:
        yield
    except SwitchError:
        job.half_way = False
        raise
    except BaseException:
        # Nothing brings it back, but what shows the weights must be there to be loaded into.
        gone, shown = (move.old, move.new) if job.side is move.side else (move.new, move.old)
        with suppress(Exception):
            for key in gone.state:
                gone.let_go(key)
            for key in shown.state:
                shown.take(key)
        raise
    job.half_way = False


def _digest(job: Job, move: _Move, side: Emptying | Filling) -> str:
    plan = move.exchange.plan
    return digest(side.state, plan.old if side is move.old else plan.new, rank=job.rank, device=job.device)
