"""A rank that trains a GPT whose blocks sleep, under one strategy after the other. Run by bench.rigs.forked."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import nbkit
from bench.pipeline.sleeping_rank import last
from bench.plan.peak_ranks import live_bytes, storages
from bench.rigs.jobs import config, data, token_loss
from bench.rigs.slept_link import Rate, SleptLink
from nbkit.errors import NbkitError
from nbkit.planner.link_speed import ranks_of_node
from nbkit.rank.comm import link_probe
from nbkit.rank.data.batch import BatchSplit
from nbkit.rank.models.gpt import GPT, Block
from nbkit.rank.train.estimate.cost_model import CostModel
from nbkit.rank.train.estimate.peak_bytes import PeakBytes, largest
from nbkit.rank.train.estimate.time_model import seconds_before_a_step
from nbkit.strategy import Strategy

WARM, STEPS = 3, 4


class _Nap(torch.autograd.Function):
    """Sleeps for its rows, forward and twice as long backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds * x.shape[0]
        last(ctx.seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        last(2 * ctx.seconds)
        return grad, None


class _Sleeping(Block):
    """A block that takes `seconds` more for each row."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Nap.apply(x, self.seconds))  # type: ignore[no-untyped-call]


class Worker:
    """One job, which is switched from strategy to strategy."""

    def __init__(self, *, width: int, layers: int, batch: int, seconds: float) -> None:
        self._link, self._seconds, self._batch = SleptLink(), seconds, batch
        self._before = storages()
        of = config(width, layers, block=4)
        rows = data(of, batch)
        self._rows = tuple(torch.stack(part) for part in zip(*rows, strict=True))

        def make() -> nn.Module:
            model = GPT(of)
            for block in model.blocks:
                block.__class__ = _Sleeping
            return model

        _Sleeping.seconds = seconds
        self._job = nbkit.prepare(
            make,
            lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            loss=token_loss,
            strategy="ddp",
            hints=nbkit.ModelHints(example=tuple(part[:2] for part in self._rows)),
            log_dir=None,
        )
        # While its blocks sleep: what they cost is measured here.
        self._job.builder.finder.sync(Strategy.every(4, schedules=("1f1b",)))
        _Sleeping.seconds = 0.0
        self._rate: Rate | None = None
        self._peaks: PeakBytes | None = None

    def link(self, *, latency: float, speed: float) -> None:
        """From now on; it is measured. speed: inf where the link has one without that."""
        self._rate = self._link.rate = Rate(latency, speed)
        link_probe.know(None)
        builder = self._job.builder
        builder.link = link_probe.link_of(self._job.device)
        self._link.rate = None
        # As before a first step: no state of the optimizer is there to be counted.
        self._model = CostModel(builder, builder.template.kinds(builder.skeleton), self._fits)
        self._peaks = PeakBytes(builder, self._model.census, real=True, before=self._peaks)

    def _fits(self, strategy: Strategy) -> BatchSplit:
        return BatchSplit.of(self._batch, strategy, microbatch_size=None)

    def made(self, *, strategy: str) -> dict[str, Any]:
        """peak: bytes of this rank. predicted: seconds of a step and those of the fullest, before any was made."""
        job, link = self._job, self._job.builder.link
        assert self._peaks is not None and link is not None
        of = Strategy.parse(strategy, 4, node=ranks_of_node(link.node_of))
        try:
            asked = self._model.placed(of, now=job.strategy)
            predicted = seconds_before_a_step(self._model, job.builder, asked, self._batch)
            largest_peak = largest(self._peaks.of(asked, self._batch)) if job.rank == 0 else None
            job.switch(str(asked))
        except NbkitError as error:
            return {"refused": str(error).splitlines()[0]}
        counted = None
        for made, one in enumerate(job.batches([self._rows] * WARM), 1):
            # The first step makes what later ones reuse, the second lets go of the strategy before, the third is
            # counted.
            if made == WARM:
                counted = live_bytes(job, self._before, self._rows)
            with counted or nullcontext():
                self._step(one)
        assert counted is not None
        return {
            "peak": counted.peak,
            "predicted": (predicted, largest_peak.total if largest_peak is not None else None),
        }

    def timed(self) -> float:
        """Seconds of a step."""
        took = []
        for one in self._job.batches([self._rows] * STEPS):
            torch.distributed.barrier()  # they begin together on all ranks
            self._link.rate, _Sleeping.seconds = self._rate, self._seconds / self._job.strategy.tp
            began = time.perf_counter()
            self._step(one)
            took.append(time.perf_counter() - began)
            self._link.rate, _Sleeping.seconds = None, 0.0
        # Load only adds to what is slept. What the first gathers late was sent without a rate.
        return min(took[1:])

    def _step(self, batch: Any) -> None:
        self._job.backward(batch)
        with self._job.late_weights():  # as `fit` does
            self._job.optimizer.step()
        self._job.optimizer.zero_grad()
