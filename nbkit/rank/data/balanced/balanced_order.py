"""An order of an epoch in which all runs of one length have about the same cost, and the same number of each group.

Samples are divided into cells of about 64. They are sorted by group and cost, and cut into strata. A stratum has as
many samples as there are cells. Each cell gets one random sample of each stratum (stratified sampling without
replacement). Within a cell, the strata follow in van der Corput order. So halves and quarters of a cell are balanced
too, and so is a run from the end of one cell to the beginning of the next. Cells that eight ranks could not share
evenly exchange samples with neighbouring cells.

The order depends only on the samples' costs and groups, the seed and the epoch. It does not depend on batches or ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import pairwise
from random import Random

import torch

from nbkit.rank.data.balanced.equal_shares import equal_shares, unevenness

_CELL, _NEIGHBOURS = 64, 8
_SHARING, _EVEN = 8, 1.012
_TRIES, _FAILING = 64, 16  # attempts to exchange samples: in all neighbouring cells together; failed ones of one cell


class BalancedOrder:
    """The sample numbers of an epoch, read by slices. costs, groups: one entry for each sample."""

    def __init__(self, costs: Sequence[float], groups: Sequence[Hashable] | None, *, seed: int, epoch: int) -> None:
        self._costs, self._groups, self._seed = costs, groups, f"{seed} {epoch}"
        cells = max(-(-len(costs) // _CELL), 1)
        self._drawn = _drawn(costs, groups, cells, torch.Generator().manual_seed(seed + epoch))
        each, more = divmod(len(costs), cells)
        # Cells with one more sample come first, like larger batches.
        self._starts = [cell * each + min(cell, more) for cell in range(cells + 1)]
        self._newest: tuple[int, list[int]] = (-1, [])

    def __getitem__(self, asked: slice) -> list[int]:
        start, stop = asked.start, asked.stop
        found: list[int] = []
        while start < stop:
            stretch = (bisect_right(self._starts, start) - 1) // _NEIGHBOURS
            newest = self._newest  # with workers, another thread may change this attribute at the same time
            if newest[0] != stretch:
                self._newest = newest = stretch, self._even(stretch)
            first = self._starts[stretch * _NEIGHBOURS]
            found += newest[1][start - first : stop - first]
            start = first + len(newest[1])
        return found

    def _even(self, stretch: int) -> list[int]:
        """Return the samples of neighbouring cells, after exchanges so that ranks can share each cell almost evenly."""
        edges = self._starts[stretch * _NEIGHBOURS : (stretch + 1) * _NEIGHBOURS + 1]
        cells = [self._drawn[start:stop] for start, stop in pairwise(edges)]
        draw = Random(f"{self._seed} {stretch}")
        found = [self._uneven(cell) for cell in cells]
        left = _TRIES * (len(cells) > 1)
        for a in range(len(cells)):
            failed = 0
            while found[a] > _EVEN and failed < _FAILING and left:
                left, failed = left - 1, failed + 1
                b = draw.choice([b for b in range(len(cells)) if b != a])
                i, j = draw.randrange(len(cells[a])), draw.randrange(len(cells[b]))
                mine, others = cells[a][i], cells[b][j]
                if self._costs[mine] == self._costs[others] or not self._alike(mine, others):
                    continue
                one, other = list(cells[a]), list(cells[b])
                one[i], other[j] = others, mine
                both = self._uneven(one), self._uneven(other)
                if both[0] < found[a] and both[1] <= max(found[b], _EVEN):
                    cells[a], cells[b], found[a], found[b], failed = one, other, *both, 0
        return [sample for cell in cells for sample in cell]

    def _alike(self, a: int, b: int) -> bool:
        return self._groups is None or self._groups[a] == self._groups[b]

    def _uneven(self, cell: Sequence[int]) -> float:
        costs = [self._costs[sample] for sample in cell]
        if _SHARING * max(costs) > sum(costs):
            return 1.0  # one sample costs more than a share, so exchanges do not help
        return unevenness(costs, equal_shares(costs, _SHARING))


def _drawn(
    costs: Sequence[float], groups: Sequence[Hashable] | None, cells: int, generator: torch.Generator
) -> list[int]:
    number = {group: i for i, group in enumerate(dict.fromkeys(groups or ()))}
    order = torch.randperm(len(costs), generator=generator)
    kept = len(costs) // cells * cells
    first, rest = order[:kept], order[kept:]
    # The samples that do not fill a stratum come last in the first cells.
    places = dict.fromkeys(rest.tolist(), kept)
    first = first[torch.tensor(costs, dtype=torch.float64)[first].argsort(stable=True)]
    if groups:
        first = first[torch.tensor([number[group] for group in groups])[first].argsort(stable=True)]
    strata = first.view(-1, cells)
    drawn = torch.rand(strata.shape, generator=generator).argsort(1)
    by_cell = strata.gather(1, drawn)[_van_der_corput(len(strata))].T.tolist()
    for cell, sample in zip(by_cell, places, strict=False):
        cell.append(sample)
    return [sample for cell in by_cell for sample in cell]


def _van_der_corput(number: int) -> list[int]:
    """Return the numbers 0 to number - 1 in van der Corput order: 0, 1/2, 1/4, 3/4, ... of `number`."""
    bits = max(number - 1, 1).bit_length()
    return sorted(range(number), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
