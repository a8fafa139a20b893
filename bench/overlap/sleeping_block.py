"""A block that sleeps in forward and backward, and rows of data for a model of such blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bench.pipeline.sleeping_rank import last


class SleepingBlock(nn.Module):
    """A residual layer of `width` features. forward_s, backward_s: seconds that its passes sleep."""

    def __init__(self, width: int, forward_s: float, backward_s: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(x)
        last(self.forward_s)
        return _Backward.apply(x, self.backward_s) if self.backward_s else x  # type: ignore[no-any-return]


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        last(ctx.seconds)
        return grad, None


def drawn_rows(number: int, width: int) -> list[tuple[Tensor, Tensor]]:
    """Return `number` pairs of input and target, each of shape (width,), the same on every rank."""
    drawn = torch.randn(number, 2, width, generator=torch.Generator().manual_seed(0))
    return [(x, y) for x, y in drawn]
