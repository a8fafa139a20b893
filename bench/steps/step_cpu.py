"""Measure CPU-seconds of a step under zero1 and pp: nbkit beside torch's own pieces, in alternating pairs.

On CPU ranks, wall seconds depend on what else the machine does; CPU-seconds depend on it less. But where a process has
its memory changes its CPU-seconds by some percent, as long as it lives. So the processes of both are started again
after every `OF_ONE_START` pairs.
"""

from __future__ import annotations

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
    for strategy in STRATEGIES:
        spent: dict[str, list[tuple[float, float]]] = {"nbkit": [], "nbkit again": [], "torch": []}
        for _ in range(settings.count(STARTS)):
            with (
                Ranks("steps.steps", RANKS, folder=settings.folder, with_="nbkit", **size) as ours,
                Ranks("steps.steps", RANKS, folder=settings.folder, with_="torch", **size) as theirs,
            ):
                arms = {"nbkit": ours, "nbkit again": ours, "torch": theirs}
                for ranks in (ours, theirs):
                    ranks.ask("prepare", strategy=strategy, microbatches=MICROBATCHES)
                    ranks.ask("spent", steps=STEPS)
                for order in shuffled(list(arms), settings.count(OF_ONE_START)):
                    for name in order:
                        said = arms[name].ask("spent", steps=STEPS)
                        spent[name].append((sum(cpu for _, cpu in said), max(wall for wall, _ in said)))
        for which, what, bar in ((0, "CPU-seconds of all ranks", BAR), (1, "seconds", None)):
            values, again, peer = ([one[which] for one in spent[name]] for name in ("nbkit", "nbkit again", "torch"))
            what = f"step, {strategy}, {RANKS} ranks, {what}, {len(values)} pairs"
            rows.append(compared(what, values, PIECES[strategy], peer, again, bar, "ms"))
    return rows
