"""A rank that falls to half its speed under `nbkit.Recovery(balance=True)`, beside the best division that there is.

Blocks sleep instead of computing: load of the machine touches both alike. The best division is found by trying every
number of rows for each replica and of blocks for each stage, in a simulation of the step; the first three train beside,
given by `speeds=` from the first step, with the same rank slow, and the quickest counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from bench.rigs.forked import Ranks
from bench.settings import Settings
from bench.stats import quantile
from bench.table import Row
from nbkit.mesh import Mesh
from nbkit.schedules import Schedule, simulate

BAR, TRIED = 0.95, 3
SLOW, PACE = 1, 2
"""The rank that is slow, and how many times as long it takes."""
SLOW_FROM, STEPS, LAST = 4, 18, 6
"""It is slow in the steps after SLOW_FROM; of the last LAST the shortest counts, since load only adds to a sleep."""


@dataclass(frozen=True)
class Case:
    """unit: seconds that a block sleeps for a row, forward; twice as long backward."""

    dp: int
    pp: int
    rows: int
    blocks: int
    unit: float

    @property
    def strategy(self) -> str:
        return f"dp={self.dp}" + (f" pp={self.pp} schedule=1f1b microbatches={_MICROS}" if self.pp > 1 else "")


_MICROS = 4
CASES = (Case(2, 1, 12, 6, 0.008), Case(1, 2, 12, 12, 0.005), Case(2, 2, 24, 12, 0.005))


def run(settings: Settings) -> list[Row]:
    """A row for each case."""
    return [_measured(case, settings) for case in CASES]


def best(case: Case) -> list[str]:
    """The strategies with the best whole numbers of rows and blocks, the quickest first."""
    mesh = Mesh(pp=case.pp, dp=case.dp)
    found = []
    for rows, blocks in product(_parts(case.rows, case.dp), _parts(case.blocks, case.pp)):
        speeds = [rows[at["dp"]] * blocks[at["pp"]] for at in map(mesh.index, range(mesh.size))]
        # Which whole numbers come of these speeds is nbkit's own arithmetic: of dp the rows, of pp the blocks.
        words = f" speeds={':'.join(map(str, speeds))}" if len(set(speeds)) > 1 else ""
        found.append((slept(case, rows, blocks), case.strategy + words))
    return [strategy for _, strategy in sorted(found)[:TRIED]]


def slept(case: Case, rows: tuple[int, ...], blocks: tuple[int, ...]) -> float:
    """Seconds of a step of these rows of each replica and blocks of each stage."""
    mesh = Mesh(pp=case.pp, dp=case.dp)
    longest = 0.0
    for replica, own in enumerate(rows):
        ranks = mesh.ranks("pp", mesh.ranks("dp", 0)[replica])
        unit = [held * case.unit * (PACE if rank == SLOW else 1) for held, rank in zip(blocks, ranks, strict=True)]
        if case.pp == 1:
            longest = max(longest, 3 * own * unit[0])
            continue
        # Micro-batches differ by a row at most: in the mean, a step is as long as with equal ones.
        each = [own / _MICROS * seconds for seconds in unit]
        timeline = simulate(
            Schedule.of("1f1b", case.pp, _MICROS), forward=each, backward_input=each, backward_weight=each
        )
        longest = max(longest, timeline.makespan)
    return longest


def _parts(total: int, num: int) -> list[tuple[int, ...]]:
    """Every way to divide `total` into `num` whole numbers above zero."""
    if num == 1:
        return [(total,)]
    return [(first, *rest) for first in range(1, total - num + 2) for rest in _parts(total - first, num - 1)]


def _measured(case: Case, settings: Settings) -> Row:
    ours, theirs, named, apart, to = [], [], [], 0.0, ""
    setup = {"rows": case.rows, "blocks": case.blocks, "unit": case.unit, "slow": SLOW, "pace": PACE}
    with Ranks("slow.slow_rank_ranks", case.dp * case.pp, folder=settings.folder, **setup) as ranks:
        plain = ranks.ask("train", strategy=case.strategy, steps=STEPS, slow_from=0)[0]
        for _ in range(settings.count(3)):
            balanced = ranks.ask("train", strategy=case.strategy, steps=STEPS, slow_from=SLOW_FROM, balance=True)[0]
            given = {
                strategy: min(ranks.ask("train", strategy=strategy, steps=LAST + 2, slow_from=0)[0]["seconds"][-LAST:])
                for strategy in best(case)
            }
            ours.append(min(balanced["seconds"][-LAST:]))
            theirs.append(min(given.values()))
            changed = [n for n, one in enumerate(balanced["strategies"]) if one != balanced["strategies"][SLOW_FROM]]
            named.append(min(changed, default=STEPS) - SLOW_FROM)
            to = balanced["strategies"][-1].rpartition("speeds=")[2]
            losses = zip(balanced["losses"], plain["losses"], strict=True)
            apart = max(apart, *(abs(a / b - 1) for a, b in losses))
    share = quantile([best_ / own for best_, own in zip(theirs, ours, strict=True)])
    return Row(
        f"rank {SLOW} at half speed, {case.strategy}, nbkit.Recovery(balance=True)",
        f"{1e3 * quantile(ours).middle:.0f} ms a step, {1e3 * min(plain['seconds'][-LAST:]):.0f} without; "
        f"divided anew after {max(named)} slow steps at most, to {to}; losses apart by {apart:.0e}",
        f"{min(given, key=given.__getitem__)}: {1e3 * quantile(theirs).middle:.0f} ms",
        f"{share.middle:.3f} [{share.low:.3f}, {share.high:.3f}] of its throughput",
        "",
        f"≥ {BAR:g} of the throughput",
        share.middle >= BAR and apart < 1e-5,
        {"nbkit": ours, "best": theirs},
    )
