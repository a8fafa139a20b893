"""The torch half of sync_every=: replicas train independently, and their weights are averaged every few steps.

This is local SGD (Stich 2019) with slow momentum (Wang et al. 2020). Each replica makes `every` steps with the
gradients of its own rows. Then weights are averaged: one all-reduce of the bytes of all parameters in `every` steps.
Each replica keeps its own optimizer state. The step multiplies the loss by `apart`, so that the gradient of a replica
is the gradient of the mean over its rows. The mean over replicas is then the gradient of the whole batch.

If the optimizer's steps do not grow with the gradients, as with Adam, plain averaging progresses more slowly than one
process. The noise in the gradients of one of n replicas is larger by sqrt(n), so the common part of the replicas' steps
is smaller by this factor (Malladi et al. 2022). To correct this, the movement of the weights from one average to the
next gets a momentum, which enlarges it by 1 / (1 - momentum) = sqrt(n). Every rank computes it from the averages alone.
It restarts at a switch, at a load and after an aborted step. With SGD no correction is needed: the mean of the steps is
the step of the mean gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.data_parallel.buckets import all_reduce
from nbkit.rank.parallel.data_parallel.ddp import Replicas, ReplicaSetup
from nbkit.techniques.exchange import BUCKET


def apply(value: int, setup: ReplicaSetup) -> ReplicaSetup:
    """Return `setup` with replicas that train independently. value: number of steps between two averages."""
    return replace(setup, axis_class=partial(LocalSteps, every=value))


def momentum(replicas: int) -> float:
    """Return the momentum of the movement from one average to the next, for this number of replicas."""
    return float(1 - replicas**-0.5)


class LocalSteps(Replicas):
    """Replicas of `model` over the group of `setup`, which are averaged every `every` steps."""

    def __init__(self, model: nn.Module, setup: ReplicaSetup, *, every: int) -> None:
        # By name: the weights of the last average, or None if the ranks do not share them; and their last movements.
        self._begun: dict[str, Tensor] | None = None
        self._moving: dict[str, Tensor] = {}
        self._since = 1
        self._across, self._every = setup, every
        self._momentum = momentum(setup.ranks) if setup.adaptive else 0.0
        super().__init__(model, replace(setup, ranks=1, group=None, levels=None))
        self._since = 0

    def begin_again(self) -> None:
        # Only some ranks may have made the average. So all ranks count from here, and the next `unite` averages.
        self._since = 1
        super().begin_again()
        self._begun = None
        self._moving.clear()

    @property
    def apart(self) -> int:
        return self._across.ranks

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
            # A rank without rows updates too, so that all optimizers have state for the same parameters.
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
        """Move the weights from the last average by the momentum of the movements, not only by the last movement."""
        begun, self._begun = self._begun, None  # the next step stores its start: weights may be set in between
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
        """Average `tensors` over the replicas, in messages of a bucket's size and in the same order on all ranks.

        The tensors may be on the host, like some optimizer state.
        """
        device = next(iter(self._params.values())).device
        while tensors:
            size, group = 0, list[Tensor]()
            while tensors and size < BUCKET and tensors[0].dtype == (group or tensors)[0].dtype:
                group.append(tensors.pop(0))
                size += group[-1].nbytes
            flat = torch.cat([tensor.reshape(-1).to(device) for tensor in group])
            all_reduce(flat, None, self._across.group, self._across.levels).wait()
            flat.div_(self._across.ranks)
            for tensor, mean in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(mean.view_as(tensor))
