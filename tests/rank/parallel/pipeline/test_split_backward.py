"""Test that a stage's backward in two passes gives the gradients of one pass, and computes nothing twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from nbkit.rank.parallel.pipeline.executor import backward, backward_input, enter


def taken(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def same(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        other = theirs[name]
        assert (one is None) == (other is None), name
        assert one is None or torch.allclose(one, other, rtol=1e-12, atol=1e-12), name


class Fused(torch.autograd.Function):
    """A matrix product in Python that computes both gradients in one call."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        Fused.calls += 1
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Odd(nn.Module):
    """A stage with an unusual graph: shared or frozen weights, checkpoints, Python functions, outputs off the path."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.packed = nn.Parameter(torch.randn(4, 12))
        self.never = nn.Linear(4, 4)
        if kind == "frozen":
            self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.packed.chunk(3, dim=1)
        x = self.first(x)
        if self.kind == "shared":
            x = self.first(x.sin())
        if self.kind in ("checkpoint", "reentrant"):
            x = checkpoint(self.second, x, use_reentrant=self.kind == "reentrant")
        if self.kind == "python":
            x = Fused.apply(x, self.second.weight)
        x = x @ q + (x @ k).cos() * (x @ v).sin()
        beside = (self.second.weight.exp(), self.second.bias.sum()) if self.kind == "beside" else ()
        return (x, *beside, beside[0] @ x.t()) if beside else (x,)


ODD = ["plain", "shared", "frozen", "checkpoint", "reentrant", "python", "beside"]


def in_two_passes(kind: str, first_stage: bool, split: bool) -> dict[str, Tensor | None]:
    """Return the gradients of one stage after B, or after I and W."""
    torch.manual_seed(1)
    model = Odd(kind).double()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=not first_stage)
    for _ in range(2):  # with two micro-batches, gradients are added
        outputs = model(*enter([x]))
        edges, grads = [get_gradient_edge(out) for out in outputs], [torch.randn_like(out) for out in outputs]
        del outputs
        if split:
            backward_input(edges, grads, [] if first_stage else [x]).run()
        else:
            backward(edges, grads)
    return {"x": x.grad, **taken(model)}


@pytest.mark.parametrize("first_stage", [False, True])
@pytest.mark.parametrize("kind", ODD)
def test_two_passes_give_the_gradients_of_one_pass(kind: str, first_stage: bool) -> None:
    whole = in_two_passes(kind, first_stage, split=False)
    calls = Fused.calls
    parts = in_two_passes(kind, first_stage, split=True)
    assert Fused.calls - calls == (2 if kind == "python" else 0)  # once for each of the two micro-batches
    same(parts, whole)
    assert parts["never.weight"] is None


def test_weight_gradients_are_computed_once_in_the_second_pass() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(inplace=True), nn.Linear(4, 4)).double()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    arrived: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    out = model(*enter([x]))
    with FlopCounterMode(display=False) as first:
        later = backward_input([get_gradient_edge(out)], [torch.ones_like(out)], [x])
    assert arrived == [] and x.grad is not None
    with FlopCounterMode(display=False) as second:
        later.run()
    assert sorted(arrived) == sorted(name for name, _ in model.named_parameters())
    assert first.get_total_flops() == second.get_total_flops() == 2 * 2 * 5 * 4 * 4
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin(x.detach().requires_grad_()).sum().backward()
    same(taken(model), taken(twin))
