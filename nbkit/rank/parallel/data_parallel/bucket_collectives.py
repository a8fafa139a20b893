"""Gradients summed over ranks so that each keeps its part: reduce-scatter, and for hsdp an all-reduce behind it.

Of gradients of S bytes over n ranks, (n - 1) / n S leave every rank; across r replicas, all-reduced, another
2 (r - 1) / r S / n, where these are on several nodes in two levels (two_levels.py). Beside the gradients travel one
element per parameter and the canary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.rank.parallel.data_parallel import two_levels
from nbkit.rank.parallel.data_parallel.bucket_packing import Packing, aligned
from nbkit.rank.parallel.data_parallel.two_levels import TwoLevelSum, all_reduce, reduce_scatter
from nbkit.rank.parallel.device_mesh import Axes, LevelGroups


@dataclass(frozen=True)
class Links:
    """Where this rank stands: `index` of `ranks` that share one copy, `replica` of those who hold the same part."""

    group: dist.ProcessGroup | None
    ranks: int
    index: int
    across: dist.ProcessGroup | None
    replica: int
    levels: LevelGroups | None = None
    """Of the all-reduce across."""

    @classmethod
    def of(cls, axes: Axes) -> Links:
        """Along the data axis."""
        return cls(
            axes.group("shard"),
            axes.size("shard"),
            axes.index("shard"),
            axes.group("replicate"),
            axes.index("replicate"),
            axes.levels("replicate"),
        )


def all_gather(row: Tensor, links: Links, matrix: Tensor | None = None) -> tuple[Tensor, dist.Work]:
    """(matrix with the rows of all ranks, the work that fills it). matrix: one of which `row` is this rank's row."""
    if matrix is None:
        matrix = row.new_empty(links.ranks, row.numel())
    return matrix, two_levels.all_gather(matrix.view(-1), row, group=links.group, async_op=True)


class Reduction:
    """One bucket of gradients on its way.

    Behind the gradients of each row, element i counts the ranks on which parameter i has one. Then comes the canary:
    the ranks 0 and 1 of a group give 1, the others 0, so that it is 2 when the sum was made and less when it was not.
    """

    def __init__(self, packing: Packing, links: Links, like: Tensor) -> None:
        self.packing, self.links, self._like = packing, links, like.new_empty(0)
        self.unused: set[int] = set()
        self._end = 0
        self.forget()

    def forget(self) -> None:
        """Whatever is under way is nobody's business any more."""
        self._work: dist.Work | TwoLevelSum | None = None
        self._row: Tensor | None = None
        self._within: Tensor | None = None

    def send(self, grads: list[Tensor | None]) -> None:
        """Start it. The gradients, in the order of the packing, are copied; one that is None counts as zeros.

        The list is empty afterwards: where it is all that holds them, they go before what is received takes memory.
        """
        # One that was broken off while it was waited for would count as sent across already.
        self.forget()
        links, width = self.links, self.packing.width
        self._end = width + len(grads)
        matrix = self._like.new_empty(links.ranks, aligned(self._end + 1, self._like))
        self.packing.pack(matrix[:, :width], grads)
        self.unused = {i for i, grad in enumerate(grads) if grad is None}
        grads.clear()
        matrix[:, width:].fill_(1)
        for i in self.unused:
            matrix[:, width + i] = 0
        if links.index > 1:
            matrix[:, self._end] = 0
        self._row = matrix[links.index]
        self._work = reduce_scatter(self._row, matrix.view(-1), group=links.group, async_op=True)

    def cross(self) -> None:
        """Within the group it is summed: start the sum across, where there is one, or the next level of that."""
        if isinstance(self._work, TwoLevelSum):
            self._work.advance()
        if self.links.across is None or self._within is not None:
            return
        assert self._work is not None and self._row is not None
        self._work.wait()
        self._within = self._row[self._end].clone()
        self._row[self._end].mul_(0.5 if self.links.replica < 2 else 0)
        self._work = all_reduce(self._row, self._end, self.links.across, self.links.levels)

    def receive(self) -> tuple[Tensor, Tensor]:
        """Views: (the sums that it keeps and the counts behind them, the canary), ordered behind the reduction."""
        self.cross()
        assert self._work is not None and self._row is not None
        self._work.wait()
        row, within, canary = self._row, self._within, self._row[self._end]
        self.forget()
        return row[: self._end], canary if within is None else torch.minimum(canary, within)


class InFlight:
    """At most two reductions under way: the memory of the third from the end is given back."""

    def __init__(self) -> None:
        self._queue: list[tuple[Reduction, Callable[[Tensor], None]]] = []
        self.canary: Tensor | None = None

    def send(self, reduction: Reduction, grads: list[Tensor | None], landed: Callable[[Tensor], None]) -> None:
        """Start `reduction`, with `grads` as it takes them; `landed` will get what it brings."""
        for earlier, _ in self._queue:
            earlier.cross()
        while len(self._queue) > 1:
            self._land()
        reduction.send(grads)
        self._queue.append((reduction, landed))

    def land(self) -> None:
        """Everything that is under way."""
        while self._queue:
            self._land()

    def forget(self) -> None:
        """A step was broken off."""
        for reduction, _ in self._queue:
            reduction.forget()
        self._queue.clear()
        self.canary = None

    def _land(self) -> None:
        reduction, landed = self._queue.pop(0)
        row, canary = reduction.receive()
        if not self._queue:
            self.canary = canary.clone()  # a view would keep the whole matrix
        landed(row)
