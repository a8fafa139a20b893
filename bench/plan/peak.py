"""Count the bytes that ranks hold at the peak of a step, operation by operation, and compare with the planner."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import nbkit
from bench.plan.models import NAMES, Model, loss, model
from bench.rigs.forked import Ranks
from bench.steps.memory import _alive, _of, _storages
from nbkit.errors import StrategyError
from nbkit.rank.train.estimate.model_trace import LiveBytes
from nbkit.rank.train.estimate.peak_bytes import PeakBytes

RANKS, ROWS = 4, 32
WIDTHS = (64, 128)
STRATEGIES = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "hsdp",
    "tp",
    "pp",
    "pp schedule=gpipe",
    "pp schedule=zbv",
    "dp=2 tp=2",
    "dp=2 pp=2",
    "dp=2 cp=2",
    "tp=2 pp=2",
)
MEAN, WORST, REST = 0.03, 0.08, 0.005
"""Bars for the fullest rank: mean and worst error at the peak, and the error at rest."""


@dataclass(frozen=True)
class Found:
    """The result of one cell. measured, predicted: bytes of the fullest rank. rest: the error at rest. refused: why."""

    cell: str
    measured: int = 0
    predicted: int = 0
    rest: float = 0.0
    moment: str = ""
    refused: str = ""

    @property
    def error(self) -> float:
        """Return the relative error of the prediction."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        if self.refused:
            return f"{self.cell:36} refused: {self.refused}"
        sizes = f"{self.measured / 1e6:8.2f} MB measured {self.predicted / 1e6:8.2f} predicted"
        return f"{self.cell:36} {sizes} {self.error:+7.2%}   at rest {self.rest:+.2%}   {self.moment}"


def run(
    folder: Path, *, names: Sequence[str] = NAMES, widths: Sequence[int] = WIDTHS, only: Sequence[str] = STRATEGIES
) -> list[Found]:
    """Measure every cell, print each as it comes, and return them."""
    found = []
    for name in names:
        for width in widths:
            with Ranks("plan.peak", RANKS, folder=folder) as ranks:
                for strategy in only:
                    cell = f"{name} {width} {strategy}"
                    said = ranks.ask("peak", name=name, width=width, rows=ROWS, strategy=strategy)
                    found.append(_found(cell, said))
                    print(found[-1], flush=True)
    return found


def bars(found: Sequence[Found]) -> tuple[bool, str]:
    """Return whether the bars are met, and a text with the figures."""
    ran = [one for one in found if not one.refused]
    mean, worst = statistics.fmean(abs(one.error) for one in ran), max(abs(one.error) for one in ran)
    rest = max(abs(one.rest) for one in ran)
    text = f"{len(ran)} cells: peak {mean:.2%} off on average (bar {MEAN:.0%}), {worst:.2%} at worst (bar {WORST:.0%})"
    return mean <= MEAN and worst <= WORST and rest <= REST, f"{text}; at rest {rest:.2%} (bar {REST:.1%})"


def _found(cell: str, said: Sequence[dict[str, Any]]) -> Found:
    if "refused" in said[0]:
        return Found(cell, refused=said[0]["refused"])
    full = max(said, key=lambda one: one["measured"])
    rest = max(one["held"] for one in said) / max(one["rest"] for one in said) - 1
    return Found(cell, full["measured"], max(one["predicted"] for one in said), rest, full["moment"])


STEPS = 3


class Worker:
    """A rank that trains one job after another. Measurements of a model are reused for all its strategies."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Any] = {}

    def peak(self, *, name: str, width: int, rows: int, strategy: str) -> dict[str, Any]:
        """Train three steps and return the bytes of this rank.

        measured, predicted: at the peak of the third step. held, rest: measured and predicted, at its end. A strategy
        that is refused gives only `refused`: why.
        """
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
        # The memory that pieces keep is measured once for each model. The cut differs between jobs.
        peaks = self._known[key] = PeakBytes(job.builder, census, real=True, before=self._known.get(key))
        one = peaks.of(job.strategy, rows)[job.sharded_model.axes.index("pp")]
        rest = census.at_rest(job.strategy)[job.rank]
        job.sharded_model.data.close()
        return {
            "measured": counted.peak,
            "predicted": one.total,
            "held": held,
            "rest": rest.total - rest.buffers,
            "moment": one.moment,
        }


def live_bytes(job: Any, before: set[int], batch: Any) -> LiveBytes:
    """Return a context that counts the bytes that `job` holds. before: storages that do not belong to the job."""
    gc.collect()
    kept = [t for t in _of(job.sharded_model, job.optimizer.inner) if isinstance(t, torch.Tensor)]
    kept += list(job.sharded_model.module.buffers())
    kept += [t for t in _alive() if _new(t, before, batch)]
    return LiveBytes(kept, resized=True)


def storages() -> set[int]:
    """Return the addresses of all storages that tensors hold now."""
    gc.collect()
    return set(_storages(_alive()))


def _new(tensor: torch.Tensor, before: set[int], batch: Any) -> bool:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or type(tensor).__name__ == "FakeTensor":
        return False
    at = tensor.untyped_storage().data_ptr()
    return at not in before and all(at != part.untyped_storage().data_ptr() for part in batch)
