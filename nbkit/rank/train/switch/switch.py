"""Changing the strategy of a live job: the new side is built and filled beside the old one, or nothing has happened.

Between two steps: tell each other the little that does not follow from the strategies, build the new side (groups,
module, memory), move exactly the boxes that are missing, check that every box is filled, and only then compute with it.
An error on any rank before that lets go of the new side on all of them, and the old strategy trains on; one in the
first step under the new one leads back: see fallback.py. What needs no message is made beside the training, where there
is one: see ahead.py. Where memory does not hold both sides, see inplace.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nbkit.errors import SwitchError, TrainingError
from nbkit.layout import Layout
from nbkit.rank.parallel.reshard.redistribute import Exchange
from nbkit.rank.parallel.reshard.state_digest import digest, scratch_bytes
from nbkit.rank.parallel.sharded_model import Side
from nbkit.rank.train.checkpoint import job_state as holdings
from nbkit.rank.train.checkpoint.job_state import Held
from nbkit.rank.train.control import pause, step_boundary
from nbkit.rank.train.control.collective_guard import let_go
from nbkit.rank.train.control.deferred_interrupt import held_back
from nbkit.rank.train.control.recovery import ensure_one
from nbkit.rank.train.estimate.free_memory import roomy
from nbkit.rank.train.switch.consensus import News, agreed, all_or_none, news, planned, refused
from nbkit.rank.train.switch.fallback import took_up
from nbkit.rank.train.switch.in_place import switch_in_place
from nbkit.rank.train.switch.previous_strategy import Left
from nbkit.rank.train.switch.verify import Comparison, Proof, settled
from nbkit.records.events import Switched
from nbkit.strategy import Strategy

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["Prepared", "Switchable", "between_steps", "switch"]


class Switchable:
    """What a Job and a Trainer offer alike: another strategy from the next step on."""

    def switch(self, strategy: str, *, beside: bool = False) -> Switched:
        """Train on under another strategy: see nbkit.rank.train.switch.switch. Collective, between two steps.

        Where the first step under it fails, the old one is in force again: see nbkit.rank.train.switch.fallback.
        beside: find the proof beside the next step where the Trainer makes it: what is returned is not proven then.
        Only for who touches no weight before that step. A switch that waits for its proof is proven first.
        """
        job: Job = getattr(self, "job", self)  # type: ignore[arg-type]
        with job.ledger.clock.stopped():
            between_steps(job)
            job.ledger.settle(keep=1)
            # In a loop of the user's own, or in a cell, anything may happen to the weights before the next step.
            own_steps = step_boundary.training() is self and job.feed.remakes and not pause.is_held()
            return switch(job, strategy, beside=beside and own_steps)

    def undo(self, *, beside: bool = False) -> Switched:
        """Back to the strategy before the last switch; the weights stay as they are now. Collective.

        beside: see `switch`.
        """
        job: Job = getattr(self, "job", self)  # type: ignore[arg-type]
        if job.previous is None:
            raise SwitchError(
                "There is no switch to undo.",
                numbers=f"strategy {job.strategy} since step 0",
                hint="trainer.switch('zero3')   or   %strategy zero3",
            )
        return self.switch(job.previous, beside=beside)


@dataclass
class Prepared:
    """A side that could take over, with its optimizer, and the exchange that fills it."""

    side: Side
    inner: torch.optim.Optimizer
    exchange: Exchange
    target: Held


def switch(
    job: Job, text: str | Strategy, *, verify: bool = True, keep: bool = False, beside: bool = False
) -> Switched:
    """Train on under another strategy. Collective, between two steps; the global batch stays what it is.

    verify: compare a digest of weights and optimizer state before and after; its time is told apart from the pause.
    keep: somebody keeps the old side, to take it up again. beside: compare beside the next step, whose maker asks
    proof.settled, where memory holds both sides and a step: see nbkit.rank.train.switch.verify.
    Raises StrategyError for a strategy that does not fit, and SwitchError when the change failed on any rank: either
    way the old strategy is in force, and nothing has changed.
    """
    old = job.strategy
    new = Strategy.parse(text, job.world_size)
    job.feed.fits(new)
    if str(new) == str(old) and not keep:
        return Switched(job.step, old=str(old), new=str(new), identical=True)
    try:
        return _switched(job, new, verify=verify, keep=keep, beside=beside)
    except SwitchError as error:
        let_go(error)
        raise


def _switched(job: Job, new: Strategy, *, verify: bool, keep: bool, beside: bool) -> Switched:
    began, old = time.perf_counter(), job.strategy
    known = news(job, new)
    new = known.strategy
    if known.crowded:
        if keep:
            raise SwitchError(
                f"A trial of {new} keeps {old} beside it, and memory does not hold both.",
                numbers="a switch would go in place",
                hint=f"%strategy {new}, and %strategy --undo",
            )
        return switch_in_place(job, new, known, verify=verify, began=began)
    beside_s, left = job.blueprint.beside(new), Left.of(job)
    before = holdings.state(job.side, job.optimizer.inner)
    prepared = prepare_switch(job, new, known, before)
    ready = time.perf_counter()
    # Not guarded: who raises between two messages would wait for ranks that wait for its messages.
    prepared.exchange.run(before, prepared.target, device=job.device)
    with all_or_none(job, "moving the state", numbers=1) as said:
        prepared.side.data.refresh()
        said.numbers = [int(not roomy(job))]
    proof = time.perf_counter()
    plan = prepared.exchange.plan
    at_once = verify and (keep or not beside or bool(said.largest[0]))
    identical = _digest(job, before, plan.old) == _digest(job, prepared.target, plan.new) if at_once else None
    proven = time.perf_counter()
    if identical is False:
        error = SwitchError(
            f"The state under {new} is not the one under {old}.",
            numbers="the digests of weights and optimizer state differ",
            hint=f"{old} goes on; please report this",
        )
        raise refused(job, error)
    with held_back():
        job.adopt(prepared.side, prepared.inner)
        job.feed.recut()
        event = Switched(
            job.step,
            old=str(old),
            new=str(new),
            moved_bytes=plan.total_bytes,
            beside_s=beside_s,
            prepare_s=ready - began,
            pause_s=time.perf_counter() - began - (proven - proof),
            proof_s=proven - proof,
            identical=identical,
        )
        if not keep:
            took_up(job, event, old)
        if verify and not at_once:
            comparison = Comparison(before, prepared.target, plan, rank=job.rank, device=job.device)
            job.proof = Proof(event, left, comparison, again=lambda: switch(job, new))
            # Listeners hear of the switch after the first step under it, which is one of those looked at closely.
            job.recorder.look_closely()
            return event
        del before, prepared
        if not keep:
            left.let_go()
        job.switches.append(event)
    job.ledger.emit(event)
    return event


def between_steps(job: Job) -> None:
    """The ranks stand between the same two steps, whatever was broken off before, under a strategy that is proven.

    Collective outside a training, or where a switch waits for its proof. Raises TrainingError where gradients wait for
    the optimizer: another side would not have them.
    """
    ensure_one(job)
    if job._reduced and job.ledger.pending and not job.ledger.pending[-1].made:
        raise TrainingError(
            "A switch between backward() and optimizer.step() would drop the update.",
            numbers=f"step {job.step + 1}",
            hint="switch after job.optimizer.step()",
        )
    # Two proofs at a time would need two sides to go back to. No step was begun, so none begins again.
    settled(job)


def prepare_switch(job: Job, new: Strategy, known: News, before: Held) -> Prepared:
    """The new side with empty weights and state, and the exchange that fills it. Collective."""
    connections = job.blueprint.connect(new, alike=known.alike)
    exchange: Exchange | None = None
    try:
        with all_or_none(job, "building the new side", numbers=3) as said:
            side, inner = job.blueprint.side(new, connections, like=job.optimizer.inner)
            said.doing = "making room for the new side"
            holdings.allocate(side, inner, known.memory.kinds, known.memory.numbers)
            target = holdings.state(side, inner)
            said.doing = "planning the exchange"
            exchange, said.numbers = planned(job, new, before, target, known.memory)
            said.doing = "making room for the exchange"
            if not said.numbers[0]:
                _make_room(job, exchange, before, target)
        if (other := agreed(job, exchange, said.largest, before, target)) is not exchange:
            exchange.give_back()
            exchange = other
            with all_or_none(job, "making room for the exchange"):
                _make_room(job, exchange, before, target)
    except BaseException:
        if exchange is not None:
            exchange.give_back()  # plans are kept, and with them what they hold
        raise
    return Prepared(side, inner, exchange, target)


def _make_room(job: Job, exchange: Exchange, before: Held, target: Held) -> None:
    # The digests', which the exchange's buffers may lie in: both are got again from what was reserved here.
    torch.empty(scratch_bytes(before, target), dtype=torch.uint8, device=job.device)
    exchange.make_room(before, target, device=job.device)


def _digest(job: Job, held: Held, holdings: Sequence[Mapping[str, Layout]]) -> str:
    return digest(held, holdings, rank=job.rank, device=job.device)
