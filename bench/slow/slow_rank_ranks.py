"""A rank whose blocks sleep, for longer when it is the slow one. Run by bench.rigs.forked."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import Tensor, nn

import nbkit
from bench.pipeline.sleeping_rank import until


class _Lasting:
    """Takes as long as it is told. exact: on the whole, what one sleep took too long being taken off the next."""

    late, exact = 0.0, False

    def __call__(self, seconds: float) -> None:
        due = time.perf_counter() + seconds - self.late
        until(due)
        self.late = min(time.perf_counter() - due, seconds) if self.exact else 0.0


_last = _Lasting()


class _Sleep(torch.autograd.Function):
    """Takes its time in both passes, and changes nothing."""

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
    """rows: of a global batch; unit: seconds of a block for a row; pace: how many times that on the rank `slow`."""

    def __init__(self, *, rows: int, blocks: int, unit: float, slow: int, pace: int) -> None:
        self._rows, self._blocks, self._unit, self._slow, self._pace = rows, blocks, unit, slow, pace
        self._now = unit

    def train(self, *, strategy: str, steps: int, slow_from: int, balance: bool = False) -> dict[str, Any]:
        """Seconds, loss and strategy of each step. The slow rank is slow in the steps behind number `slow_from`."""
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
        self._now = self._unit  # blocks are measured when a Trainer is made, and are equally long
        trainer = nbkit.Trainer(
            model=lambda: nn.Sequential(*(Block() for _ in range(self._blocks))),
            loss=nn.functional.mse_loss,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
            data=data,
            batch_size=self._rows,
            strategy=strategy,
            recovery=nbkit.Recovery(balance=balance),
            callbacks=[lambda trainer, record: paced(trainer, record["step"])],
            log_dir="runs",  # by whose records balance= measures
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
