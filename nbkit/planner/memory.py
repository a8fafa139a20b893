"""Bytes that a rank holds at rest: at the end of a step, with gradients, without activations.

Per trained element, over a sharding group of N ranks, with p bytes of parameter, g of gradient, o of optimizer state
(Adam in fp32: 4, 4, 8; mixed precision with fp32 master weights: 2, 2, 12), after ZeRO (Rajbhandari et al. 2020, table
1 and section 5):

    zero=0   p + g + o        16
    zero=1   p + g + o/N      8 + 8/N
    zero=2   p + (g + o)/N    4 + 12/N
    zero=3   (p + g + o)/N    16/N

The pipeline takes away what other stages hold, tensor parallelism divides what it cuts (Shoeybi et al. 2019; norms and
some biases stay whole), context parallelism changes nothing. A frozen element has p alone. Left out: the step counters
of an optimizer (4 bytes per parameter tensor), buffers, and the padding of collectives, which is gone at rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbkit.planner.job_facts import Cuts, Weight, cuts_for, held
from nbkit.strategy import Strategy

__all__ = ["ADAM", "MIXED_ADAM", "SGD", "Bytes", "Rest", "at_rest", "per_element"]


@dataclass(frozen=True)
class Bytes:
    """Bytes of one element: of the parameter, its gradient, its optimizer state (with a master copy where one is)."""

    parameter: int
    gradient: int
    optimizer: int


ADAM = Bytes(4, 4, 8)
MIXED_ADAM = Bytes(2, 2, 12)
SGD = Bytes(4, 4, 0)


@dataclass(frozen=True)
class Rest:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.parameters + self.gradients + self.optimizer


def at_rest(
    weights: Sequence[Weight],
    strategy: Strategy,
    rank: int,
    *,
    cuts: Cuts | None = None,
    each: Bytes = ADAM,
) -> Rest:
    """What `rank` holds of `weights`. cuts: which blocks the ranks of a pipeline hold; None: as many each.

    Exact also where a degree does not divide a dim: balanced parts, the first ones hold one more.
    """
    cuts = cuts_for(weights, strategy, cuts)
    trained = [weight for weight in weights if weight.trained]

    def elements(of: Sequence[Weight], stage: int) -> int:
        sharded = strategy.zero >= stage
        return sum(held(weight, strategy, rank, cuts, sharded=sharded) for weight in of)

    return Rest(
        parameters=each.parameter * elements(weights, 3),
        gradients=each.gradient * elements(trained, 2),
        optimizer=each.optimizer * elements(trained, 1),
    )


def per_element(strategy: Strategy, *, each: Bytes = ADAM) -> float:
    """Bytes of a rank per trained element of what its stage and its tp part hold: the formulas above."""
    parts = {1: each.optimizer, 2: each.gradient, 3: each.parameter}
    return sum(size / strategy.shard if strategy.zero >= stage else size for stage, size in parts.items())
