"""Implement `strategy="auto"`: before the first step, choose the strategy with the shortest predicted step that fits.

Memory: the peak with activations (peak_bytes.py) must fit into the free memory of a rank. Seconds are predicted from
the times of the blocks, which were measured when they were found, and from the speeds of the links. Rank 0 decides for
all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbkit.errors import NbkitError, StrategyError
from nbkit.planner.choose.search import fastest
from nbkit.rank.data.batch import BatchSplit, rows_of
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.estimate import free_memory
from nbkit.rank.train.estimate.cost_model import CostModel
from nbkit.rank.train.estimate.peak_bytes import PeakBytes, largest
from nbkit.rank.train.estimate.time_model import seconds_before_a_step
from nbkit.strategy import Strategy

AUTO = "auto"


@dataclass(frozen=True)
class Recommended:
    """The chosen strategy and its numbers.

    peak_bytes: the peak of the fullest rank. limit: the bytes that a rank has. seconds: predicted seconds of a step.
    Each is None if unknown. considered, fitting: numbers of strategies.
    """

    strategy: Strategy
    peak_bytes: int | None
    limit: int | None
    seconds: float | None
    considered: int
    fitting: int

    def __str__(self) -> str:
        parts = [f"strategy=auto: {self.strategy}"]
        if self.seconds is not None:
            parts.append(f"{self.seconds * 1e3:.3g} ms a step predicted")
        if self.peak_bytes is not None:
            room = f" of {self.limit / 1e6:,.0f} MB" if self.limit is not None else ""
            parts.append(f"a rank needs {self.peak_bytes / 1e6:,.1f} MB{room} at the peak")
        return "; ".join([*parts, f"{self.fitting} of {self.considered} strategies fit"])


def recommend(builder: Builder) -> Recommended:
    """Return the strategy that rank 0 chooses. Collective.

    Raises StrategyError, on every rank, if no strategy fits or the batch is not known.
    """
    told: list[Any] = [None]
    if builder.rank == 0:
        try:
            with torch.random.fork_rng(devices=[]):
                told[0] = _found(builder)
        except StrategyError as error:
            told[0] = error.what, error.numbers, error.hint
    if builder.world_size > 1:
        dist.broadcast_object_list(told, src=0, device=builder.device)
    if isinstance(told[0], tuple):
        what, numbers, hint = told[0]
        raise StrategyError(what, numbers=numbers, hint=hint)
    made: Recommended = told[0]
    return made


def ordered(builder: Builder, strategy: Strategy) -> Strategy:
    """Return `strategy` with its ranks in the order that the measured links between nodes suggest.

    On one node, choose stages according to the speeds of its devices. Collective if there is a choice.
    """
    link = builder.link
    nodes = len(set(link.node_of)) if link is not None else 1
    free = strategy.pp > 1 and (bool(strategy.speeds) if nodes == 1 else strategy.dp > 1)
    if link is None or not free or strategy.order:
        return strategy
    told = [strategy]
    if builder.rank == 0 and (batch := _batch(builder)):
        told = [_cost_model(builder, batch).ordered(strategy)]
    dist.broadcast_object_list(told, src=0, device=builder.device)
    return told[0]


def _batch(builder: Builder) -> int:
    config = builder.config
    return config.batch or (rows_of(config.hints.example) if config.hints.example is not None else 0)


def _cost_model(builder: Builder, batch: int) -> CostModel:
    def fits(strategy: Strategy) -> BatchSplit:
        return BatchSplit.of(batch, strategy, microbatch_size=builder.config.compute.microbatch_size)

    return CostModel(builder, builder.template.kinds(builder.skeleton), fits)


def _found(builder: Builder) -> Recommended:
    batch = _batch(builder)
    if not batch:
        raise StrategyError(
            "strategy='auto' needs an example batch.",
            numbers="no example= was given",
            hint="prepare(..., hints=nbkit.ModelHints(example=batch))",
        )

    model = _cost_model(builder, batch)
    peaks = PeakBytes(builder, model.census, real=True)
    ranks = builder.link.node_of.count(builder.link.node_of[0]) if builder.link is not None else 1
    limit = free_memory.left(builder.device, ranks=ranks)
    every = Strategy.every(builder.world_size, schedules=("1f1b",))
    rows: list[tuple[Strategy, int | None, float | None]] = []
    least: tuple[int, Strategy] | None = None
    for strategy in every:
        try:
            model.fits(strategy)
            builder.plan(strategy)
            top = largest(peaks.of(strategy, batch))
        except NbkitError:
            continue
        size = top.total if top is not None else max(rest.total for rest in model.census.at_rest(strategy))
        if least is None or size < least[0]:
            least = size, strategy
        if limit is None or size <= limit:
            took = seconds_before_a_step(model, builder, strategy, batch)
            rows.append((strategy, top.total if top is not None else None, took))
    if not rows:
        room = f"a rank has {(limit or 0) / 1e6:,.1f} MB"
        raise StrategyError(
            f"No strategy of {builder.world_size} ranks fits this model with a batch of {batch} rows.",
            numbers=f"{least[1]} needs least: {least[0] / 1e6:,.1f} MB at the peak, {room}"
            if least is not None
            else f"{len(every)} strategies, each refused",
            hint="a smaller batch_size, compute=nbkit.Compute(recompute=True), or more ranks",
        )
    first = fastest({row: row[2] for row in rows if row[2] is not None}) or rows[0]
    return Recommended(first[0], first[1], limit, first[2], len(every), len(rows))
