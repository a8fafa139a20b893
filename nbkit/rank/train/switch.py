"""Changing the strategy of a live job: the new side is built and filled beside the old one, or nothing has happened.

Between two steps: tell each other the little that does not follow from the strategies, build the new side (groups,
module, memory), move exactly the boxes that are missing, check that every box is filled, and only then compute with it.
An error on any rank before that lets go of the new side on all of them, and the old strategy trains on. What needs no
message is made beside the training, where there is one: see ahead.py.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from nbkit.errors import SwitchError, TrainingError
from nbkit.events import Failed, Switched
from nbkit.layout import Layout
from nbkit.rank.parallel.digest import digest, scratch_bytes
from nbkit.rank.parallel.reshard import Exchange, plan_together
from nbkit.rank.parallel.side import Side
from nbkit.rank.train import holdings
from nbkit.rank.train.agreement import ensure_one
from nbkit.rank.train.follow import changes_of
from nbkit.rank.train.holdings import Held
from nbkit.rank.train.interrupts import held_back
from nbkit.rank.train.plans import Kinds
from nbkit.rank.train.told import memory_of, told, unpacked
from nbkit.strategy import Strategy

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["Prepared", "Switchable", "between_steps", "switch", "undo"]


class Switchable:
    """What a Job and a Trainer offer alike: another strategy from the next step on."""

    def switch(self, strategy: str) -> Switched:
        """Train on under another strategy: see nbkit.rank.train.switch. Collective, between two steps."""
        job: Job = getattr(self, "job", self)  # type: ignore[arg-type]
        with job.ledger.clock.stopped():
            between_steps(job)
            job.ledger.settle(keep=1)
            return switch(job, strategy)

    def undo(self) -> Switched:
        """Back to the strategy before the last switch; the weights stay as they are now. Collective."""
        job: Job = getattr(self, "job", self)  # type: ignore[arg-type]
        with job.ledger.clock.stopped():
            between_steps(job)
            job.ledger.settle(keep=1)
            return undo(job)


@dataclass
class Prepared:
    """A side that could take over, with its optimizer, and the exchange that fills it."""

    side: Side
    inner: torch.optim.Optimizer
    exchange: Exchange
    target: Held


def switch(job: Job, text: str | Strategy, *, verify: bool = True, keep: bool = False) -> Switched:
    """Train on under another strategy. Collective, between two steps; the global batch stays what it is.

    verify: compare a digest of weights and optimizer state before and after; its time is told apart from the pause.
    keep: somebody keeps the old side, to take it up again.
    Raises StrategyError for a strategy that does not fit, and SwitchError when the change failed on any rank: either
    way the old strategy is in force, and nothing has changed.
    """
    old = job.strategy
    new = Strategy.parse(text, job.world_size)
    job.feed.fits(new)
    if new == old and not keep:
        return Switched(job.step, old=str(old), new=str(new), identical=True)
    beside, began = job.blueprint.beside(new), time.perf_counter()
    before = _state(job.side, job.optimizer.inner)
    prepared = prepare_switch(job, new, before)
    ready = time.perf_counter()
    # Not guarded: who raises between two messages would wait for ranks that wait for its messages.
    prepared.exchange.run(before, prepared.target, device=job.device)
    with _all_or_none(job, "moving the state"):
        prepared.side.data.refresh()
    proof = time.perf_counter()
    plan = prepared.exchange.plan
    identical = _digest(job, before, plan.old) == _digest(job, prepared.target, plan.new) if verify else None
    proven = time.perf_counter()
    if identical is False:
        error = SwitchError(
            f"The state under {new} is not the one under {old}.",
            numbers="the digests of weights and optimizer state differ",
            hint=f"{old} goes on; please report this",
        )
        raise _told(job, error)
    with held_back():
        left = job.side
        job.adopt(prepared.side, prepared.inner)
        job.feed.recut()
        if not keep:
            left.data.close()
        event = Switched(
            job.step,
            old=str(old),
            new=str(new),
            moved_bytes=plan.total_bytes,
            beside_s=beside,
            prepare_s=ready - began,
            pause_s=time.perf_counter() - began - (proven - proof),
            proof_s=proven - proof,
            identical=identical,
        )
        job.switches.append(event)
    job.ledger.emit(event)
    if not keep:
        # The sides are full of cycles, and the next steps want the old one's memory.
        del left, before, prepared
        gc.collect()
    return event


def between_steps(job: Job) -> None:
    """The ranks stand between the same two steps, whatever was broken off before. Collective outside a training.

    Raises TrainingError where gradients wait for the optimizer: another side would not have them.
    """
    ensure_one(job)
    if job._reduced and job.ledger.pending and not job.ledger.pending[-1].made:
        raise TrainingError(
            "A switch between backward() and optimizer.step() would drop the update.",
            numbers=f"step {job.step + 1}",
            hint="switch after job.optimizer.step()",
        )


def undo(job: Job) -> Switched:
    """Back to the strategy before the last switch, with the weights as they are now. Collective."""
    if job.previous is None:
        raise SwitchError("There is no switch to undo.", numbers=f"strategy {job.strategy} since step 0")
    return switch(job, job.previous)


def prepare_switch(job: Job, new: Strategy, before: Held) -> Prepared:
    """The new side with empty weights and state, and the exchange that fills it. Collective."""
    blueprint, old = job.blueprint, job.optimizer.inner
    own = changes_of(job.side, blueprint.skeleton), memory_of(job.side, old, blueprint.names)
    everyone = told(own, world_size=job.world_size)
    blueprint.follow([changes for changes, _ in everyone])
    memory = unpacked([runs for _, runs in everyone], blueprint.names)
    connections = blueprint.connect(new)
    with _all_or_none(job, "building the new side"):
        side, inner = blueprint.side(new, connections, like=old)
    with _all_or_none(job, "making room for the new side"):
        holdings.allocate(side, inner, memory.kinds, memory.numbers)
        target, kinds = _state(side, inner), blueprint.plans.kinds(memory.kinds)
        exchange = blueprint.plans.exchange(job.strategy, new, kinds)
        plan, rank = exchange.plan, job.rank
        fits = _fits(before, plan.old[rank], kinds) and _fits(target, plan.new[rank], kinds)
    different, most, least = _largest(job, int(not fits), exchange.stamp, -exchange.stamp)
    if different or most != -least:
        # Somebody holds something else than its strategy says: then everything is told.
        exchange = Exchange(plan_together(before, {key: layout for key, (_, layout) in target.items()}), job.rank)
    with _all_or_none(job, "making room for the exchange"):
        # The digests', which the exchange's buffers may lie in: both are got again from what was reserved here.
        torch.empty(scratch_bytes(before, target), dtype=torch.uint8, device=job.device)
        exchange.make_room(before, target, device=job.device)
    return Prepared(side, inner, exchange, target)


def _state(side: Side, inner: torch.optim.Optimizer) -> Held:
    return holdings.weights(side) | holdings.buffers(side) | holdings.per_element(side, inner)


def _digest(job: Job, held: Held, holdings: Sequence[Mapping[str, Layout]]) -> str:
    return digest(held, holdings, rank=job.rank, device=job.device)


def _fits(held: Held, planned: Mapping[str, Layout], kinds: Kinds) -> bool:
    """Whether a rank holds what its strategy says."""
    return held.keys() == planned.keys() and all(
        layout == planned[key] and tensor.dtype == kinds[key] for key, (tensor, layout) in held.items()
    )


def _largest(job: Job, *numbers: int) -> list[int]:
    """Of each number the largest over all ranks. Collective: one all-reduce; waits for the device."""
    if job.world_size == 1:
        return list(numbers)
    found = torch.tensor(numbers, dtype=torch.int64, device=job.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


@contextmanager
def _all_or_none(job: Job, doing: str) -> Iterator[None]:
    """What is done inside has worked on every rank, or SwitchError is raised on every rank."""
    failure = ""
    try:
        yield
    except Exception as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
        cause = error
    if not any(_largest(job, int(bool(failure)))):
        return
    failures = told(failure, world_size=job.world_size)
    if failed := [(rank, text) for rank, text in enumerate(failures) if text]:
        refusal = SwitchError(
            f"The switch failed while {doing}; {job.strategy} goes on, unchanged.",
            numbers="; ".join(f"rank {rank}: {text}" for rank, text in failed[:2]) + "; ..." * (len(failed) > 2),
            hint="%strategy shows what can be picked",
        )
        raise _told(job, refusal) from (cause if failure else None)


def _told(job: Job, error: SwitchError) -> SwitchError:
    """The error, of which everyone has been told: all ranks raise it alike."""
    job.ledger.emit(Failed(job.step, error="SwitchError", what=f"{error.what} {error.numbers}"))
    return error
