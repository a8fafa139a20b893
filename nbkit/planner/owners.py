"""Choose the rank that updates each whole tensor, so that all ranks do equal work.

An optimizer such as Muon needs whole matrices. A strategy that cuts them gives each matrix one owner, which gets its
gradient, updates it and sends the update back. The cost of an m x n matrix, with m <= n, is estimated as m * m * n: the
matrix products of Newton-Schulz iterations and of preconditioners grow like this. The most expensive matrices are
assigned first, each to the rank that has the least work so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod


def update_cost(shape: Sequence[int]) -> int:
    """Return the cost of an update, in multiplications. A tensor of more dims counts as a matrix with shape[0] rows."""
    rows, columns = (shape[0], prod(shape[1:])) if shape else (1, 1)
    return max(rows * columns * min(rows, columns), 1)


def owners(
    candidates: Mapping[str, Sequence[tuple[int, ...]]], shapes: Mapping[str, Sequence[int]], num_ranks: int
) -> dict[str, int]:
    """Return {name of a tensor: index of its owner in `candidates[name]`}. Every rank computes the same result.

    candidates: possible owners of each tensor. An owner is a rank, or several ranks that all update the tensor, such as
    replicas. shapes: the shapes of the whole tensors.
    """
    load = [0] * num_ranks
    found: dict[str, int] = {}
    for name in sorted(candidates, key=lambda name: (-update_cost(shapes[name]), name)):
        every = candidates[name]
        number = found[name] = min(range(len(every)), key=lambda n: (max(load[rank] for rank in every[n]), n))
        for rank in every[number]:
            load[rank] += update_cost(shapes[name])
    return found
