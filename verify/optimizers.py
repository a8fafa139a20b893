"""Optimizers of `python -m verify optimizers`: those of torch, and others written simply from their papers.

`OPTIMIZERS[name]` takes a model and returns an optimizer of its parameters that train, or several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

EPS = 1e-8
LARGEST_SIDE = 64
"""SOAP gives larger sides of a matrix, such as the vocabulary, no basis. Gradients of few tokens would not fill it."""

State = dict[str, Any]


class Each(Optimizer):
    """An optimizer that updates one parameter after the other, by `update`. `begin` sees all of them first."""

    def __init__(self, params: Any, lr: float = 0.02, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @property
    def every(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yield (group, parameter) of those that have a gradient."""
        for group in self.param_groups:
            yield from ((group, p) for p in group["params"] if p.grad is not None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.begin()
        for group, p in self.every:
            p.sub_(group["lr"] * self.update(p, p.grad, self.state[p], group))

    def begin(self) -> None:
        """Read all parameters before the first is updated."""

    def update(self, p: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        """Return what is subtracted from `p`, divided by the learning rate."""
        raise NotImplementedError


def adam(state: State, grad: Tensor, first: float = 0.9, second: float = 0.99) -> Tensor:
    """Return the step of Adam (Kingma and Ba 2014)."""
    k = state["step"] = state.get("step", 0) + 1
    m = state.setdefault("m", torch.zeros_like(grad)).lerp_(grad, 1 - first)
    v = state.setdefault("v", torch.zeros_like(grad)).lerp_(grad * grad, 1 - second)
    return (m / (1 - first**k)) / ((v / (1 - second**k)).sqrt() + EPS)


class Lion(Each):
    """Chen et al. 2023: the sign of a momentum."""

    def update(self, p: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        m = state.setdefault("m", torch.zeros_like(p))
        way = m.lerp(grad, 0.1).sign()
        m.lerp_(grad, 0.01)
        return 0.1 * (way + 0.1 * p)


class AdEMAMix(Each):
    """Pagliardini et al. 2024: Adam with a second momentum that lasts longer."""

    def update(self, p: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        slow = state.setdefault("slow", torch.zeros_like(p)).lerp_(grad, 0.001)
        fast = adam(state, grad)
        return fast + 5 * slow / ((state["v"] / (1 - 0.99 ** state["step"])).sqrt() + EPS)


class ScheduleFree(Each):
    """Defazio et al. 2024: AdamW at a point between an iterate z and the mean x of all iterates."""

    def update(self, p: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        k = state["step"] = state.get("step", 0) + 1
        z = state.setdefault("z", p.clone())
        v = state.setdefault("v", torch.zeros_like(p)).lerp_(grad * grad, 0.01)
        x = (p - 0.1 * z) / 0.9
        z.sub_(group["lr"] * (grad / ((v / (1 - 0.99**k)).sqrt() + EPS) + 0.01 * p))
        x.lerp_(z, 1 / k)
        return (p - x.lerp(z, 0.1)) / group["lr"]


class Lamb(Each):
    """You et al. 2020: Adam, scaled by the norm of the weights."""

    def update(self, p: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        step = adam(state, grad) + 0.01 * p
        weight, length = p.norm(), step.norm()
        return step * torch.where((weight > 0) & (length > 0), weight / length, 1.0)


class Lars(Each):
    """You et al. 2017: momentum with a rate for each layer, by the norms of weights and gradient."""

    def update(self, p: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        weight, length = p.norm(), grad.norm()
        rate = torch.where(weight > 0, weight / (length + 0.01 * weight + EPS), 1.0)
        return state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(rate * (grad + 0.01 * p)).clone()


def power(matrix: Tensor, exponent: float) -> Tensor:
    """Return a power of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=EPS).pow(exponent) @ vectors.T


class Shampoo(Each):
    """Gupta et al. 2018: a preconditioner for each side, recomputed every second step."""

    def update(self, p: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        g = grad if grad.ndim == 2 else grad.reshape(-1, 1)
        sides = (g, g.T) if grad.ndim == 2 else (g,)
        if not state:
            state.update(step=0, sides=[1e-2 * torch.eye(len(x), dtype=p.dtype) for x in sides])
        for side, x in zip(state["sides"], sides, strict=True):
            side.add_(x @ x.T)
        if state["step"] % 2 == 0:
            state["roots"] = [power(side, -0.5 / len(sides)) for side in state["sides"]]
        state["step"] += 1
        g = state["roots"][0] @ g
        return (g @ state["roots"][1] if grad.ndim == 2 else g).view_as(p)


class Soap(Each):
    """Vyas et al. 2024: Adam in the basis of Shampoo's preconditioners. The first step only makes the basis.

    Gradients of low rank do not determine the whole basis, and rounding decides the rest. Without the diagonal that is
    added here, two runs of one process with differently cut batches differ by 3e-4 in the loss of the third step.
    """

    def update(self, p: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        if grad.ndim != 2:
            return adam(state, grad)
        sides = [_filled(x @ x.T) if len(x) <= LARGEST_SIDE else None for x in (grad, grad.T)]
        if "sides" not in state:
            state.update(sides=sides, adam={})
            state["bases"] = [None if side is None else torch.linalg.eigh(side)[1] for side in sides]
            return torch.zeros_like(p)
        turned = _turned(grad, [None if base is None else base.T for base in state["bases"]])
        step = _turned(adam(state["adam"], turned), state["bases"])
        for n, (side, new) in enumerate(zip(state["sides"], sides, strict=True)):
            if side is not None:
                side.lerp_(new, 0.05)
                state["bases"][n] = torch.linalg.qr(side @ state["bases"][n])[0]
        return step


def _filled(side: Tensor) -> Tensor:
    return side + side.trace() / len(side) * torch.linspace(1, 2, len(side), dtype=side.dtype).diag()


def _turned(matrix: Tensor, bases: list[Tensor | None]) -> Tensor:
    left, right = bases
    matrix = matrix if left is None else left @ matrix
    return matrix if right is None else matrix @ right.T


class Prodigy(Each):
    """Mishchenko and Defazio 2023: Adam with one step size d, estimated from all parameters."""

    def begin(self) -> None:
        first = self.param_groups[0]
        d, keep = first.setdefault("d", 1e-3), 0.99**0.5
        up, down = keep * first.setdefault("up", 0.0), 0.0
        for _, p in self.every:
            state = self.state[p]
            start, s = state.setdefault("start", p.clone()), state.setdefault("s", torch.zeros_like(p))
            up += d * d * float((p.grad * (start - p)).sum())
            down += float(s.mul_(keep).add_(d * d * p.grad).abs().sum())
        for group in self.param_groups:
            group.update(up=up, now=d, d=max(d, up / down if down else d))

    def update(self, p: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        d = group["now"]
        m = state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(0.1 * d * grad)
        v = state.setdefault("v", torch.zeros_like(p)).mul_(0.99).add_(0.01 * (d * grad).square())
        return 10 * d * m / (v.sqrt() + d * EPS)


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    """Return Muon for the matrices of the blocks, and AdamW for the rest."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inside = {name for name, p in named.items() if p.ndim == 2 and "blocks." in name}
    rest = [p for name, p in named.items() if name not in inside]
    return [Muon([named[name] for name in sorted(inside)], lr=0.02), AdamW(rest, lr=0.01)]


def _muon(model: nn.Module) -> list[Optimizer]:
    every = _trained(model)
    return [Muon([p for p in every if p.ndim == 2], lr=0.02), SGD([p for p in every if p.ndim != 2], lr=0.05)]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda model: AdamW(_trained(model), lr=0.01),
    "sgd": lambda model: SGD(_trained(model), lr=0.05, momentum=0.9),
    "adafactor": lambda model: Adafactor(_trained(model), lr=0.01),
    "lion": lambda model: Lion(_trained(model)),
    "ademamix": lambda model: AdEMAMix(_trained(model)),
    "schedule-free": lambda model: ScheduleFree(_trained(model)),
    "lamb": lambda model: Lamb(_trained(model)),
    "lars": lambda model: Lars(_trained(model)),
    "shampoo": lambda model: Shampoo(_trained(model)),
    "soap": lambda model: Soap(_trained(model)),
    "prodigy": lambda model: Prodigy(_trained(model)),
    "muon": _muon,
    "muon and adamw": muon_and_adamw,
}
