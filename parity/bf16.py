"""bfloat16: a strategy may differ from one process as much as one process from itself when it sums in another order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parity.cells import FAMILIES, Cell, layers_for
from parity.figures import Bars, far
from parity.training import BATCH, Truth, truth


def bf16_cells(steps: int) -> Iterator[Cell]:
    """One or two strategies of each family on two models, in float32 weights and bfloat16 arithmetic."""
    chosen = [FAMILIES["data"][0], FAMILIES["data"][3], "tp", "pp schedule=1f1b", "pp schedule=zbv", "cp=4"]
    for subject in ("gpt", "llama"):
        for strategy in (*chosen, "dp=2 tp=2", "dp=2 pp=2", "tp=2 pp=2"):
            yield Cell(subject, strategy, "float32", steps, frozenset({"bf16"}), layers_for(strategy))


class _InParts(TorchFunctionMode):
    """Linear maps in parts of their input and of their output features, which an order other than 0 shuffles before:
    the same sums, forward and backward, rounded elsewhere.
    """

    def __init__(self, parts: int, order: int) -> None:
        super().__init__()
        self.parts, self.order = parts, order

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
        if self.order:
            order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(self.order))
            x, weight = x[..., order], weight[:, order]
        rows = [self._summed(x, some) for some in weight.chunk(self.parts, 0)]
        return torch.cat(rows, -1) if bias is None else torch.cat(rows, -1) + bias

    def _summed(self, x: Tensor, weight: Tensor) -> Tensor:
        pairs = zip(x.chunk(self.parts, -1), weight.chunk(self.parts, -1), strict=True)
        total: Tensor = sum(F.linear(a, b) for a, b in pairs)  # type: ignore[assignment]
        return total


def orders(rank: int, cell: Cell, fewer: bool = False) -> list[Truth]:
    """One process in bfloat16, and again with other orders of summing: over rows, over features, over both.

    Forty runs; fewer: eight of them.
    """
    every = [(parts, order) for parts in ((4,) if fewer else (1, 2, 4)) for order in range(3)]
    wraps = [nullcontext, *(partial(_InParts, parts, order) for parts, order in every)]
    several = (BATCH, 2) if fewer else (BATCH, BATCH // 2, BATCH // 4, 2)
    return [truth(cell, rows=rows, wrap=wrap) for wrap in wraps for rows in several]


@cache
def _bars(cell: Cell, fewer: bool) -> Bars:
    runs = run_ranks(orders, 1, cell, fewer, timeout=300, join=False)[0]
    found = [far(one, other) for i, one in enumerate(runs) for other in runs[:i]]
    return Bars(*(max(getattr(each, name) for each in found) for name in ("grads", "largest", "losses", "norms")))


def bars_of_bf16(cell: Cell, *, fewer: bool = False) -> Bars:
    """The largest difference between two of forty runs in one process; fewer: of the eight that sum most unlike."""
    return _bars(cell.truth, fewer)
