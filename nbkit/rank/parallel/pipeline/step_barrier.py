"""The end of a pipeline's step: no rank updates its weights before every rank has all its gradients.

A stage is nowhere else: were one updated and another broken off, no step would be whole. The last stage is through
long before the first, though, and whoever comes last is what the step waits for. In an all-reduce it would wait for
answers to what it sends, 1 to 2 ms on gloo. In a dissemination barrier (Hensgen, Finkel and Manber 1988) whose
receives were posted before the last backward pass, all that it waits for has arrived. The messages are empty.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class Barrier:
    """Of the ranks of `group`. Per step: `open`, then `meet`; equally often, and with equal tags, on all of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._awaited: list[tuple[int, dist.Work]] = []
        self._empty = torch.empty(0, dtype=torch.uint8)

    def open(self, tag: int) -> None:
        """Post the receives. tag: of no other message under way."""
        me, size = self.group.rank(), self.group.size()
        self._tag, self._awaited = tag, []
        distance = 1
        while distance < size:
            work = self.group.recv([self._empty], (me - distance) % size, tag)
            self._awaited.append(((me + distance) % size, work))
            distance *= 2

    def meet(self) -> None:
        """Wait until every rank is here."""
        sent = []
        for peer, work in self._awaited:
            sent.append(self.group.send([self._empty], peer, self._tag))
            work.wait()
        for work in sent:
            work.wait()
        self._awaited = []
