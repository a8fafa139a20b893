"""The side that a switch has left, whole, and where the job stood: all that the way back needs."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nbkit.rank.parallel.sharded_model import Side

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["Left"]


@dataclass
class Left:
    """attributes: of the side's module, which may be the user's own: that takes on those of whatever is in force."""

    side: Side
    inner: torch.optim.Optimizer
    attributes: dict[str, Any]
    step: int
    position: Any
    precision: dict[str, Any]

    @classmethod
    def of(cls, job: Job) -> Left:
        """What is in force now, between two steps."""
        side, inner = job.side, job.optimizer.inner
        position, precision = job.feed.position(), job.precision.state_dict()
        return cls(side, inner, side.module.__dict__, job.step, position, precision)

    def take_up(self, job: Job) -> None:
        """It is in force again, and the steps made since have not been; the other side is closed. Not collective."""
        job.optimizer.zero_grad()
        if (other := job.side) is not self.side:
            self.take_over(job)
            other.close()
        # Whatever was broken off was the other side's: the weights that go on are whole.
        job.half_way = False
        job.step = self.step
        job.precision.load_state_dict(self.precision)
        job.feed.recut()
        job.feed.go_to(self.position)

    def take_over(self, job: Job) -> None:
        """The job computes with it again, and nothing else of it has changed."""
        self.side.module.__dict__ = self.attributes
        job.adopt(self.side, self.inner)

    def let_go(self) -> None:
        """Its memory is free: there is no way back any more."""
        held = [weakref.ref(tensor) for tensor in self.side.data.tensors()]
        self.side.close()
        del self.side, self.inner, self.attributes
        # The next steps want its memory, and a collection stops them for longer than all the rest of a switch.
        if any(tensor() is not None for tensor in held):
            gc.collect()
