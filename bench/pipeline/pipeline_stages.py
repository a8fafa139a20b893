"""Compare pipeline steps with the ideal time. Stages sleep instead of computing; the executor is that of a training.

The ideal is what `simulate` computes for the same list of operations. A stage's forward, the gradient of its input
and the gradient of its weights take one unit each; nothing else takes time. Sleeping ranks need no cores, so a
pipeline of eight ranks can be timed on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.settings import Settings
from bench.stats import quantile
from bench.table import Row, absolute
from nbkit.schedules import BUILT_IN as NAMES
from nbkit.schedules import Schedule, simulate

RANKS = (2, 4, 8)
MICROBATCHES = (4, 8, 16)
ROUNDS = 3
UNIT, IDLE_UNIT = 0.05, 0.2
"""Seconds. Idle time is a small difference. With short stages, the executor's cost of each operation would hide it."""
BAR, BAR_ZERO_BUBBLE, BAR_ZBV = 1.05, 0.4, 0.05

Case = tuple[str, int, int, float]
"""Schedule, ranks, micro-batches, seconds of a unit."""


def run(settings: Settings) -> list[Row]:
    """Return one row for each schedule and number of ranks, and up to four about idle time.

    Each row shows the number of micro-batches with the worst figure.
    """
    sizes, rounds = settings.sizes(RANKS), settings.count(ROUNDS)
    timed: dict[Case, list[tuple[float, float]]] = {}
    for ranks in sizes:
        timed |= _measured(ranks, [(name, m, UNIT) for name in NAMES for m in MICROBATCHES], rounds)
        idle = [(name, m, IDLE_UNIT) for name in ("interleaved", "zb", "zbv") for m in MICROBATCHES if m >= ranks]
        timed |= _measured(ranks, idle, settings.rounds or 1)
    rows = []
    for name in NAMES:
        for ranks in sizes:
            ratios = {m: [s / _ideal(name, ranks, m) for s, _ in timed[name, ranks, m, UNIT]] for m in MICROBATCHES}
            compared = "stages that sleep / ideal time of the schedule, worst number of micro-batches"
            what = f"pipeline step, {name}, {ranks} ranks, {compared}"
            beside = max(quantile(some).middle - 1 for some in ratios.values()) * UNIT
            rows.append(_worst(what, ratios, BAR, note=f"; {beside * 1e3:.2g} ms beside an operation"))

    def planned(name: str, ranks: int, m: int) -> list[float]:
        return [simulate(Schedule.of(name, ranks, m)).bubble]

    def seen(name: str, ranks: int, m: int) -> list[float]:
        return [idle for _, idle in timed[name, ranks, m, IDLE_UNIT]]

    return rows + _idle("planned", planned, sizes) + _idle("measured", seen, sizes)


def _idle(kind: str, share: Callable[[str, int, int], list[float]], sizes: Sequence[int]) -> list[Row]:
    """Return rows: idle time of zb divided by that of interleaved, and the idle share of a zbv step.

    share: maps (name, ranks, m) to idle shares.
    """
    pairs = [(p, m) for p in sizes for m in MICROBATCHES if m >= p]
    ratios = {}
    for p, m in pairs:
        zb, interleaved = (
            [one * simulate(Schedule.of(name, p, m)).makespan for one in share(name, p, m)]
            for name in ("zb", "interleaved")
        )
        ratios[f"{p}x{m}"] = [a / b for a, b in zip(zb, interleaved, strict=True)]
    rows = [_worst(f"idle time of zb / of interleaved, {kind}, worst ranks x micro-batches", ratios, BAR_ZERO_BUBBLE)]
    named = {f"{p}x{m}": share("zbv", p, m) for p, m in pairs if p == 2 or (p, m) == (4, 16)}
    if named:
        rows.append(_worst(f"idle share of a zbv step, {kind}, worst ranks x micro-batches", named, BAR_ZBV))
    return rows


def _worst(what: str, values: dict[int, list[float]] | dict[str, list[float]], bar: float, *, note: str = "") -> Row:
    middles = {str(at): quantile(some).middle for at, some in values.items()}
    worst = max(middles, key=lambda at: middles[at])
    every = ", ".join(f"{at}: {middle:.3f}" for at, middle in middles.items())
    return absolute(what, {str(at): some for at, some in values.items()}[worst], bar, "x", peer=every + note)


def _ideal(name: str, ranks: int, microbatches: int) -> float:
    return simulate(Schedule.of(name, ranks, microbatches)).makespan * UNIT


def _measured(
    ranks: int, cases: Sequence[tuple[str, int, float]], rounds: int
) -> dict[Case, list[tuple[float, float]]]:
    """Run the cases and return (seconds, idle share) of each step.

    A step lasts from the moment at which all ranks are ready until the last rank ends.
    """
    worker = Path(__file__).with_name("sleeping_rank.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(worker)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(worker.parents[1])}
    order = json.dumps({"cases": cases, "rounds": rounds})
    done = subprocess.run([*command, order], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {
        (name, ranks, m, unit): [(seconds, idle) for seconds, idle in steps]
        for name, m, unit, steps in json.loads(done.stdout.splitlines()[-1])
    }
