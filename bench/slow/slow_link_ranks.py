"""A rank that trains a GPT on text under a strategy, and says what it cost. Run by bench.rigs.forked."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.rigs.jobs import config, trainer
from bench.steps.wire_ranks import trained
from nbkit.rank.models.text import TextDataset
from nbkit.rank.telemetry import collectives
from nbkit.rank.train.trainer import Trainer

PERIOD = 8
"""Steps that are measured together: of sync_every=8, one average is among them."""


class Worker:
    """Nothing is kept from one strategy to the next."""

    def __init__(self, *, width: int, layers: int, block: int, batch: int) -> None:
        collectives.set_mode("count")
        warnings.simplefilter("ignore")  # of what is not equal to one process: that is what is measured
        self._config, self._batch = config(width, layers, block=block), batch
        self._data = TextDataset(block=block, limit=2_000_000)
        self._heldout = TextDataset(block=block, limit=2_000_000, split="heldout")

    @contextmanager
    def _trainer(self, strategy: str, *, seed: int = 0) -> Iterator[Trainer]:
        made = trainer(self._config, strategy, batch=self._batch, data=self._data, seed=seed)
        yield made
        made.job.sharded_model.data.close()
        del made
        gc.collect()

    def loss(self, *, strategy: str, steps: int, seed: int = 0) -> float:
        """Of held-out text after `steps` steps. seed: of the weights and of the order of the rows."""
        with self._trainer(strategy, seed=seed) as made:
            made.fit(steps)
            return made.evaluate([self._heldout[i] for i in range(0, len(self._heldout), 8)], batch_size=64)

    def wire(self, *, strategy: str) -> tuple[float, float]:
        """(bytes of a step of all ranks on the wire, those that telemetry noted of this one)."""
        with self._trainer(strategy) as made:
            made.fit(PERIOD)
            one, three = trained(made, PERIOD), trained(made, 3 * PERIOD)
        both: list[Any] = [(sum(run["recorded"].values()), run["wire"]) for run in (one, three)]
        recorded, wire = ((more - fewer) / (2 * PERIOD) for fewer, more in zip(*both, strict=True))
        return wire, recorded

    def seconds(self, *, strategy: str) -> float:
        """Of a step."""
        with self._trainer(strategy) as made:
            made.fit(1)
            began = time.perf_counter()
            made.fit(PERIOD)
            return (time.perf_counter() - began) / PERIOD
