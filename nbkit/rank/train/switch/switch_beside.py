"""The exchange where memory holds both sharded models: the new one is built and filled beside the old one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nbkit.rank.parallel.process_groups import Connections
from nbkit.rank.parallel.reshard.redistribute import Exchange
from nbkit.rank.parallel.reshard.state_digest import scratch_bytes
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.rank.train.switch.consensus import Consensus, agreed, planned
from nbkit.rank.train.switch.optimizer_reports import Memory
from nbkit.rank.train.training_state import TrainingState
from nbkit.strategy import Strategy


@dataclass(frozen=True)
class Prepared:
    """A state that could take over, with empty tensors, and the exchange that fills them from `before`."""

    state: TrainingState
    before: JobState
    target: JobState
    exchange: Exchange


def prepare(
    left: TrainingState, new: Strategy, connections: Connections, memory: Memory, builder: Builder, ranks: Consensus
) -> Prepared:
    """The new sharded model with empty weights and state, and the exchange that fills it. Collective."""
    before = job_state.state(left.sharded_model, left.optimizer)
    exchange: Exchange | None = None
    try:
        with ranks.all_or_none("building the new sharded model", numbers=3) as said:
            sharded_model, inner = builder.build(new, connections, like=left.optimizer)
            said.doing = "making room for the new sharded model"
            job_state.allocate(sharded_model, inner, memory.kinds, memory.numbers)
            target = job_state.state(sharded_model, inner)
            said.doing = "planning the exchange"
            kinds = builder.plans.kinds(memory.kinds)
            exchange, said.numbers = planned(builder.plans, kinds, left.sharded_model.strategy, new, before, target)
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
            exchange.give_back()  # plans are kept, and with them what they hold
        raise
    there = left.under(sharded_model, inner, builder.options)
    return Prepared(there, before, target, exchange)


def _make_room(exchange: Exchange, before: JobState, target: JobState, device: torch.device) -> None:
    # The digests', which the exchange's buffers may lie in: both are got again from what was reserved here.
    torch.empty(scratch_bytes(before, target), dtype=torch.uint8, device=device)
    exchange.make_room(before, target, device=device)
