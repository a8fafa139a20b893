"""Refuse uses of gradients in a user's own loop that torch accepts, but that would be wrong under the strategy.

torch's clipping: if a rank holds only a part of the gradients, `clip_grad_norm_` computes the norm of that part only,
and so clips by another factor on each rank. Under ZeRO 1 and 2 the optimizer's parameters have the gradients, and the
model's parameters have none. There `clip_grad_norm_` and `clip_grad_value_` would clip nothing.

Gradients from the user's own backward pass, under every strategy: `penalty(job.model).backward()` adds to `.grad` of
this rank's parameters. Before `job.backward`, the ranks would sum these gradients, so they would count once per rank.
After it, they would count only on this rank, or only for a part of each parameter, or not at all, because ZeRO updates
other tensors. A penalty counts exactly once if it is part of the loss.

A step of the optimizer that was given to `prepare`: it would use gradients of this rank's rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbkit.errors import TrainingError
from nbkit.rank.train.own_loop.own_forward import by_a_job

Job = Any  # nbkit.rank.train.job.Job: that file imports this one
Standing = list[tuple[Tensor | None, int]]

_jobs: weakref.WeakSet[Job] = weakref.WeakSet()

_HINT = "loss=lambda output, target: loss_fn(output, target) + penalty(model)   with ddp, or zero1 to zero3"


def watch_backward(job: Job) -> None:
    """Refuse from now on backward passes outside of `job` that change gradients which the optimizer will use."""
    _jobs.add(job)
    function = torch.autograd.backward
    if hasattr(function, "checked_by_nbkit"):
        return

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> None:
        jobs = [job for job in _jobs if not job.model_handle.taken_over]
        waiting = [(job, _standing(job)) for job in jobs if job.waits_for_update]
        others = [] if by_a_job() else [(job, _standing(job)) for job in jobs if job.own_forward.active]
        function(*args, **kwargs)
        for job, before in waiting:
            _refuse_added(job, before)
        for job, before in others:
            _refuse_unweighed(job, before)

    checked.checked_by_nbkit = True  # type: ignore[attr-defined]
    torch.autograd.backward = checked


def _standing(job: Job) -> Standing:
    grads = [p.grad for p in job.sharded_model.data.leaves()]
    return [(grad, 0 if grad is None else grad._version) for grad in grads]


def _changed(job: Job, before: Standing) -> bool:
    after = _standing(job)
    return not all(old is new and was == now for (old, was), (new, now) in zip(before, after, strict=True))


def _refuse_unweighed(job: Job, before: Standing) -> None:
    if not _changed(job, before):
        return
    job.optimizer.zero_grad()
    raise TrainingError(
        "loss.backward() gives the gradient of this rank's rows, without their share of the batch.",
        numbers=f"step {job.step + 1}, under {job.strategy}; the gradients are dropped",
        hint="job.backward(loss)   in its place",
    )


def _refuse_added(job: Job, before: Standing) -> None:
    if not _changed(job, before):
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


def refuse_unsummed(job: Job) -> None:
    """Raise TrainingError if a parameter has a nonzero gradient that is not from a `backward` of the job."""
    if any(p.grad is not None and bool(p.grad.any()) for p in job.sharded_model.data.leaves()):
        job.optimizer.zero_grad()
        raise TrainingError(
            "There are gradients that no rank has summed: they do not come from job.backward.",
            numbers=f"step {job.step + 1}, under {job.strategy}; they are dropped",
            hint="x, y = job.rows(batch); job.backward(loss_of(job.model(x), y))   in the place of loss.backward()",
        )


_stepped: weakref.WeakSet[Job] = weakref.WeakSet()
_hooks: list[Any] = []  # at most one, for all jobs of this process


def watch_steps(job: Job) -> None:
    """Refuse steps of the optimizer that the user gave to `prepare`, except those that `job.optimizer.step()` makes."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_refuse_step))
    _stepped.add(job)


def _refuse_step(optimizer: Optimizer, *_: Any) -> None:
    for job in list(_stepped):
        if job.integrity.half_way or job.sharded_model is None:
            continue
        inner = job.optimizer.inner
        # The user's object shares the attributes of the optimizer in force: see OptimizerSpec.follow.
        if any(vars(optimizer) is vars(each) for each in (inner, *vars(inner).get("_within", ()))):
            raise TrainingError(
                "optimizer.step() of the optimizer that nbkit.prepare was given would use the gradients of this rank.",
                numbers=f"step {job.step + 1}, under {job.strategy}",
                hint="job.optimizer.step(), which sums them over the ranks first; or optimizer = job.optimizer after "
                "nbkit.prepare",
            )


_clipped: weakref.WeakSet[Job] = weakref.WeakSet()


def watch_clipping(job: Job) -> None:
    """Refuse from now on torch's clipping of gradients of `job` where it would see only a part of them."""
    _clipped.add(job)
    # Wrap inner functions of torch, because a program may already have imported the public functions.
    _check_before("_get_total_norm", lambda tensors: [tensors] if isinstance(tensors, Tensor) else list(tensors), _norm)
    _check_before("_group_tensors_by_device_and_dtype", lambda lists: lists[0], _none)
    if hasattr(clip_grad, "_get_total_norm"):
        torch.nn.utils.get_total_norm = clip_grad._get_total_norm


def _check_before(name: str, gradients: Callable[[Any], list[Tensor]], check: Callable[[list[Tensor]], None]) -> None:
    function = getattr(clip_grad, name, None)
    if function is None or hasattr(function, "checked_by_nbkit"):
        return

    @wraps(function)
    def checked(given: Any, *args: Any, **kwargs: Any) -> Any:
        check(gradients(given))
        return function(given, *args, **kwargs)

    checked.checked_by_nbkit = True  # type: ignore[attr-defined]
    setattr(clip_grad, name, checked)


def _norm(gradients: Sequence[Tensor]) -> None:
    _none(gradients)
    given = {id(gradient) for gradient in gradients}
    for job in list(_clipped):
        held = [p for p in job.sharded_model.held.values() if p.grad is not None]
        if not job.sharded_model.holds_all_gradients and any(id(p.grad) in given for p in held):
            raise TrainingError(
                f"torch would clip by the norm of a part of the gradients: {job.strategy} splits them over the ranks.",
                numbers=f"rank {job.rank} has {sum(p.numel() for p in held):,} elements of them",
                hint="job.clip(1.0); or job.grad_norm(), the norm of all",
            )


def _none(gradients: Sequence[Tensor]) -> None:
    """Raise TrainingError if a job's gradients are not summed yet, or if they are not where torch looks for them."""
    for job in list(_clipped):
        if job.own_forward.losses:
            own = {id(p.grad) for p in job.sharded_model.data.leaves() if p.grad is not None}
            if not gradients or not own.isdisjoint(map(id, gradients)):
                raise TrainingError(
                    "torch would clip the gradients of this rank's rows: they are summed over the ranks after that.",
                    numbers=f"step {job.step + 1}, under {job.strategy}",
                    hint="job.clip(1.0)   sums and clips; or job.grad_norm() before clip_grad_value_",
                )
        if not gradients and job.training_step.reduced and job.strategy.zero in (1, 2):
            raise TrainingError(
                f"torch would clip nothing: under {job.strategy} the optimizer's parameters have the gradients.",
                numbers="0 of the parameters given have one",
                hint="job.clip(1.0); or the parameters in job.optimizer.param_groups for clip_grad_value_",
            )
