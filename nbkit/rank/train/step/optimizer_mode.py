"""Change weights between two steps: for `eval()` and `train()` of a schedule-free optimizer, and for shown averages.

A schedule-free optimizer computes gradients at one point, but its result is another point. Its `eval()` puts the result
into the parameters, and its `train()` puts the first point back. Both change only the parameters that this rank
updates. `follow_modes` makes them share the change with the other ranks, as after a step. Under zero 1 and 2 a rank
updates only a part of the parameters that it computes with. An owner updates a tensor of which other ranks have parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from nbkit.errors import TrainingError
from nbkit.rank.world import meeting

MODES = ("train", "eval")


def follow_modes(optimizer: Optimizer, job: Any) -> None:
    """Make `train()` and `eval()` of `optimizer` and of its inner optimizers act on all ranks of `job`."""
    known, every = weakref.ref(job), [optimizer, *vars(optimizer).get("_within", ())]
    having = [each for each in every if all(callable(getattr(type(each), mode, None)) for mode in MODES)]
    for mode in MODES:
        for each in having:
            vars(each)[mode] = partial(_set_mode, known, mode, [each])
        if having:  # several optimizers change together
            vars(optimizer).setdefault(mode, partial(_set_mode, known, mode, having))


def to_train(optimizer: Optimizer) -> None:
    """Put a new copy of an optimizer, which has no state yet, into training mode."""
    for each in [optimizer, *vars(optimizer).get("_within", ())]:
        if all(callable(getattr(type(each), mode, None)) for mode in MODES):
            type(each).train(each)  # type: ignore[attr-defined]


def _set_mode(known: weakref.ref[Any], mode: str, optimizers: list[Any]) -> None:
    """Call `train` or `eval` of `optimizers`, between two steps. Collective."""
    job = known()
    if job is None or job.sharded_model is None:
        return
    what = f"optimizer.{mode}()"
    meet_between_steps(job, what)
    if job.waits_for_update or job.own_forward.losses:
        raise TrainingError(
            f"{what} changes the weights, but the gradients of this step belong to the weights before the change.",
            numbers=f"within step {job.step + 1}",
            hint=f"job.optimizer.step() before job.optimizer.{mode}()",
        )
    change_weights(job, lambda: [getattr(type(each), mode)(each) for each in optimizers])


def meet_between_steps(job: Any, what: str) -> None:
    """Meet the other ranks between two steps, and make sure that each rank has the weights it updates. Collective.

    Before the first step under a strategy, the owner of a whole tensor does not have its weights yet.
    """
    meeting.meet(what)
    job.sync.resync()
    job.switcher.prove()
    job.sync.average_replicas()
    if job.sharded_model.owned is not None:
        job.sharded_model.owned.bring()


@torch.no_grad()
def change_weights(job: Any, change: Callable[[], Any]) -> None:
    """Call `change`, which changes the parameters that this rank updates. Share them as after a step. Collective."""
    with job.integrity.changing():
        change()
        if job.sharded_model.data.apart == 1:  # replicas that train apart are equal already, and would count a step
            job.sharded_model.after_step()
            job.sharded_model.data.settle()
    job.training_step.note_versions()
