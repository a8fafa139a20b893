"""Replicas that train apart and meet now and then: local SGD (Stich 2019).

Each makes `every` steps with the gradients of its own rows; then weights are averaged: an all-reduce of the bytes of
all parameters in `every` steps. The optimizer's state stays each replica's own. So that a replica's gradient is that of
a mean, the step multiplies the loss by `apart`: the mean over the replicas is the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.levers import BUCKET
from nbkit.rank.parallel.data_parallel.ddp import Replicas
from nbkit.rank.parallel.data_parallel.two_levels import all_reduce
from nbkit.rank.parallel.device_mesh import LevelGroups


class LocalSteps(Replicas):
    """`replicas` of `model` over the group `across`, averaged after every `every`-th step since the last average."""

    def __init__(
        self,
        model: nn.Module,
        *,
        replicas: int,
        across: dist.ProcessGroup | None,
        levels: LevelGroups | None = None,
        every: int,
    ) -> None:
        super().__init__(model, world_size=1)
        self._replicas, self._across, self._levels, self._every = replicas, across, levels, every
        self._since = 0

    def begin_again(self) -> None:
        super().begin_again()
        # Some ranks may have come to the average and others not: all count from here, and the next `unite` is made.
        self._since = 1

    @property
    def apart(self) -> int:
        return self._replicas

    def finish(self) -> Tensor | None:
        canary = super().finish()
        if all(p.grad is None for p in self._params.values()):
            # A rank without rows updates too, so that optimizers have state of the same parameters.
            for p in self._params.values():
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        return canary

    def after_step(self) -> None:
        self._since += 1
        if self._since >= self._every:
            self.unite()

    def unite(self, state: Iterable[Tensor] = ()) -> None:
        if self._since:
            self._average([p.detach() for p in self._params.values() if p.requires_grad])
        self._since = 0
        self._average(list(state))

    @torch.no_grad()
    def _average(self, tensors: list[Tensor]) -> None:
        """In messages of a bucket's size, in the order that all ranks have; the optimizer's may be on the host."""
        device = next(iter(self._params.values())).device
        while tensors:
            size, group = 0, list[Tensor]()
            while tensors and size < BUCKET and tensors[0].dtype == (group or tensors)[0].dtype:
                group.append(tensors.pop(0))
                size += group[-1].nbytes
            flat = torch.cat([tensor.reshape(-1).to(device) for tensor in group])
            all_reduce(flat, None, self._across, self._levels).wait()
            flat.div_(self._replicas)
            for tensor, mean in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(mean.view_as(tensor))
