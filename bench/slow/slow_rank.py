"""Measure how well `nbkit.Recovery(balance=True)` divides the work when a rank falls to half its speed.

The peer is the best possible division. Blocks sleep instead of computing, so that load of the machine affects both
alike. To find the best division, a simulation of the step tries every number of rows for each replica and of blocks for
each stage. The best three are then trained with `speeds=` from the first step and the same slow rank. The quickest of
them counts.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import nbkit
from bench.pipeline.sleeping_rank import until
from bench.rigs.forked import Ranks
from bench.settings import Settings
from bench.stats import quantile
from bench.table import Row
from nbkit.mesh import Mesh
from nbkit.schedules import Schedule, simulate

BAR, TRIED = 0.95, 3
SLOW, PACE = 1, 2
"""The slow rank, and how many times as long it takes."""
SLOW_FROM, STEPS, LAST = 4, 18, 6
"""The rank is slow after step SLOW_FROM. The shortest of the last LAST steps counts, as load only adds to sleeps."""


@dataclass(frozen=True)
class Case:
    """A mesh and its work. unit: seconds that a block sleeps in the forward of a row; backward sleeps twice as long."""

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
    """Return one row for each case."""
    return [_measured(case, settings) for case in CASES]


def best(case: Case) -> list[str]:
    """Return the strategies with the best whole numbers of rows and blocks, the quickest first."""
    mesh = Mesh(pp=case.pp, dp=case.dp)
    found = []
    for rows, blocks in product(_parts(case.rows, case.dp), _parts(case.blocks, case.pp)):
        speeds = [rows[at["dp"]] * blocks[at["pp"]] for at in map(mesh.index, range(mesh.size))]
        # nbkit itself turns these speeds into whole numbers: rows along dp, blocks along pp.
        words = f" speeds={':'.join(map(str, speeds))}" if len(set(speeds)) > 1 else ""
        found.append((slept(case, rows, blocks), case.strategy + words))
    return [strategy for _, strategy in sorted(found)[:TRIED]]


def slept(case: Case, rows: tuple[int, ...], blocks: tuple[int, ...]) -> float:
    """Return the seconds of a step with these rows of each replica and blocks of each stage."""
    mesh = Mesh(pp=case.pp, dp=case.dp)
    longest = 0.0
    for replica, own in enumerate(rows):
        ranks = mesh.ranks("pp", mesh.ranks("dp", 0)[replica])
        unit = [held * case.unit * (PACE if rank == SLOW else 1) for held, rank in zip(blocks, ranks, strict=True)]
        if case.pp == 1:
            longest = max(longest, 3 * own * unit[0])
            continue
        # Micro-batches differ by at most one row. On average, a step takes as long as with equal ones.
        each = [own / _MICROS * seconds for seconds in unit]
        timeline = simulate(
            Schedule.of("1f1b", case.pp, _MICROS), forward=each, backward_input=each, backward_weight=each
        )
        longest = max(longest, timeline.makespan)
    return longest


def _parts(total: int, num: int) -> list[tuple[int, ...]]:
    """Return every way to divide `total` into `num` whole numbers above zero."""
    if num == 1:
        return [(total,)]
    return [(first, *rest) for first in range(1, total - num + 2) for rest in _parts(total - first, num - 1)]


def _measured(case: Case, settings: Settings) -> Row:
    ours, theirs, named, apart, to = [], [], [], 0.0, ""
    setup = {"rows": case.rows, "blocks": case.blocks, "unit": case.unit, "slow": SLOW, "pace": PACE}
    with Ranks("slow.slow_rank", case.dp * case.pp, folder=settings.folder, **setup) as ranks:
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


class _Lasting:
    """A sleep. exact: if one call sleeps too long, the next is shorter, so that the sum is exact."""

    late, exact = 0.0, False

    def __call__(self, seconds: float) -> None:
        due = time.perf_counter() + seconds - self.late
        until(due)
        self.late = min(time.perf_counter() - due, seconds) if self.exact else 0.0


_last = _Lasting()


class _Sleep(torch.autograd.Function):
    """An identity that sleeps `seconds` in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        _last(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _last(2 * ctx.seconds)
        return grad, None


class Worker:
    """A rank. rows: of a global batch. unit: seconds of a block for a row; `pace` times as many on the rank `slow`."""

    def __init__(self, *, rows: int, blocks: int, unit: float, slow: int, pace: int) -> None:
        self._rows, self._blocks, self._unit, self._slow, self._pace = rows, blocks, unit, slow, pace
        self._now = unit

    def train(self, *, strategy: str, steps: int, slow_from: int, balance: bool = False) -> dict[str, Any]:
        """Train and return seconds, losses and strategies of the steps. Rank `slow` is slow after step `slow_from`."""
        worker = self

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4))

            def forward(self, x: Tensor) -> Tensor:
                return _Sleep.apply(x * self.weight, len(x) * worker._now)  # type: ignore[no-any-return, no-untyped-call]

        def paced(trainer: Any, step: int) -> None:
            late = trainer.job.rank == self._slow and step >= slow_from
            self._now = self._unit * (self._pace if late else 1)

        draw = torch.Generator().manual_seed(0)
        data = [(torch.randn(4, generator=draw), torch.randn(4, generator=draw)) for _ in range(self._rows)]
        self._now = self._unit  # because a new Trainer measures its blocks, which must take the same time
        trainer = nbkit.Trainer(
            model=lambda: nn.Sequential(*(Block() for _ in range(self._blocks))),
            loss=nn.functional.mse_loss,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
            data=data,
            batch_size=self._rows,
            strategy=strategy,
            recovery=nbkit.Recovery(balance=balance),
            callbacks=[lambda trainer, record: paced(trainer, record["step"])],
            log_dir="runs",  # balance= measures from these records
            progress=False,
        )
        paced(trainer, 0)
        _last.exact = True
        trainer.fit(steps)
        _last.exact = False
        keys = {"seconds": "seconds", "losses": "loss", "strategies": "strategy"}
        found = {name: [record[key] for record in trainer.history] for name, key in keys.items()}
        trainer.job.sharded_model.close()
        del trainer
        gc.collect()
        return found
