"""Measure what `nbkit.listen()` costs a step of a program that uses torch's own pieces.

Both programs exist at the same time, each with its own ranks. One waits for orders while the other trains. They are the
same, except for `nbkit.listen()` in the line before `init_process_group`, which `nbkit run` adds too. The placement of
a process's memory changes its seconds by some percent, for its whole life. So the processes of both are started again
after every `OF_ONE_START` pairs, and the two programs take turns to start first.

The cost is that of a step and its calls, and does not grow with what a step computes. A small model of as many layers
makes the same calls, and its steps are so short that other programs hardly disturb them. So the cost is measured there
too, in CPU-seconds: of all blocks of a start, the fastest count.
"""

from __future__ import annotations

import os
from typing import Any

import nbkit
from bench.rigs.forked import Ranks
from bench.settings import Settings, shuffled
from bench.steps import steps
from bench.table import Row, absolute, compared
from nbkit.records.records import LISTEN_EVERY

STRATEGIES, RANKS = ("ddp", "zero3"), 2
STARTS, OF_ONE_START, STEPS = 10, 10, 2 * LISTEN_EVERY
SMALL = steps.SIZE | {"width": 32, "block": 16}
BAR, COST_S = 1.01, 1e-3  # of a step of 100 ms

Spent = list[tuple[float, float]]  # (seconds, CPU-seconds of all ranks) of a step, block by block


def run(settings: Settings) -> list[Row]:
    """Return three rows for each strategy: seconds of a step, CPU-seconds of all ranks, and the cost in ms."""
    rows = []
    for strategy in STRATEGIES:
        starts = _starts(settings, strategy, steps.QUICK if settings.quick else steps.SIZE)
        what = f"step, {steps.PIECES[strategy]}, {RANKS} ranks, listening"
        for which, name in enumerate(("seconds", "CPU-seconds of all ranks")):
            values, again, plain = ([one[which] for of in starts for one in of[arm]] for arm in starts[0])
            rows.append(
                compared(f"{what} / plain, {name}, {len(values)} pairs", values, "plain", plain, again, BAR, "ms")
            )
        small = _starts(settings, strategy, SMALL)
        least = [[min(cpu for _, cpu in of[arm]) / RANKS for arm in ("listens", "plain")] for of in small]
        more = [ours - plain for ours, plain in least]
        peer = f"plain, a small model {1e3 * min(plain for _, plain in least):.3g} ms"
        rows.append(absolute(f"{what}: CPU of a rank beyond plain", more, COST_S, "ms", peer=peer))
    return rows


def _starts(settings: Settings, strategy: str, size: dict[str, int]) -> list[dict[str, Spent]]:
    """Return, for each start of the processes, the times of each arm's blocks."""
    found = []
    for number in range(settings.count(STARTS)):
        first = number % 2 == 0
        with (
            Ranks("telemetry.listening", RANKS, folder=settings.folder, listens=first, **size) as one,
            Ranks("telemetry.listening", RANKS, folder=settings.folder, listens=not first, **size) as other,
        ):
            ours, theirs = (one, other) if first else (other, one)
            arms = {"listens": ours, "listens again": ours, "plain": theirs}
            spent: dict[str, Spent] = {name: [] for name in arms}
            for ranks in (ours, theirs):
                ranks.ask("prepare", strategy=strategy, microbatches=1)
                ranks.ask("spent", steps=STEPS)
            for order in shuffled(list(arms), settings.count(OF_ONE_START)):
                for name in order:
                    said = arms[name].ask("spent", steps=STEPS)
                    spent[name].append((max(wall for wall, _ in said), sum(cpu for _, cpu in said)))
            found.append(spent)
    return found


class Worker(steps.Worker):
    """A rank of a program that uses torch's own pieces."""

    def __init__(self, *, listens: bool, **size: Any) -> None:
        if listens:
            os.environ["NBKIT_HOME"] = os.path.join(os.getcwd(), "home")
            nbkit.listen("bench")
        super().__init__(with_="torch", **size)
