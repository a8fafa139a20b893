"""Refuses gradients that the user adds by a backward pass of their own, under every strategy.

`penalty(job.model).backward()` fills `.grad` of this rank's parameters. Before `job.backward` these gradients would be
summed over the ranks, and count once for each rank. After it they would count on this rank alone, or for a part of each
parameter, or not at all, since ZeRO updates other tensors. As part of the loss, a penalty counts once.
"""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from nbkit.errors import TrainingError

Job = Any  # nbkit.rank.train.job's, which imports this file
Standing = list[tuple[Tensor | None, int]]

_jobs: weakref.WeakSet[Job] = weakref.WeakSet()

_HINT = "loss=lambda output, target: loss_fn(output, target) + penalty(model)   with ddp, or zero1 to zero3"


def watch(job: Job) -> None:
    """Refuse from now on a backward pass, other than that of `job`, that adds to gradients waiting for an update."""
    _jobs.add(job)
    function = torch.autograd.backward
    if hasattr(function, "checked_by_nbkit"):
        return

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> None:
        waiting = [(job, _standing(job)) for job in _jobs if job.waits_for_update]
        function(*args, **kwargs)
        for job, before in waiting:
            _refuse_added(job, before)

    checked.checked_by_nbkit = True  # type: ignore[attr-defined]
    torch.autograd.backward = checked


def _standing(job: Job) -> Standing:
    grads = [p.grad for p in job.sharded_model.data.leaves()]
    return [(grad, 0 if grad is None else grad._version) for grad in grads]


def _refuse_added(job: Job, before: Standing) -> None:
    after = _standing(job)
    if all(old is new and was == now for (old, was), (new, now) in zip(before, after, strict=True)):
        return
    job.optimizer.zero_grad()
    raise TrainingError(
        "A backward pass of your own has added to gradients that are summed over the ranks already.",
        numbers=f"step {job.step + 1}, under {job.strategy}; its gradients are dropped",
        hint=_HINT,
    )


def refuse_before(job: Job) -> None:
    """Raise TrainingError if a parameter has a nonzero gradient before the backward pass of a step."""
    grads = [grad for p in job.sharded_model.data.leaves() if (grad := p.grad) is not None]
    if grads and any(bool(grad.any()) for grad in grads):
        job.optimizer.zero_grad()
        raise TrainingError(
            "There are gradients from before job.backward, which would be summed over the ranks with its own.",
            numbers=f"step {job.step + 1}, under {job.strategy}: {len(grads)} parameters had one; they are dropped",
            hint=_HINT,
        )
