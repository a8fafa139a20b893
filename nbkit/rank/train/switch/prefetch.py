"""Prepare a switch during the training, from the request until all ranks are prepared.

A thread of this rank makes the plan of the new strategy, plans the exchange and splits the module. It sends nothing,
allocates no memory for weights and draws no random numbers. If groups are missing, all ranks make them in a second
thread, which they begin after the same step. With NCCL the switch makes the groups, because there a group costs nothing
before its first use.

If the model was not examined for the strategy, rank 0 does that first, in its thread. After a step it sends the
findings to all ranks, and the second thread does the rest.

The result is only a cache. A switch makes whatever is missing, and uses only what is still valid.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch

from nbkit.errors import NbkitError
from nbkit.rank.background_threads import giving_way
from nbkit.rank.comm.background_creation import forming
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.plan import ParallelPlan
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.checkpoint.job_state import alike_in_groups, by_name
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.estimate.free_memory import left, round_bytes, side_bytes
from nbkit.rank.train.job import Job
from nbkit.strategy import Strategy

GROUPS_SECONDS = 30.0  # limit, because a rank may not take part. Then the switch makes the groups again


class SwitchPreparation(step_boundary.Preparation):
    """The preparation of a switch of `job` to `text`."""

    def __init__(self, job: Job, text: str) -> None:
        self._job, self._text = job, text
        self._new: ParallelPlan | None = None  # the new plan, once it is known to fit
        self._unknown: Strategy | None = None  # the new strategy, if the model was not examined for it on all ranks
        self._made = threading.Thread(target=self._run, args=(self._alone,), name="nbkit-ahead", daemon=True)
        self._groups: threading.Thread | None = None
        self._made.start()

    def alone(self) -> bool:
        """Return True if this rank's own part is finished: plan and module, or rank 0's examination of the model."""
        return not self._made.is_alive()

    def lacks(self) -> bool:
        """Return True if groups are missing."""
        if self._groups is not None:
            return self._groups.is_alive()
        if self._unknown is not None:
            return True
        if self._new is None or accelerator().holds(self._job.device):
            return False
        return not self._job.builder.connected(self._new)

    def create_groups(self) -> None:
        """Send rank 0's findings to all ranks. Then make the groups and split the module, in a thread."""
        if self._unknown is not None:
            self._job.builder.finder.sync([self._unknown])
        self._groups = forming.beside(lambda: self._run(self._create_groups), seconds=GROUPS_SECONDS)

    def _alone(self) -> None:
        builder = self._job.builder
        new = self._job.parsed(self._text)
        if builder.finder.is_synced(new):
            self._new = make_ready(self._job, self._text)
            return
        self._unknown = new
        if builder.rank == 0:
            accelerator().choose_in_thread(self._job.device)
            builder.finder.find([new], beside=True)

    def _create_groups(self) -> None:
        if self._unknown is not None:
            self._new = make_ready(self._job, self._text)
        assert self._new is not None
        if not accelerator().holds(self._job.device):
            self._job.builder.create_groups(self._new)

    def _run(self, make: Callable[[], None]) -> None:
        try:
            with giving_way():
                make()
        except NbkitError:
            pass  # the switch will raise it again
        except Exception as error:
            # The training may have changed the model meanwhile. The switch tries again in any case.
            print(f"nothing made ready for {self._text}: {type(error).__name__}: {error}", file=sys.__stderr__)


def begin(job: Job | None, text: str | None) -> step_boundary.Preparation:
    """Begin to prepare a switch of `job` to `text`, in a thread."""
    return step_boundary.Preparation() if job is None or text is None else SwitchPreparation(job, text)


def make_ready(job: Job, text: str) -> ParallelPlan:
    """Prepare this rank's own part of a switch to `text`. Return the new plan. Not collective.

    Raises StrategyError if the strategy does not fit.
    """
    accelerator().choose_in_thread(job.device)
    builder = job.builder
    new = builder.plan(job.cost_model().placed(job.parsed(text), now=job.strategy))
    num_bytes = side_bytes(builder, job.bytes_per_element(), new.strategy, builder.rank)
    limit = round_bytes(num_bytes, job.device, free=left(job.device))
    builder.make_ready(job.sharded_model.plan, new, builder.exchanges.kinds(_expected(job)), limit=limit)
    return new


def _expected(job: Job) -> dict[str, dict[str, torch.dtype]]:
    """Return name -> {key: dtype} for the optimizer state of all ranks, guessed from the state of this rank."""
    kept = job_state.per_element(job.sharded_model, job.optimizer.inner)
    dtypes = {key: tensor.dtype for key, (tensor, _) in kept.items()}
    trained = [name for name, p in job.builder.skeleton.named_parameters() if p.requires_grad]
    others = [name for name in trained if name not in job.sharded_model.held]
    return alike_in_groups(dtypes, job.builder.template.groups, others) | by_name(dtypes)
