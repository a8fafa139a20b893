"""Choose the rank that updates each whole tensor, so that all ranks work alike.

An optimizer such as Muon has to see whole matrices. A strategy that cuts them gives each matrix one owner, which gets
its gradient, updates it and sends the update back. The cost of a matrix of m x n, with m <= n, is taken as m * m * n:
the products of Newton and Schulz, and of preconditioners, grow like this. The largest come first, each to the rank that
has the least so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod


def update_cost(shape: Sequence[int]) -> int:
    """Return the cost of an update, in products of numbers. A tensor of more dims counts as a matrix of its rows."""
    rows, columns = (shape[0], prod(shape[1:])) if shape else (1, 1)
    return max(rows * columns * min(rows, columns), 1)


def owners(
    candidates: Mapping[str, Sequence[tuple[int, ...]]], shapes: Mapping[str, Sequence[int]], num_ranks: int
) -> dict[str, int]:
    """Return the name of each tensor -> the number of its owner among `candidates[name]`. Every rank computes the same.

    candidates: each is a rank, or several that update the same tensor, such as replicas. shapes: of the whole tensors.
    """
    load = [0] * num_ranks
    found: dict[str, int] = {}
    for name in sorted(candidates, key=lambda name: (-update_cost(shapes[name]), name)):
        every = candidates[name]
        number = found[name] = min(range(len(every)), key=lambda n: (max(load[rank] for rank in every[n]), n))
        for rank in every[number]:
            load[rank] += update_cost(shapes[name])
    return found
