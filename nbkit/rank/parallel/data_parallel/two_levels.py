"""An all-reduce in two levels, where a group has several ranks on each of several nodes: see nbkit.node_levels.

Of S bytes over k nodes with L ranks of the group on each, a rank sends (L - 1) / L S within its node twice, and
2 (k - 1) / k S / L to other nodes. Beside them travels the canary: see `TwoLevelSum`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.rank.parallel.data_parallel.bucket_packing import Packing, aligned
from nbkit.rank.parallel.device_mesh import LevelGroups

# torch 2.13 has new names for both, and warns of the old ones.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(
    flat: Tensor, canary: int | None, group: dist.ProcessGroup | None, levels: LevelGroups | None
) -> dist.Work | TwoLevelSum:
    """Start to sum `flat` over `group`, in two levels where it has them. canary: see TwoLevelSum."""
    if levels is not None:
        return TwoLevelSum(flat, canary, levels)
    work: dist.Work = dist.all_reduce(flat, group=group, async_op=True)
    return work


class TwoLevelSum:
    """An all-reduce of `flat`, one-dimensional, that is under way: a reduce-scatter, an all-reduce, an all-gather.

    Each needs what the one before has brought: `advance` waits for it, and starts the next. On all ranks alike: the
    order in which sums are begun and advanced is the order of what each group does.

    Each part of a node's ranks has a canary, which is 2 where all three were made, and less where one was broken off:
    on a GPU nothing else tells. The element `canary` of `flat`, summed as the others are, becomes the least; None where
    nobody asks.
    """

    def __init__(self, flat: Tensor, canary: int | None, levels: LevelGroups) -> None:
        self.flat, self.canary, self.levels = flat, canary, levels
        index, ranks = levels.within.rank(), levels.within.size()
        self.packing = Packing.of([flat.shape], ranks, flat)
        self._end = self.packing.width
        matrix = flat.new_zeros(ranks, aligned(self._end + 1, flat))
        self.packing.pack(matrix[:, : self._end], [flat])
        matrix[:, self._end] = 1 if index < 2 else 0
        self._row, self._within, self._matrix = matrix[index], torch.empty(0), matrix
        self._work = reduce_scatter(self._row, matrix.view(-1), group=levels.within, async_op=True)
        self._next = [self._between, self._gather, self._unpack]

    def advance(self) -> None:
        """Wait for what is under way, and start what follows it; nothing more when all is done."""
        if self._next:
            self._work.wait()
            self._next.pop(0)()

    def wait(self) -> None:
        """Order what follows behind the sum."""
        while self._next:
            self.advance()

    def _between(self) -> None:
        self._within = self._row[self._end].clone()
        self._row[self._end].mul_(0.5 if self.levels.between.rank() < 2 else 0)
        self._work = dist.all_reduce(self._row, group=self.levels.between, async_op=True)

    def _gather(self) -> None:
        row = self._row.clone()  # a part of the matrix that is filled
        row[self._end] = torch.minimum(row[self._end], self._within)
        self._matrix[:, self._end] = 0
        self._work = all_gather(self._matrix.view(-1), row, group=self.levels.within, async_op=True)

    @torch.no_grad()
    def _unpack(self) -> None:
        self.packing.unpack(self._matrix[:, : self._end], [self.flat])
        if self.canary is not None:
            self.flat[self.canary] = torch.minimum(self.flat[self.canary], self._matrix[:, self._end].min())
        del self._matrix, self._row
