"""Measure CPU-seconds of a step under zero1 and pp: nbkit and torch's own pieces, in alternating pairs.

On CPU ranks, wall seconds depend on other load of the machine; CPU-seconds depend on it less. But the placement of a
process's memory changes its CPU-seconds by some percent, for its whole life. So the processes of both are started again
after every `OF_ONE_START` pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.rigs.forked import Ranks
from bench.settings import Settings, shuffled
from bench.steps.steps import BAR, MICROBATCHES, PIECES, QUICK, SIZE
from bench.table import Row, compared

STRATEGIES, RANKS = ("zero1", "pp"), 2
STARTS, OF_ONE_START, STEPS = 5, 20, 6


def run(settings: Settings) -> list[Row]:
    """Return two rows for each strategy: CPU-seconds of all ranks with a bar, and wall seconds without one."""
    size = QUICK if settings.quick else SIZE
    rows = []
    for name in STRATEGIES:
        what = f"step, {name}, {RANKS} ranks"
        counts = settings.count(STARTS), settings.count(OF_ONE_START), STEPS
        rows += pairs(what, {"nbkit": name, "torch": name}, PIECES[name], settings.folder, RANKS, counts, BAR, **size)
    return rows


def pairs(
    what: str,
    strategies: Mapping[str, str],
    peer: str,
    folder: Path,
    num: int,
    counts: tuple[int, int, int],
    cpu_bar: float,
    wall_bar: float | None = None,
    **size: Any,
) -> list[Row]:
    """Return a row of CPU-seconds of all ranks, and one of wall seconds, of alternating pairs.

    strategies: "nbkit" and "torch" -> its strategy. peer: the name of torch's pieces. counts: starts of the
    processes, pairs of one start, steps of a block. size: arguments of the Worker of `steps`.
    """
    starts, of_one_start, steps = counts
    spent: dict[str, list[tuple[float, float]]] = {"nbkit": [], "nbkit again": [], "torch": []}
    for _ in range(starts):
        with (
            Ranks("steps.steps", num, folder=folder, with_="nbkit", **size) as ours,
            Ranks("steps.steps", num, folder=folder, with_="torch", **size) as theirs,
        ):
            arms = {"nbkit": ours, "nbkit again": ours, "torch": theirs}
            for name, strategy in strategies.items():
                arms[name].ask("prepare", strategy=strategy, microbatches=MICROBATCHES)
                arms[name].ask("spent", steps=steps)
            for order in shuffled(list(arms), of_one_start):
                for name in order:
                    said = arms[name].ask("spent", steps=steps)
                    spent[name].append((sum(cpu for _, cpu in said), max(wall for wall, _ in said)))
    rows = []
    for which, kind, bar in ((0, "CPU-seconds of all ranks", cpu_bar), (1, "seconds", wall_bar)):
        values, again, beside = ([one[which] for one in spent[name]] for name in ("nbkit", "nbkit again", "torch"))
        rows.append(compared(f"{what}, {kind}, {len(values)} pairs", values, peer, beside, again, bar, "ms"))
    return rows
