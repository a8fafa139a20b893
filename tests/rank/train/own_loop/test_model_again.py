"""Test that a model whose forward was called under one job can be used by the next job, while the first exists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_programs import adam, batches, mlp
from ranks import run_ranks
from torch.nn import functional as F

import nbkit

DATA = batches(4, 8, 4, 3)


def again(world: Any, strategy: str) -> tuple[list[float], list[float]]:
    """Return the losses of the second job, and of a job with a new model of the same weights."""
    hints = nbkit.ModelHints(example=tuple(DATA[0]))
    model = mlp(4, 3, 1)
    first = nbkit.prepare(model, adam, strategy="ddp", hints=hints, log_dir=None)
    for batch in first.batches(DATA):
        x, y = first.rows(batch)
        first.backward(F.mse_loss(first.model(x), y))
        first.optimizer.step()
        first.optimizer.zero_grad()
    copy = mlp(4, 3, 1)
    copy.load_state_dict(first.full_state_dict())
    found = []
    for taken in (model, copy):
        job = nbkit.prepare(taken, adam, loss=F.mse_loss, strategy=strategy, hints=hints, log_dir=None)
        found.append([])
        for batch in job.batches(DATA):
            found[-1].append(float(job.backward(batch).loss))
            job.optimizer.step()
            job.optimizer.zero_grad()
    other = torch.nn.Linear(3, 1)  # in no job: its backward pass is not looked at
    other(torch.ones(1, 3)).sum().backward()
    assert first.step == len(DATA)
    return found[0], found[1]


@pytest.mark.parametrize("strategy", ["pp microbatches=2", "ddp", "zero3"])
def test_the_next_job_trains_like_one_with_a_new_model(strategy: str) -> None:
    for given, new in run_ranks(again, 2, strategy, timeout=120):
        assert given == new and len(new) == len(DATA)
