"""CPU-seconds of a step under zero1 and pp, nbkit's beside torch's own pieces, in pairs that alternate.

On CPU ranks what a step takes by the clock depends on what else the machine does; what it computes does so less. But
where its memory lies decides over some percent, for as long as a process lives: the processes of both are started anew
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
    """Two rows for each strategy: CPU-seconds of all ranks, and seconds by the clock, which are shown."""
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
