"""A process that measures what the blocks of an uneven model cost, and then what its stages do. For rigs.forked."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.pipeline.layer_chain import find_chain, measure_costs


class _Layer(nn.Module):
    """A residual MLP that is as expensive as it is wide inside."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inside), nn.Linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Worker:
    """width: of the hidden states; insides: of each layer; rows: of the batch."""

    def __init__(self, *, width: int, insides: list[int], rows: int) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(*(_Layer(width, inside) for inside in insides))
        self._x = torch.randn(rows, width)

    def costs(self) -> list[float]:
        """Seconds of each layer as nbkit measures them before it cuts."""

        def call() -> Any:
            return self._model(self._x)

        return list(measure_costs(self._model, find_chain(self._model, call), call))

    def stages(self, ranges: list[tuple[int, int]], rounds: int) -> list[float]:
        """Seconds of each stage by itself, forward and backward, the least of `rounds` (all stages once in each)."""
        stages = [self._model[start:stop] for start, stop in ranges]
        best = [float("inf")] * len(stages)
        for _ in range(rounds):
            for number, stage in enumerate(stages):
                x = self._x.clone().requires_grad_(number > 0)
                began = time.perf_counter()
                stage(x).sum().backward()
                best[number] = min(best[number], time.perf_counter() - began)
                for p in stage.parameters():
                    p.grad = None
        return best
