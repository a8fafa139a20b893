"""A rank that counts the bytes of its live storages at their highest, and computes them. Run by bench.rigs.forked."""

from __future__ import annotations

import gc
from typing import Any

import torch

import nbkit
from bench.plan.models import Model, loss, model
from bench.steps.memory_ranks import _alive, _of, _storages
from nbkit.errors import StrategyError
from nbkit.rank.train.estimate.model_trace import LiveBytes
from nbkit.rank.train.estimate.peak_bytes import PeakBytes

STEPS = 3


class Worker:
    """One job after the other; what was measured of a model serves all its strategies."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Any] = {}

    def peak(self, *, name: str, width: int, rows: int, strategy: str) -> dict[str, Any]:
        """measured, predicted: bytes of this rank at the peak of the third step; rest and held: at its end."""
        before = storages()
        of = model(name, width)
        batch = of.batch(rows)
        try:
            return self._peak(of, batch, before, rows, strategy, (name, width))
        except StrategyError as error:
            return {"refused": f"{error.what} {error.numbers}"}

    def _peak(
        self, of: Model, batch: Any, before: set[int], rows: int, strategy: str, key: tuple[str, int]
    ) -> dict[str, Any]:
        job = nbkit.prepare(
            of.make,
            lambda module: torch.optim.AdamW(module.parameters(), lr=1e-4),
            loss=loss,
            strategy=strategy,
            hints=nbkit.ModelHints(example=tuple(part[:2] for part in batch)),
            log_dir=None,
        )
        counted, held = None, 0
        for made, one in enumerate(job.batches([batch] * STEPS), 1):
            if made == STEPS:
                counted = live_bytes(job, before, batch)
                with counted:
                    job.backward(one)
                    job.optimizer.step()
                held = sum(_storages(_of(job.sharded_model, job.optimizer.inner)).values())
            else:
                job.backward(one)
                job.optimizer.step()
            job.optimizer.zero_grad()
        assert counted is not None
        census = job.cost_model().census
        # What the pieces keep is measured once; how they are cut each job knows itself.
        peaks = self._known[key] = PeakBytes(job.builder, census, real=True, before=self._known.get(key))
        one = peaks.of(job.strategy, rows)[job.sharded_model.axes.index("pp")]
        job.sharded_model.data.close()
        return {
            "measured": counted.peak,
            "predicted": one.total,
            "held": held,
            "rest": census.at_rest(job.strategy)[job.rank].total,
            "moment": one.moment,
        }


def live_bytes(job: Any, before: set[int], batch: Any) -> LiveBytes:
    """Counts, within it, what `job` holds. before: storages that are no part of it."""
    gc.collect()
    kept = [t for t in _of(job.sharded_model, job.optimizer.inner) if isinstance(t, torch.Tensor)]
    kept += list(job.sharded_model.module.buffers())
    kept += [t for t in _alive() if _new(t, before, batch)]
    return LiveBytes(kept, resized=True)


def storages() -> set[int]:
    """Those that there are."""
    gc.collect()
    return set(_storages(_alive()))


def _new(tensor: torch.Tensor, before: set[int], batch: Any) -> bool:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or type(tensor).__name__ == "FakeTensor":
        return False
    at = tensor.untyped_storage().data_ptr()
    return at not in before and all(at != part.untyped_storage().data_ptr() for part in batch)
