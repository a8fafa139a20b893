"""Measure how much of the all-gather of zero1 and zero2 is hidden behind the next forward in `fit`.

Links and blocks sleep.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import nbkit
from bench.overlap.sleeping_block import SleepingBlock, drawn_rows
from bench.rigs.forked import Ranks
from bench.rigs.slept_link import Rate, SleptLink
from bench.settings import Settings
from bench.stats import quantile
from bench.table import Row
from nbkit.rank.parallel.data_parallel import zero1_2

BUCKET_S, BLOCK_S, BLOCKS = 0.005, 0.010, 16
STEPS, BAR = 12, 0.9


def run(settings: Settings) -> list[Row]:
    """Return one row for zero1 and one for zero2.

    The column `again` is the same with a callback, which may read weights between two steps, so that nothing is hidden.
    """
    with Ranks("overlap.hidden_gather", 2, folder=settings.folder, blocks=BLOCKS, seconds=BLOCK_S) as ranks:
        return [_row(ranks, strategy, settings.count(STEPS)) for strategy in ("zero1", "zero2")]


def _row(ranks: Ranks, strategy: str, steps: int) -> Row:
    shown, samples = {}, {}
    for name, late in (("nbkit", True), ("again", False)):
        said = ranks.ask("steps", strategy=strategy, link=BUCKET_S, late=late, steps=steps)
        hidden = [1 - waited / sent for one in said for waited, sent in one["steps"]]
        shown[name], samples[name] = quantile(hidden, 0.5), hidden
    buckets = said[0]["buckets"]
    return Row(
        f"all-gather behind the next forward, {strategy}, {buckets} buckets of {BUCKET_S * 1e3:.0f} ms, "
        f"{BLOCK_S * 1e3:.0f} ms of forward for each",
        f"{shown['nbkit'].middle:.1%} hidden",
        "",
        "",
        f"with a callback {shown['again'].middle:.1%}",
        f"≥ {BAR:.0%}",
        shown["nbkit"].middle >= BAR,
        samples,
    )


_WIDTH = 64
_BUCKET = 4 * _WIDTH * _WIDTH  # bytes: one block
_WARM = 2


class _Watched:
    """The work of a gather. waited: seconds that each wait took, in the order of the waits."""

    waited: ClassVar[list[float]] = []

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, *timeout: Any) -> None:
        began = time.perf_counter()
        self._work.wait(*timeout)
        self.waited.append(time.perf_counter() - began)


class Worker:
    """A rank that trains `blocks` blocks. Each sleeps for `seconds` in a forward."""

    def __init__(self, *, blocks: int, seconds: float) -> None:
        self._link, self._blocks, self._seconds = SleptLink(), blocks, seconds
        self._data = drawn_rows(64, _WIDTH)
        gather = zero1_2.all_gather

        def watched(*args: Any) -> tuple[Tensor, Any]:
            matrix, work = gather(*args)
            return matrix, _Watched(work)

        zero1_2.all_gather = watched

    def steps(self, *, strategy: str, link: float, late: bool, steps: int) -> dict[str, Any]:
        """Train and return the number of buckets and a pair for each step.

        The pair is (seconds that the step waited for gathers, seconds that the link carried them). link: seconds in
        which the link carries a bucket. late: no callback reads weights between two steps.
        """
        trainer = nbkit.Trainer(
            model=lambda: nn.Sequential(*(SleepingBlock(_WIDTH, self._seconds) for _ in range(self._blocks))),
            loss=nn.functional.mse_loss,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
            data=self._data,
            batch_size=4,
            strategy=f"{strategy} bucket={_BUCKET}",
            callbacks=() if late else (lambda trainer, record: None,),
            log_dir=None,
            progress=False,
        )
        trainer.fit(_WARM)
        _Watched.waited.clear()
        ranks = torch.distributed.get_world_size()
        self._link.rate = Rate(0.0, _BUCKET / ranks * (ranks - 1) / link)
        try:
            # One step more, because `fit` waits at its end for the gathers of the last step.
            trainer.fit(steps + 1)
        finally:
            self._link.rate = None
        buckets = len(_Watched.waited) // (steps + 1)
        of_steps = [_Watched.waited[i * buckets : (i + 1) * buckets] for i in range(steps)]
        return {"buckets": buckets, "steps": [(sum(waited), buckets * link) for waited in of_steps]}
