"""Check arguments, and the results of each step: losses that are not finite, ranks that read different data, ..."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import nn

from nbkit.errors import NotFinite, TrainingError
from nbkit.old_keywords import regrouped
from nbkit.rank.data.batch import numbers_of, steps_of_epoch
from nbkit.rank.data.stream import is_map_style
from nbkit.rank.train.step.step_stats import NO_RATE, Pending, StepNumbers
from nbkit.trainer_options import OPTIONS, Checkpoints, Compute, Recovery
from nbkit.unfit_calls import says_what_it_takes

_OPTIMIZER = "optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)"


def _fit(trainer: Any, *_: Any, **__: Any) -> str:
    loop = trainer.loop
    if not is_map_style(loop.data):
        return "trainer.fit(500)"
    each = steps_of_epoch(len(loop.data), loop.batch_size, drop_last=loop.loading.drop_last)
    return f"trainer.fit({2 * each})   is two epochs of these data, of {each} steps each"


trainer_call = says_what_it_takes(
    hint=f"nbkit.Trainer(model=model, loss=loss, {_OPTIMIZER}, data=data, batch_size=64), then trainer.fit(500)",
    options=OPTIONS,
    accept=regrouped,
)
prepare_call = says_what_it_takes(
    hint=f"nbkit.prepare(model, {_OPTIMIZER}, loss=loss)", options=OPTIONS, accept=regrouped
)
fit_call = says_what_it_takes(hint=_fit)
batches_call = says_what_it_takes(hint="for batch in job.batches(loader):")
"""Decorators: a call with wrong arguments raises an error that shows an example of a correct call."""


def check_counts(**counts: int | None) -> None:
    """Raise TrainingError for a count that is not an integer of at least 1. None means not given."""
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise TrainingError(
                f"{name} must be a whole number of at least 1.", numbers=f"{name}={count!r}", hint=f"{name}=100"
            )


def check_clip_norm(clip_norm: float | None) -> None:
    """Raise TrainingError if `clip_norm` is given and is not more than 0."""
    if clip_norm is not None and not clip_norm > 0:
        raise TrainingError("clip_norm must be more than 0.", numbers=f"clip_norm={clip_norm}", hint="clip_norm=1.0")


def check_places(log_dir: str | None, checkpoints: Checkpoints, recovery: Recovery) -> None:
    """Raise TrainingError for a setting that needs a directory when none is given."""
    if checkpoints.every and checkpoints.path is None and log_dir is None:
        raise TrainingError(
            "There is no directory for the checkpoints.",
            numbers=f"log_dir=None, checkpoints={checkpoints!r}",
            hint=f"checkpoints={replace(checkpoints, path='model')!r}",
        )
    if recovery.balance and log_dir is None:
        raise TrainingError(
            "balance= of nbkit.Recovery needs the records of a run.",
            numbers="log_dir=None",
            hint="log_dir='runs'",
        )


def check_whole(numbers: StepNumbers, pending: Pending) -> None:
    """Raise TrainingError if the step's gradients were not summed over all ranks."""
    if not numbers.whole:
        raise TrainingError(
            f"The reduction of the gradients of step {pending.step} was interrupted, so they are not summed over all "
            "ranks.",
            numbers="the optimizer has already made a step with them"
            if pending.made
            else "the weights have not been touched",
            hint="train again: all ranks continue from a rank that has whole weights",
        )


def check_finite(numbers: StepNumbers, pending: Pending, *, steps_since: int) -> None:
    """Raise NotFinite, the same on every rank, if a loss is not finite.

    steps_since: the number of optimizer steps made with these gradients or later ones.
    """
    if not numbers.not_finite:
        return
    ranks = ", ".join(map(str, numbers.not_finite))
    made = (
        f"the optimizer has made {steps_since} step{'s' * (steps_since > 1)} with it: load a checkpoint"
        if steps_since > 0
        else "the weights have not been touched"
    )
    again = "; fit() continues with the next batch"
    if steps_since > 0:  # the weights are not finite by now, so they do not show if this step was the first
        again = " and those of the step before: its loss was finite, but maybe not its gradients"
    raise NotFinite(
        f"The loss of step {pending.step} is not finite on rank{'s' * (len(numbers.not_finite) > 1)} {ranks}.",
        step=pending.step,
        rank=numbers.not_finite[0],
        spoiled=steps_since > 0,
        numbers=f"{_samples_of(pending, numbers.not_finite)}; {made}",
        hint=f"look at these samples (data[i]){again}",
    )


def blame_weights(error: NotFinite, names: str, before: Pending | None) -> None:
    """Change `error` to say that the weights were not finite before its step, so its samples are not the cause.

    names: the names of these weights. before: the previous step, or None if this process has made none.
    """
    past = "they were not finite before the first step"
    if before is not None:
        past = (
            f"a step up to {before.step} had a finite loss, but gradients that were not; step {before.step}: "
            f"{_samples_of(before, range(before.mesh.size))}"
        )
    error.what = f"{error.what.removesuffix('.')}, because the weights are not."
    error.args, error.spoiled, error.numbers = (error.what,), True, f"{names}; {past}"
    error.hint = "trainer.load(path) of a checkpoint; torch.autograd.set_detect_anomaly(True) names the operation"


def _samples_of(pending: Pending, ranks: Sequence[int]) -> str:
    """Return in words which samples these ranks had in a step. Ranks of a pipeline or tensor group share samples."""
    by_part: dict[int, list[int]] = {}
    for rank in ranks:
        by_part.setdefault(pending.mesh.index(rank)["dp"], []).append(rank)
    where = []
    for part, same in list(by_part.items())[:4]:
        rows = numbers_of(pending.parts, pending.samples, pending.mesh.dp, part)
        shown = ", ".join(str(pending.indices[row]) for row in rows[:16]) + ", ..." * (len(rows) > 16)
        names = ", ".join(map(str, same[:8])) + ", ..." * (len(same) > 8)
        where.append(f"rank{'s' * (len(same) > 1)} {names}: samples {shown}")
    return "; ".join(where)


def check_gradients(norm: float, *, step: int, steps_since: int) -> None:
    """Raise NotFinite, the same on every rank, for gradients that are not finite.

    norm: the norm of all gradients. steps_since: see check_finite.
    """
    if isfinite(norm):
        return
    made = f"the optimizer has made {steps_since} step{'s' * (steps_since > 1)} with them: load a checkpoint"
    raise NotFinite(
        f"The gradients of step {step} are not finite, although the loss is.",
        step=step,
        rank=0,
        spoiled=steps_since > 0,
        numbers=f"norm {norm}; {made if steps_since > 0 else 'the weights have not been touched'}",
        hint="look for a function with an infinite slope, such as sqrt at 0: sqrt(x + 1e-12); "
        "torch.autograd.set_detect_anomaly(True) names it",
    )


def check_streams(numbers: StepNumbers, pending: Pending) -> None:
    """Raise TrainingError if the ranks read different batches."""
    if len(set(numbers.fingerprints)) > 1:
        odd = [rank for rank, mark in enumerate(numbers.fingerprints) if mark != numbers.fingerprints[0]]
        which = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
        if pending.losses:
            raise TrainingError(
                f"The ranks read different data in step {pending.step}, or called job.backward a different "
                "number of times.",
                numbers=f"{which} differed from rank 0; this rank gave {pending.losses}",
                hint="the same batches, job.rows and job.backward on every rank, and none inside `if rank == 0:`",
            )
        raise TrainingError(
            f"The ranks read different data in step {pending.step}.",
            numbers=f"{which} had a different batch than rank 0",
            hint="use the same data, batch_size and seed on every rank, because each rank takes its own rows; "
            "shuffle with one seed on all ranks: torch.manual_seed(0)",
        )


def check_rates(numbers: StepNumbers, pending: Pending) -> None:
    """Raise TrainingError if the ranks have different learning rates, or one that is not finite."""
    if wrong := [str(rank) for rank, rate in enumerate(numbers.rates) if rate == NO_RATE]:
        raise TrainingError(
            f"The learning rate of step {pending.step} is not finite.",
            numbers=f"NaN or infinite on rank{'s' * (len(wrong) > 1)} {', '.join(wrong[:8])}",
            hint="optimizer.param_groups[0]['lr'], as a schedule or a callback has set it",
        )
    if len(set(numbers.rates)) > 1:
        shown = ", ".join(f"{rate:g}" for rate in numbers.rates[:4]) + ", ..." * (len(numbers.rates) > 4)
        raise TrainingError(
            f"The ranks have different learning rates in step {pending.step}.",
            numbers=f"{shown} on ranks 0, 1, ... (the sum over the groups of the optimizer)",
            hint="set them by numbers that all ranks have: schedule.step(result.loss) after job.optimizer.step(), "
            "job.mean(loss), or trainer.history[-1]['loss']",
        )


def check_edits(numbers: StepNumbers, *, step: int, strategy: str) -> None:
    """Raise TrainingError if the user has changed gradients before they were summed over the ranks."""
    if numbers.edited:
        raise TrainingError(
            "Gradients were changed after job.backward(loss), when they are those of one rank only. "
            "The ranks sum them later.",
            numbers=f"step {step}, under {strategy}, on rank{'s' * (len(numbers.edited) > 1)} "
            + ", ".join(map(str, numbers.edited[:8])),
            hint="job.clip(1.0) to clip; or job.grad_norm(), which sums them, before each p.grad of "
            "job.optimizer.param_groups is changed",
        )


_ALIKE = 1e-5  # ranks on different devices may round differently


def check_weights(numbers: StepNumbers, pending: Pending) -> None:
    """Raise TrainingError if ranks that should hold the same weights have different ones."""
    norms = numbers.weights
    if max(norms) - min(norms) > _ALIKE * max(norms):
        shown = ", ".join(f"{norm:.6g}" if norm else "unchanged" for norm in norms[:4]) + ", ..." * (len(norms) > 4)
        raise TrainingError(
            f"The ranks have different weights in step {pending.step}."
            if all(norms)
            else f"Only some ranks changed their weights before step {pending.step}.",
            numbers=f"under {pending.strategy}, norms on ranks 0, 1, ...: {shown}",
            hint="change weights in the same way on every rank, by numbers that all ranks have; under zero1 and zero2 "
            "change job.model.parameters(), because job.optimizer.param_groups has only this rank's parts",
        )


def check_own_loop(recovery: Recovery, compute: Compute, loss: Any) -> None:
    """Raise TrainingError for settings that are not supported in the user's own loop.

    loss: None if the loop computes the loss.
    """
    if recovery.on_failure not in ("replace", "stop"):
        raise TrainingError(
            f"There is no on_failure {recovery.on_failure!r} in a loop of your own.",
            numbers="'replace', 'stop'",
            hint="recovery=nbkit.Recovery(on_failure='replace')",
        )
    supported = Recovery(on_failure=recovery.on_failure, backup_every=recovery.backup_every)
    if recovery != supported:
        raise TrainingError(
            "hang_timeout=, on_oom= and balance= work only in the loop of a Trainer.",
            numbers=f"recovery={recovery!r}",
            hint=f"recovery={supported!r}, or nbkit.Trainer",
        )
    if compute.loss_chunks != 1 and loss is None:
        raise TrainingError(
            "loss_chunks= needs a loss that nbkit calls.",
            numbers=f"compute={compute!r}",
            hint="prepare(model, optimizer, loss=loss_fn, ...), or nbkit.Trainer",
        )
    if compute.grad_norm_every != Compute.grad_norm_every:
        raise TrainingError(
            "grad_norm_every= works only in the loop of a Trainer.",
            numbers=f"compute={compute!r}",
            hint="job.grad_norm() in a loop of your own",
        )


def check_loader(loader: Any) -> None:
    """Raise TrainingError for a loader that already divides the data among the ranks."""
    if isinstance(getattr(loader, "sampler", None), torch.utils.data.distributed.DistributedSampler):
        raise TrainingError(
            "The loader has a DistributedSampler, but nbkit itself takes each rank's rows from a global batch.",
            numbers="the data would be split twice",
            hint="DataLoader(dataset, batch_size=GLOBAL, shuffle=True)",
        )


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise TrainingError if `optimizer` is no torch optimizer, needs a closure, or has tensors that `model` lacks."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TrainingError(
            "optimizer= did not return a torch optimizer.",
            numbers=f"got {type(optimizer).__name__}",
            hint="optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)",
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TrainingError(
            f"{type(optimizer).__name__} needs a closure, to compute the loss several times in a step, but nbkit "
            "computes it once.",
            numbers="step(closure) needs its argument",
            hint="optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)",
        )
    own = {id(p) for p in model.parameters()}
    every = [p for group in optimizer.param_groups for p in group["params"]]
    strange = sum(id(p) not in own for p in every)
    if 0 < strange < len(every):
        raise TrainingError(
            "The optimizer holds parameters that are not in this model, such as those of a loss, so no rank would "
            "sum their gradients.",
            numbers=f"{strange} of {len(every)}",
            hint="a model that holds both and whose forward(x, y) returns the loss of each row; with dicts as data, "
            "inputs=['x', 'y'], loss=lambda output, batch: output.mean()",
        )
    if strange:
        raise TrainingError(
            "The optimizer holds parameters that are not in this model.",
            numbers=f"{strange} of {len(every)}",
            hint="optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)",
        )


def check_parameters(optimizer: Any, model: nn.Module, *, known: Container[int], held: Iterable[nn.Parameter]) -> None:
    """Raise TrainingError if the model or the optimizer has parameters that were added after the job was built.

    The ranks would never sum the gradients of such parameters. known: ids of the parameters that the model had when the
    job was built. held: the parameters that the optimizer was given.
    """
    own = {id(p) for p in held}
    new = [name for name, p in model.named_parameters() if id(p) not in known]
    strange = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if new or strange:
        raise TrainingError(
            "Some parameters were added after the job was built, and the ranks do not sum their gradients.",
            numbers=f"in the model: {', '.join(new[:3]) or 'none'}{', ...' * (len(new) > 3)}; "
            f"in the optimizer: {strange}",
            hint="build the Trainer (or job) again around the changed model"
            if new
            else "give the optimizer all parameters at the start, also frozen ones, and change p.requires_grad later",
        )
