"""Changing the strategy of a live job: the new side is built and filled beside the old one, or nothing has happened.

Between two steps: build the new side (groups, module, placeholders), tell each other what everyone holds and will hold,
move exactly the boxes that are missing, check that every box is filled, and only then compute with it. An error on any
rank before that lets go of the new side on all of them, and the old strategy trains on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbkit.errors import SwitchError
from nbkit.events import Switched
from nbkit.layout import Layout
from nbkit.planner.exchange import Plan
from nbkit.rank.parallel.digest import digest
from nbkit.rank.parallel.reshard import Exchange
from nbkit.rank.parallel.side import Side
from nbkit.rank.train import holdings
from nbkit.rank.train.holdings import Held
from nbkit.rank.train.shares import by_name
from nbkit.strategy import Strategy

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["Prepared", "Switchable", "switch", "try_out", "undo"]


class Switchable:
    """What a Job and a Trainer offer alike: another strategy from the next step on."""

    def switch(self, strategy: str) -> Switched:
        """Train on under another strategy: see nbkit.rank.train.switch. Collective, between two steps."""
        job: Job = getattr(self, "job", self)  # type: ignore[arg-type]
        with job.ledger.clock.stopped():
            job.ledger.settle(keep=1)
            return switch(job, strategy)

    def undo(self) -> Switched:
        """Back to the strategy before the last switch; the weights stay as they are now. Collective."""
        job: Job = getattr(self, "job", self)  # type: ignore[arg-type]
        with job.ledger.clock.stopped():
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
    if new == old:
        return Switched(job.step, old=str(old), new=str(new), identical=True)
    began = time.perf_counter()
    before = _state(job.side, job.optimizer.inner)
    prepared = prepare_switch(job, new, before)
    ready = time.perf_counter()
    with _all_or_none(job, "moving the state"):
        prepared.exchange.run(before, prepared.target, device=job.device)
        prepared.side.data.refresh()
    proof = time.perf_counter()
    plan = prepared.exchange.plan
    identical = _digest(job, before, plan.old) == _digest(job, prepared.target, plan.new) if verify else None
    proven = time.perf_counter()
    if identical is False:
        raise SwitchError(
            f"The state under {new} is not the one under {old}.",
            numbers="the digests of weights and optimizer state differ",
            hint=f"{old} goes on; please report this",
        )
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
        prepare_s=ready - began,
        pause_s=time.perf_counter() - began - (proven - proof),
        proof_s=proven - proof,
        identical=identical,
    )
    job.switches.append(event)
    job.ledger.emit(event)
    return event


def undo(job: Job) -> Switched:
    """Back to the strategy before the last switch, with the weights as they are now. Collective."""
    if job.previous is None:
        raise SwitchError("There is no switch to undo.", numbers=f"strategy {job.strategy} since step 0")
    return switch(job, job.previous)


def try_out(job: Job, text: str | Strategy, steps: int, make_step: Callable[[], None]) -> dict[str, Any]:
    """Measure a strategy on the live job for some steps, then go back to where it was, weights and all. Collective.

    make_step: makes one step of the training. Takes the memory of both sides. Returns strategy, steps, and the median
    seconds of a step there (the first left out, which makes what later ones reuse) and here before.
    """
    job.ledger.settle()
    side, inner, step, position = job.side, job.optimizer.inner, job.step, job.feed.position()
    records, switches, precision = len(job.ledger.records), len(job.switches), job.precision.state_dict()
    before = [record["seconds"] for record in job.ledger.records[-steps:] if record["strategy"] == str(job.strategy)]
    event = switch(job, text, keep=True)
    try:
        job.ledger.clock.restart()
        for _ in range(steps):
            make_step()
        job.ledger.settle()
        seconds = [record["seconds"] for record in job.ledger.records[records:]]
    finally:
        job.optimizer.zero_grad()
        tried = job.side
        job.adopt(side, inner)
        if tried is not side:
            tried.data.close()
        job.step = step
        job.precision.load_state_dict(precision)
        del job.ledger.records[records:], job.switches[switches:]
        job.feed.recut()
        job.feed.go_to(position)
    return {
        "strategy": event.new,
        "steps": steps,
        "step_s": statistics.median(seconds[1:] or seconds),
        "before_step_s": statistics.median(before) if before else None,
        "switch_s": event.pause_s,
    }


def prepare_switch(job: Job, new: Strategy, before: Held) -> Prepared:
    """The new side with empty weights and state, and the exchange that fills it. Collective."""
    connections = job.blueprint.connect(new)
    with _all_or_none(job, "building the new side"):
        side, inner = job.blueprint.side(new, connections, like=job.optimizer.inner)
    own = {
        "old": {key: layout for key, (_, layout) in before.items()},
        "kinds": {key: tensor.dtype for key, (tensor, _) in before.items()},
        "numbers": holdings.scalars(job.side, job.optimizer.inner),
        "held": side.data.layouts,
        "weights": {key: layout for key, (_, layout) in (holdings.weights(side) | holdings.buffers(side)).items()},
    }
    everyone: list[Any] = [own]
    if job.world_size > 1:
        everyone = [None] * job.world_size
        dist.all_gather_object(everyone, own)
    kinds = {key: dtype for one in everyone for key, dtype in one["kinds"].items()}
    numbers = {name: values for one in everyone for name, values in one["numbers"].items()}
    with _all_or_none(job, "making room for the new side"):
        holdings.allocate(side, inner, by_name(kinds), numbers)
        after = [_planned(one["weights"], one["held"], kinds) for one in everyone]
        plan = Plan.of([one["old"] for one in everyone], after, {key: dtype.itemsize for key, dtype in kinds.items()})
        exchange = Exchange(plan, job.rank)
    return Prepared(side, inner, exchange, _state(side, inner))


def _state(side: Side, inner: torch.optim.Optimizer) -> Held:
    return holdings.weights(side) | holdings.buffers(side) | holdings.per_element(side, inner)


def _digest(job: Job, held: Held, holdings: Sequence[Mapping[str, Layout]]) -> str:
    return digest(held, holdings, rank=job.rank, device=job.device)


def _planned(weights: dict[str, Layout], held: dict[str, Layout], kinds: dict[str, torch.dtype]) -> dict[str, Layout]:
    """What a rank must hold under the new strategy."""
    states = {
        key: held[name]
        for key in kinds
        for kind, _, name in [key.partition("/")]
        if kind not in ("weight", "buffer") and name in held
    }
    return weights | states


@contextmanager
def _all_or_none(job: Job, doing: str) -> Iterator[None]:
    """What is done inside has worked on every rank, or SwitchError is raised on every rank."""
    failure = ""
    try:
        yield
    except Exception as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
        cause = error
    failures = [failure]
    if job.world_size > 1:
        failures = [""] * job.world_size
        dist.all_gather_object(failures, failure)
    if failed := [(rank, text) for rank, text in enumerate(failures) if text]:
        raise SwitchError(
            f"The switch failed while {doing}; {job.strategy} goes on, unchanged.",
            numbers="; ".join(f"rank {rank}: {text}" for rank, text in failed[:2]) + "; ..." * (len(failed) > 2),
            hint="%strategy shows what can be picked",
        ) from (cause if failure else None)
