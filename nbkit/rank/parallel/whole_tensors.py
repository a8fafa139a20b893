"""Update whole tensors at their owners, between gradients that are summed and the optimizer's step.

An optimizer such as Muon has to see a whole matrix, and most strategies give each rank a part of it. Each such tensor
has one owner among the ranks that hold a part (nbkit/planner/owners.py). Once the gradients are summed, `take` sends
the owner the parts of the gradient and of the weight. The optimizer, its state and the gradient norm know only the
whole tensor, and only there. After the step `give_back` sends each rank its part of the new weight. This is the same
for every technique: it follows from the layouts of what the ranks hold, as a switch does.

In a step, tensors of S bytes over n ranks that each hold 1/n of them send S (n - 1) / n bytes of gradients, as many of
weights, and as many back, over all ranks together. An owner keeps the whole tensor besides its part, and its gradient
from `take` to the end of the step. Both exchanges are waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.parallel.module.copies import parameter_like
from nbkit.rank.parallel.plan import ParallelPlan
from nbkit.rank.parallel.process_groups import Connections
from nbkit.rank.parallel.reshard.redistribute import Exchange, State
from nbkit.tensor_layout import Layout

T = TypeVar("T")


class WholeTensors:
    """The tensors of `plan` that have owners, on this rank.

    summed: name -> the part of each parameter whose gradient is summed here; layouts: which part it is. held: what the
    optimizer gets: the parts of parameters without an owner, and the whole tensors that this rank owns.
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
        sizes = {name: p.element_size() for name, p in plan.facts.shapes.skeleton.named_parameters()}
        parts, wholes = (
            [{name: layout for name, layout in each.items() if name in plan.owners} for each in every]
            for every in (plan.layouts.summed, plan.layouts.held)
        )
        here, there = ([_both(each) for each in every] for every in (parts, wholes))
        self._take = Exchange(ExchangePlan.of(here, there, _both(sizes), node_of=plan.node_of), rank)
        self._give = Exchange(ExchangePlan.of(wholes, parts, sizes, node_of=plan.node_of), rank)

    @torch.no_grad()
    def take(self) -> None:
        """Give the owners the gradients and weights of their tensors. Collective.

        The parts lose their gradients. A tensor without gradient on its owner, which holds a part, has none anywhere.
        """
        source: dict[str, tuple[Tensor, Layout]] = {}
        target: dict[str, tuple[Tensor, Layout]] = {}
        for name, part in self._summed.items():
            grad = torch.zeros_like(part) if part.grad is None else part.grad
            source[f"gradient/{name}"] = grad.detach(), self._parts[name]
            source[f"weight/{name}"] = part.detach(), self._parts[name]
        for name in self._own:
            whole = self.held[name]
            target[f"gradient/{name}"] = torch.empty_like(whole), self.layouts[name]
            target[f"weight/{name}"] = whole.detach(), self.layouts[name]
        self._run(self._take, source, target)
        for name in self._own:
            whole, part = self.held[name], self._summed[name]
            whole.requires_grad_(part.requires_grad)
            whole.grad = None if part.grad is None else target[f"gradient/{name}"][0]
        for part in self._summed.values():
            part.grad = None

    @torch.no_grad()
    def give_back(self) -> None:
        """Give each rank its parts of the tensors that their owners have updated. Collective."""
        source = {name: (self.held[name].detach(), self.layouts[name]) for name in self._own}
        target = {name: (part.detach(), self._parts[name]) for name, part in self._summed.items()}
        self._run(self._give, source, target)

    def _run(self, exchange: Exchange, source: State, target: State) -> None:
        device = next((p.device for p in self._summed.values()), torch.device("cpu"))
        exchange.run(source, target, device=device, group=self._world)


def _both(by_name: Mapping[str, T]) -> dict[str, T]:
    """Return what is known of each tensor, for its gradient and for its weight."""
    return {f"{kind}/{name}": known for name, known in by_name.items() for kind in ("gradient", "weight")}
