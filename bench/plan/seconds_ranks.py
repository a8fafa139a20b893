"""A rank that trains a GPT whose blocks sleep, under one strategy after the other. Run by bench.rigs.forked."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import nbkit
from bench.rigs.jobs import config, data, token_loss
from nbkit.errors import NbkitError
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
        time.sleep(ctx.seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return grad, None


class _Sleeping(Block):
    """A block that takes `seconds` more for each row."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Nap.apply(x, self.seconds))  # type: ignore[no-untyped-call]


class Worker:
    """Nothing is kept from one strategy to the next."""

    def tried(self, *, width: int, layers: int, batch: int, seconds: float, strategy: str) -> dict[str, Any]:
        """measured: seconds of a step; predicted: before the first one."""
        of = config(width, layers, block=16)

        def make() -> nn.Module:
            model = GPT(of)
            for block in model.blocks:
                block.__class__, block.seconds = _Sleeping, seconds
            return model

        rows = data(of, batch)
        whole = tuple(torch.stack(part) for part in zip(*rows, strict=True))
        try:
            job = nbkit.prepare(
                make,
                lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4),
                loss=token_loss,
                strategy=strategy,
                example=tuple(part[:2] for part in whole),
                log_dir=None,
            )
        except NbkitError as error:
            return {"refused": str(error).splitlines()[0]}
        model = job.cost_model()
        model.fits = lambda one: Arithmetic.of(batch, one, microbatch_size=None)
        predicted = seconds_before_a_step(model, job.builder, Strategy.parse(strategy, job.world_size), batch)
        took = []
        began = time.perf_counter()
        for one in job.batches([whole] * STEPS):
            job.backward(one)
            job.optimizer.step()
            job.optimizer.zero_grad()
            took.append(time.perf_counter() - began)
            began = time.perf_counter()
        job.sharded_model.data.close()
        return {"measured": statistics.median(took[1:]), "predicted": predicted}
