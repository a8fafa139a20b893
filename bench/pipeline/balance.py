"""Measure how equal the stages of an uneven model are, and check that no other partition is better."""

from __future__ import annotations

import random
import time
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from bench.rigs.forked import Ranks
from bench.settings import Settings
from bench.table import Row, absolute
from nbkit.planner.stages import partition
from nbkit.rank.parallel.pipeline.layer_chain import find_chain, measure_costs

STAGES = (2, 4)
WIDTH, ROWS, LAYERS = 256, 192, 48
ROUNDS, REPEATS = 3, 12
CASES, BLOCKS = 300, 12
BAR = 1.05


def run(settings: Settings) -> list[Row]:
    """Return one row for each number of stages, and one that compares partitions with every possible partition."""
    draw = random.Random(0)
    insides = [draw.choice((256, 384, 512, 768, 1024)) for _ in range(LAYERS)]
    uneven: dict[int, list[float]] = {stages: [] for stages in STAGES}
    planned: dict[int, float] = {}
    with Ranks("pipeline.balance", 1, folder=settings.folder, width=WIDTH, insides=insides, rows=ROWS) as ranks:
        for _ in range(settings.count(ROUNDS)):
            costs = ranks.ask("costs")[0]
            for stages in STAGES:
                ranges = partition(costs, stages)
                seconds = ranks.ask("stages", ranges=ranges, rounds=REPEATS)[0]
                uneven[stages].append(max(seconds) * stages / sum(seconds))
                planned[stages] = max(sum(costs[a:b]) for a, b in ranges) * stages / sum(costs)
    rows = [
        absolute(
            f"max / mean of measured stage cost, {LAYERS} uneven layers in {stages} stages",
            uneven[stages],
            BAR,
            "x",
            peer=f"by the costs that it was cut by {planned[stages]:.3f} x",
        )
        for stages in STAGES
    ]
    return [*rows, _optimal(40 if settings.quick else CASES)]


def _optimal(cases: int) -> Row:
    draw = random.Random(1)
    best = 0
    for _ in range(cases):
        costs = [draw.choice((draw.random(), 1.0, 3.0)) for _ in range(draw.randint(2, BLOCKS))]
        stages = draw.randint(1, len(costs))
        found = max(sum(costs[start:stop]) for start, stop in partition(costs, stages))
        best += found <= _least(costs, stages) * (1 + 1e-12)
    return Row(
        f"longest stage of a partition, up to {BLOCKS} blocks",
        f"{best}/{cases} as short as can be",
        "every partition there is",
        "",
        "",
        "all",
        best == cases,
    )


def _least(costs: list[float], stages: int) -> float:
    """Try every partition and return the cost of the longest stage in the best one."""
    cuts = combinations(range(1, len(costs)), stages - 1)
    return min(max(sum(costs[a:b]) for a, b in zip((0, *cut), (*cut, len(costs)), strict=True)) for cut in cuts)


class _Layer(nn.Module):
    """A residual MLP whose cost is proportional to its inner width."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inside), nn.Linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Worker:
    """A rank with an uneven model. width: of hidden states. insides: inner width of each layer. rows: of the batch."""

    def __init__(self, *, width: int, insides: list[int], rows: int) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(*(_Layer(width, inside) for inside in insides))
        self._x = torch.randn(rows, width)

    def costs(self) -> list[float]:
        """Return the seconds of each layer, as nbkit measures them before it cuts the model into stages."""

        def call() -> Any:
            return self._model(self._x)

        return list(measure_costs(self._model, find_chain(self._model, call), call))

    def stages(self, ranges: list[tuple[int, int]], rounds: int) -> list[float]:
        """Return the seconds of forward and backward of each stage by itself: the least of `rounds` rounds."""
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
