"""A rank that trains a GPT whose blocks sleep, under one strategy after the other. Run by bench.rigs.forked."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

import nbkit
from bench.pipeline.sleeping_rank import last
from bench.rigs.jobs import config, data, token_loss
from bench.rigs.slept_link import Rate, SleptLink
from nbkit.errors import NbkitError
from nbkit.rank.comm import link_probe
from nbkit.rank.data.batch_size import Arithmetic
from nbkit.rank.models.gpt import GPT, Block
from nbkit.rank.train.estimate.first_seconds import seconds_before_a_step
from nbkit.strategy import Strategy

STEPS = 4


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
            lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
            loss=token_loss,
            strategy="ddp",
            example=tuple(part[:2] for part in self._rows),
            log_dir=None,
        )
        # While its blocks sleep: what they cost is measured here.
        self._job.builder.learn(Strategy.every(4, schedules=("1f1b",)))
        _Sleeping.seconds = 0.0
        self._rate: Rate | None = None

    def link(self, *, latency: float, speed: float) -> None:
        """From now on; it is measured."""
        self._rate = self._link.rate = Rate(latency, speed)
        link_probe.know(None)
        self._job.builder.link = link_probe.link_of(self._job.device)
        self._link.rate = None

    def tried(self, *, strategy: str) -> dict[str, Any]:
        """measured: seconds of a step; predicted: before any was made."""
        job, asked = self._job, Strategy.parse(strategy, 4)
        try:
            model = job.cost_model()
            model.fits = lambda one: Arithmetic.of(self._batch, one, microbatch_size=None)
            predicted = seconds_before_a_step(model, job.builder, asked, self._batch)
            job.switch(strategy)
        except NbkitError as error:
            return {"refused": str(error).splitlines()[0]}
        took = []
        for one in job.batches([self._rows] * (1 + STEPS)):
            # The first step makes what later ones reuse; the ranks begin each of the others together.
            if took:
                torch.distributed.barrier()
            self._link.rate, _Sleeping.seconds = (self._rate, self._seconds / asked.tp) if took else (None, 0.0)
            began = time.perf_counter()
            job.backward(one)
            with job.late_weights():  # as `fit` does
                job.optimizer.step()
            job.optimizer.zero_grad()
            took.append(time.perf_counter() - began)
            self._link.rate, _Sleeping.seconds = None, 0.0
        # Load only adds to what is slept.
        return {"measured": min(took[1:]), "predicted": predicted}
