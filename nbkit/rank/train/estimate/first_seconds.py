"""Seconds of a step before any was made, from what the blocks and the links took when they were measured."""

from __future__ import annotations

from nbkit.planner.step.measured_step import Seen, Sends, predicted
from nbkit.planner.step.overlap import FORWARD
from nbkit.rank.data.batch import rows_of
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.estimate.cost_model import CostModel
from nbkit.strategy import Strategy


def seconds_before_a_step(
    model: CostModel, builder: Builder, strategy: Strategy, batch: int, *, recompute: bool | None = None
) -> float | None:
    """Of a step of `batch` rows, None where something that it takes is not known. recompute: blocks; None: as the
    builder does."""
    options, link = builder.options, builder.link
    costs, example = options.costs, builder.config.example
    if not costs or example is None:
        return None
    # Costs are those of the blocks as they are, a forward and a backward.
    again = options.recompute if recompute is None else recompute
    compute = sum(costs) / rows_of(example) * batch
    if link is None:
        return (1 + FORWARD * again) * compute
    sends = model.sends(strategy)
    if sends is None:
        return None
    alone = Seen(Strategy(), {"compute": compute})
    return predicted(alone, Sends((), 0), strategy, sends, link, costs, recomputed=(False, again)).total
