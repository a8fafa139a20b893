"""Replicas that train apart and meet now and then: local SGD (Stich 2019), with slow momentum (Wang et al. 2020).

Each makes `every` steps with the gradients of its own rows; then weights are averaged: an all-reduce of the bytes of
all parameters in `every` steps. The optimizer's state stays each replica's own. So that a replica's gradient is that of
a mean, the step multiplies the loss by `apart`: the mean over the replicas is the gradient of the whole batch.

Of an optimizer whose steps do not grow with the gradients, such as Adam, the mean falls behind one process: a replica's
gradients are noisier by the square root of the replicas, and steps along what they have in common are smaller by as
much (Malladi et al. 2022). So there, from one average to the next, the weights move by a momentum of their movements,
whose sum is larger by that root: 1 / (1 - momentum). Every rank has it from the averages alone. It begins anew at a
switch, a load and a step that breaks. SGD's mean is the step of the mean gradient already.
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


def momentum(replicas: int) -> float:
    """Of the movement from one average to the next."""
    return float(1 - replicas**-0.5)


class LocalSteps(Replicas):
    """`replicas` of `model` over the group `across`, averaged after every `every`-th step since the last average.

    momentum: of the movement from one average to the next; 0 where there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        replicas: int,
        across: dist.ProcessGroup | None,
        levels: LevelGroups | None = None,
        every: int,
        momentum: float,
    ) -> None:
        # By name: the weights of the last average, None where they are not those of all ranks; and how they move.
        self._begun: dict[str, Tensor] | None = None
        self._moving: dict[str, Tensor] = {}
        self._since = 1
        super().__init__(model, world_size=1)
        self._replicas, self._across, self._levels, self._every = replicas, across, levels, every
        self._momentum = momentum
        self._since = 0

    def begin_again(self) -> None:
        # Some ranks may have come to the average and others not: all count from here, and the next `unite` is made.
        self._since = 1
        super().begin_again()
        self._begun = None
        self._moving.clear()

    @property
    def apart(self) -> int:
        return self._replicas

    def let_go(self) -> None:
        super().let_go()
        self._begun = None
        self._moving.clear()

    @torch.no_grad()
    def reset(self, *, passes: int = 1) -> None:
        super().reset(passes=passes)
        if not self._since and self._momentum and self._begun is None:
            self._begun = {name: p.detach().clone() for name, p in self._averaged().items()}

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
            self._average([p.detach() for p in self._averaged().values()])
            self._move_on()
        self._since = 0
        self._average(list(state))

    def _averaged(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._params.items() if p.requires_grad}

    @torch.no_grad()
    def _move_on(self) -> None:
        """From the last average not by the difference to this one, but by the momentum of such differences."""
        begun, self._begun = self._begun, None  # the next step notes where it begins: somebody may set weights between
        for name, p in self._averaged().items():
            if begun is None or name not in begun:
                self._moving.pop(name, None)
                continue
            moved = p.detach() - begun[name]
            if name in self._moving:
                moved.add_(self._moving[name], alpha=self._momentum)
            self._moving[name] = moved
            p.copy_(begun[name].add_(moved))

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
