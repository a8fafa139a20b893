"""Stages of an uneven model: how even they are when they run, and whether any other partition would be better."""

from __future__ import annotations

import random
from itertools import combinations

from bench.rigs.forked import Ranks
from bench.settings import Settings
from bench.table import Row, absolute
from nbkit.planner.stages import partition

STAGES = (2, 4)
WIDTH, ROWS, LAYERS = 256, 192, 48
ROUNDS, REPEATS = 3, 12
CASES, BLOCKS = 300, 12
BAR = 1.05


def run(settings: Settings) -> list[Row]:
    """A row for each number of stages, and one of partitions against all that there are."""
    draw = random.Random(0)
    insides = [draw.choice((256, 384, 512, 768, 1024)) for _ in range(LAYERS)]
    uneven: dict[int, list[float]] = {stages: [] for stages in STAGES}
    planned: dict[int, float] = {}
    with Ranks("pipeline.balance_ranks", 1, folder=settings.folder, width=WIDTH, insides=insides, rows=ROWS) as ranks:
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
    """The longest stage of the best of all partitions, tried one by one."""
    cuts = combinations(range(1, len(costs)), stages - 1)
    return min(max(sum(costs[a:b]) for a, b in zip((0, *cut), (*cut, len(costs)), strict=True)) for cut in cuts)
