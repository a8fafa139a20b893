"""A pipeline schedule from outside of nbkit: waves of as many micro-batches as there are ranks.

Each wave is a GPipe of its own, so that a rank never holds more activations than there are ranks.
"""

from __future__ import annotations

import nbkit
from nbkit.schedules import Op


def waves(ranks: int, microbatches: int, rank: int) -> list[Op]:
    ops = []
    for first in range(0, microbatches, ranks):
        wave = range(first, min(first + ranks, microbatches))
        ops += [Op("F", rank, micro) for micro in wave]
        ops += [Op("B", rank, micro) for micro in wave]
    return ops


nbkit.schedules.register("waves", waves)
