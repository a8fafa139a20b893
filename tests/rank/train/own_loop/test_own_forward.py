"""Test that steps with the user's own forward and loss equal one process in plain torch, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from own_programs import adam, batches, mlp
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit

DATA = batches(15, 7, 4, 3)
EXAMPLE = tuple(DATA[0])


class Plain:
    """The calls of a job, in one process and plain torch."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer, self.losses, self.norms = model, adam(model), list[float](), list[float]()
        self.loss = 0.0

    def rows(self, batch: Any) -> Any:
        return batch

    def backward(self, loss: Tensor, weight: Any = None, retain_graph: bool = False, **_: Any) -> None:
        self.loss += loss.item()
        loss.backward(retain_graph=retain_graph)

    def clip(self, norm: float) -> None:
        self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), norm)))

    def made(self) -> None:
        self.losses.append(self.loss)
        self.loss = 0.0


def made(world: Any, job: Any) -> None:
    job.optimizer.step()
    job.optimizer.zero_grad()
    if isinstance(job, Plain):
        job.made()


def one_of_each(job: Any) -> None:
    """Make a step in each way that a user's own loop may make it."""
    data = iter(DATA)

    def step(of: Callable[[Tensor, Tensor], None]) -> None:
        of(*job.rows(next(data)))
        made(None, job)

    def masked(x: Tensor, y: Tensor) -> None:
        mask = y[:, 0] > 0.3  # with a different weight on every rank
        each = F.mse_loss(job.model(x), y, reduction="none").mean(1)
        job.backward((each * mask).sum() / mask.sum().clamp(min=1), weight=mask.sum())

    def first_row(x: Tensor, y: Tensor) -> None:
        mask = (y - DATA[2][1][0]).abs().sum(1) == 0  # on all other ranks the mean is of no rows, so NaN
        each = F.mse_loss(job.model(x), y, reduction="none").mean(1)
        job.backward((each * mask).sum() / mask.sum(), weight=mask.sum())

    def twice(x: Tensor, y: Tensor) -> None:
        out = job.model(x)
        job.backward(F.mse_loss(out, y), retain_graph=True)
        job.backward(0.5 * out.square().mean())

    def several_forwards(x: Tensor, y: Tensor) -> None:
        out, other = job.model(x), job.model(y @ torch.ones(3, 4, dtype=y.dtype))
        with torch.no_grad():
            aim = job.model(-x)
        job.backward(F.mse_loss(out, y) + (other - aim).square().mean())

    def dropped(x: Tensor, y: Tensor) -> None:
        job.backward(job.model(x).square().mean())
        job.optimizer.zero_grad()
        waiting = job.model(x)
        job.backward(job.model(x).square().mean())
        if isinstance(job, Plain):
            job.loss = 0.0
        job.optimizer.zero_grad()
        job.backward(F.mse_loss(waiting, y))

    def accumulated(x: Tensor, y: Tensor) -> None:
        job.backward(F.mse_loss(job.model(x), y) / 3)
        x, y = job.rows([part[:5] for part in next(data)])
        job.backward(F.mse_loss(job.model(x), y) / 3)
        x, y = job.rows(next(data))
        job.backward(F.mse_loss(job.model(x), y) / 3, last=True)
        job.clip(0.05)

    step(lambda x, y: job.backward(F.mse_loss(job.model(x), y)))
    step(masked)
    step(first_row)
    step(lambda x, y: job.backward(F.mse_loss(job.model(x), y, reduction="sum") / 40, reduction="sum"))
    step(twice)
    step(several_forwards)
    step(dropped)
    step(accumulated)
    step(lambda x, y: job.backward(F.mse_loss(job.model(x), y), last=True))
    next(data)
    step(lambda x, y: [job.backward(F.mse_loss(job.model(x), y)), job.clip(0.1)])


def prepared(strategy: str, model: Callable[[], nn.Module] | None = None, **options: Any) -> Any:
    hints = nbkit.ModelHints(example=EXAMPLE)
    make = model or (lambda: mlp(4, 3, 1))
    return nbkit.prepare(make, adam, strategy=strategy, hints=hints, **{"log_dir": None, **options})


def in_each_way(world: Any, strategies: list[str]) -> list[Any]:
    found = []
    for strategy in strategies:
        job = prepared(strategy)
        one_of_each(job)
        found.append([job.full_state_dict(), job.history])
    return found


TWO = ["ddp", "zero1", "zero2", "zero3", "dp=1 tp=2"]
FOUR = ["zero=3 dp=4 shard=2", "dp=2 tp=2", "zero=3 dp=2 tp=2", "zero=1 dp=2 tp=2"]


@pytest.mark.usefixtures("rows_are_known")
@pytest.mark.parametrize(
    "strategies", [["ddp"], TWO, pytest.param(FOUR, marks=pytest.mark.long)], ids=["alone", "two", "four"]
)
def test_every_way_to_make_a_step_equals_one_process(strategies: list[str]) -> None:
    plain = Plain(mlp(4, 3, 1))
    one_of_each(plain)
    ranks = {1: 1, len(TWO): 2, len(FOUR): 4}[len(strategies)]
    for rank in run_ranks(in_each_way, ranks, strategies, timeout=120):
        for strategy, (state, history) in zip(strategies, rank, strict=True):
            for key, value in plain.model.state_dict().items():
                torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-11, msg=f"{strategy} {key}")
            assert [record["loss"] for record in history] == pytest.approx(plain.losses, rel=1e-9), strategy
            norms = [record["grad_norm"] for record in history if "grad_norm" in record]
            assert norms == pytest.approx(plain.norms, rel=1e-9)
            assert [record["samples"] for record in history] == [7, 7, 7, 7, 7, 7, 7, 19, 7, 7]
