"""The end of a pipeline's step: no rank updates its weights before every rank has all its gradients.

A stage is nowhere else: were one updated and another broken off, no step would be whole. The last stage is through
long before the first, though, and whoever comes last is what the step waits for. In an all-reduce it would wait for
answers to what it sends, 1 to 2 ms on gloo. In a dissemination barrier (Hensgen, Finkel and Manber 1988) whose
receives were posted before the last backward pass, all that it waits for has arrived. The messages are empty.

Where the number of ranks is a power of two, the messages can go both ways between pairs and carry a sum of a few
numbers (recursive doubling): a step whose ranks are all in one pipeline needs no all-reduce of its own for them. On
two ranks that takes a quarter of the CPU of both, 0.1 ms a rank instead of 0.4.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Barrier:
    """Of the ranks of `group`. Per step: `open`, then `meet`; equally often, and with equal arguments but for the
    numbers, on all of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, group.size()
        self._awaited: list[tuple[int, dist.Work, Tensor]] = []
        # Of a step that was broken off: somebody may still write into them.
        self._left_over: list[tuple[int, dist.Work, Tensor]] = []

    @property
    def sums(self) -> bool:
        """Whether the messages can carry numbers."""
        return self.size & (self.size - 1) == 0

    def open(self, tag: int, count: int = 0) -> None:
        """Post the receives. tag: of no other message under way. count: of the numbers that `meet` sums, where `sums`.

        Without numbers, who is waited for is another rank than who is told.
        """
        me, size = self.group.rank(), self.size
        self._left_over += self._awaited
        self._tag, self._awaited = tag, []
        distance = 1
        while distance < size:
            told, awaited = (me + distance) % size, (me - distance) % size
            if count:
                told = awaited = me ^ distance
            arriving = torch.empty(count, dtype=torch.float64)
            self._awaited.append((told, self.group.recv([arriving], awaited, tag), arriving))
            distance *= 2

    def meet(self, numbers: Tensor | None = None) -> None:
        """Wait until every rank is here. numbers: `count` float64, which become their sums over the ranks, equal on all
        of them to the last bit."""
        sent = []
        for peer, work, arrived in self._awaited:
            own = torch.empty(0, dtype=torch.float64) if numbers is None else numbers.clone()
            sent.append((self.group.send([own], peer, self._tag), own))
            work.wait()
            if numbers is not None:
                numbers += arrived
        for work, _ in sent:
            work.wait()
        self._awaited, self._left_over = [], []
