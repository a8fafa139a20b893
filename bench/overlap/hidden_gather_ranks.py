"""A rank that trains blocks that sleep in their forward, over a link that sleeps. Run by bench.rigs.forked."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import nbkit
from bench.overlap.sleeping_block import SleepingBlock, drawn_rows
from bench.rigs.slept_link import Rate, SleptLink
from nbkit.rank.parallel.data_parallel import zero1_2

_WIDTH = 64
_BUCKET = 4 * _WIDTH * _WIDTH  # bytes: one block
_WARM = 2


class _Watched:
    """The work of a gather. waited: seconds of each, in the order in which they are waited for."""

    waited: ClassVar[list[float]] = []

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, *timeout: Any) -> None:
        began = time.perf_counter()
        self._work.wait(*timeout)
        self.waited.append(time.perf_counter() - began)


class Worker:
    """blocks: that sleep `seconds` each in a forward."""

    def __init__(self, *, blocks: int, seconds: float) -> None:
        self._link, self._blocks, self._seconds = SleptLink(), blocks, seconds
        self._data = drawn_rows(64, _WIDTH)
        gather = zero1_2.all_gather

        def watched(*args: Any) -> tuple[Tensor, Any]:
            matrix, work = gather(*args)
            return matrix, _Watched(work)

        zero1_2.all_gather = watched

    def steps(self, *, strategy: str, link: float, late: bool, steps: int) -> dict[str, Any]:
        """By step: seconds that it waited for gathers, and that the link carried them. link: seconds of a bucket.

        late: nobody holds weights between two steps.
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
            # The last one's gathers are waited for at the end of `fit`.
            trainer.fit(steps + 1)
        finally:
            self._link.rate = None
        buckets = len(_Watched.waited) // (steps + 1)
        of_steps = [_Watched.waited[i * buckets : (i + 1) * buckets] for i in range(steps)]
        return {"buckets": buckets, "steps": [(sum(waited), buckets * link) for waited in of_steps]}
