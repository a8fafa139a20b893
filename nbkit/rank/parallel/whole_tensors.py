"""Update whole tensors at their owners, between the sum of gradients and the optimizer's step.

An optimizer such as Muon needs a whole matrix, but most strategies give each rank a part of it. Each such tensor has
one owner among the ranks that hold a part (nbkit/planner/owners.py). After the gradients are summed, `take` sends the
parts of the gradient to the owner. The optimizer, its state and the gradient norm use only the whole tensor, and only
there. After the step, `give_back` sends each rank its part of the new weight. This works for every technique, because
it follows from the layouts of what the ranks hold, like a switch.

An owner keeps the whole weight. It equals the parts on the ranks until something else changes a part: a user, a
checkpoint, a replaced rank. Each rank computes sums of its parts after `give_back` and before the next step, with
random weights and in float64. If a sum differs on any rank, or an update was aborted, `take` sends the parts of the
weight too.

In a step, tensors of S bytes over n ranks that each hold 1/n of them send S (n - 1) / n bytes of gradients and as many
bytes of weights back, over all ranks together. An owner keeps the whole tensor besides its part, and its gradient from
`take` to the end of the step. Both exchanges are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.module.copies import parameter_like
from nbkit.rank.parallel.plan import ParallelPlan
from nbkit.rank.parallel.process_groups import Connections
from nbkit.rank.parallel.reshard.redistribute import Exchange, State
from nbkit.tensor_layout import Layout

_WEIGHTS, _AT_ONCE = 1 << 14, 1 << 20
"""Number of elements that are reduced to one sum; number of elements that a device casts at once."""


def exchanges(plan: ParallelPlan) -> tuple[ExchangePlan, ExchangePlan]:
    """Return the plans of what a step of `plan` sends to the owners, and of what they send back."""
    sizes = {name: p.element_size() for name, p in plan.facts.shapes.skeleton.named_parameters()}
    parts, wholes = (
        [{name: layout for name, layout in each.items() if name in plan.owners} for each in every]
        for every in (plan.layouts.summed, plan.layouts.held)
    )
    there = ExchangePlan.of(parts, wholes, sizes, node_of=plan.node_of)
    return there, ExchangePlan.of(wholes, parts, sizes, node_of=plan.node_of)


class WholeTensors:
    """The tensors of `plan` that have owners, on this rank.

    summed: name -> the part of each parameter whose gradient is summed here. layouts: name -> the layout of this part.
    held: the tensors for the optimizer: the parts of parameters without an owner, and the whole tensors that this rank
    owns.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        connections: Connections,
        summed: Mapping[str, nn.Parameter],
        layouts: Mapping[str, Layout],
    ) -> None:
        rank, self._world = connections.axes.rank, connections.world
        self._summed = {name: p for name, p in summed.items() if name in plan.owners}
        self.layouts = dict(plan.layouts.held[rank])
        self._parts = {name: layouts[name] for name in self._summed}
        self.held: dict[str, nn.Parameter] = {}
        for name in self.layouts:
            part = summed[name]
            if name in plan.owners:
                whole = torch.zeros(self.layouts[name].local, dtype=part.dtype, device=part.device)
                self.held[name] = parameter_like(whole, part)
            else:
                self.held[name] = part
        self._own = [name for name in self.held if name in plan.owners]
        self._take, self._give = (Exchange(each, rank) for each in exchanges(plan))
        self._device = next((p.device for p in self._summed.values()), torch.device("cpu"))
        draw = torch.Generator().manual_seed(0)
        self._random = torch.randn(_WEIGHTS, generator=draw, dtype=torch.float64).to(self._device)
        self._given: Tensor | None = None  # sums of the parts, as sent back by the owners
        self._versions: list[int] = []  # of the whole tensors, at that time
        self._changed: Tensor | None = None  # while this is checked: 1 if any rank has found a weight changed since
        self._arrived: Callable[[], Any] | None = None

    def look(self) -> None:
        """Start to check whether any rank has another weight than its owner sent. All ranks must call it."""
        if self._given is None or self._versions != [self.held[name]._version for name in self._own]:
            changed = torch.ones((), dtype=torch.int32, device=self._device)
        else:
            changed = (self._sums() != self._given).any().to(self._device, torch.int32)
        work = dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self._world, async_op=True)
        self._changed, self._arrived = changed, None if work is None else work.wait
        if work is not None and accelerator().holds(changed):
            work.wait()  # the device waits, and the host continues
            self._changed, copied = accelerator().fetch(changed)
            self._arrived = copied.synchronize

    def _is_changed(self) -> bool:
        """Return the result of `look` in this step. Waits for it."""
        if self._changed is None:
            self.look()
        changed, arrived, self._changed, self._arrived = self._changed, self._arrived, None, None
        if arrived is not None:
            arrived()
        return bool(changed)

    def _sums(self) -> Tensor:
        """Return randomly weighted sums of the parts, in float64."""
        found = []
        for part in (part for part in self._summed.values() if part.numel()):
            flat = (torch.view_as_real(part) if part.is_complex() else part).detach().reshape(-1)
            for some in flat.split(_AT_ONCE if accelerator().holds(part) else _WEIGHTS):
                width = min(len(some), _WEIGHTS)
                rows = F.pad(some.to(torch.float64, copy=True), (0, -len(some) % width)).view(-1, width)
                found.append(rows.mul_(self._random[:width]).sum(1))
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64, device=self._device)

    def begin_again(self) -> None:
        """Forget what is known about the weights, after an aborted step."""
        self._given = self._changed = self._arrived = None

    @torch.no_grad()
    def bring(self) -> None:
        """Send the weights to their owners if any rank has another weight than its owner sent. All ranks must call
        it."""
        if self._is_changed():
            weights = {name: (part.detach(), self._parts[name]) for name, part in self._summed.items()}
            self._run(self._take, weights, {name: (self.held[name].detach(), self.layouts[name]) for name in self._own})

    @torch.no_grad()
    def take(self) -> None:
        """Send the gradients of the tensors to their owners, after `bring`. All ranks must call it.

        The parts lose their gradients. If a tensor has no gradient on its owner, which also holds a part, it has none
        anywhere.
        """
        self.bring()
        source: dict[str, tuple[Tensor, Layout]] = {}
        for name, part in self._summed.items():
            grad = torch.zeros_like(part) if part.grad is None else part.grad
            source[name] = grad.detach(), self._parts[name]
        target = {name: (torch.empty_like(self.held[name]), self.layouts[name]) for name in self._own}
        self._run(self._take, source, target)
        for name in self._own:
            whole, part = self.held[name], self._summed[name]
            whole.requires_grad_(part.requires_grad)
            whole.grad = None if part.grad is None else target[name][0]
        for part in self._summed.values():
            part.grad = None

    @torch.no_grad()
    def give_back(self) -> None:
        """Send each rank its parts of the tensors that their owners have updated. All ranks must call it."""
        source = {name: (self.held[name].detach(), self.layouts[name]) for name in self._own}
        target = {name: (part.detach(), self._parts[name]) for name, part in self._summed.items()}
        self._run(self._give, source, target)
        self._given, self._versions = self._sums(), [self.held[name]._version for name in self._own]

    def _run(self, exchange: Exchange, source: State, target: State) -> None:
        exchange.run(source, target, device=self._device, group=self._world)
