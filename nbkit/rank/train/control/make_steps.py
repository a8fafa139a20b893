"""Make the steps of one `fit`, and do the work between two of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from nbkit.errors import NotFinite, Stopped
from nbkit.rank.comm.agree import any_rank
from nbkit.rank.train.control.garbage_collection import collect, held_to_boundaries
from nbkit.rank.train.control.rebalance import Rebalancing
from nbkit.rank.train.control.step_boundary import heed_end_signals
from nbkit.rank.train.out_of_memory.rescue import rescue
from nbkit.rank.train.replace import resume_fit
from nbkit.rank.train.replace.hang_watch import hang_watch
from nbkit.rank.train.replace.resume_fit import FitRange, go_on, leave_device
from nbkit.rank.train.resize.plan_resize import shrink

Trainer = Any  # nbkit.rank.train.trainer's, which imports this file


# The first backup of a `fit` costs little compared with so many steps. A loop may call `fit` for each single step.
_LONG_ENOUGH = 20


def make_steps(
    trainer: Trainer,
    span: FitRange,
    make_step: Callable[[], None],
    rebalancing: Rebalancing,
    say: Callable[[str], None],
    *,
    replaceable: bool,
    joins: bool,
) -> None:
    """Make the rest of the steps of `span`. Collective.

    joins: other ranks have begun `span` already, or all ranks have, in another world. replaceable: a rank that dies is
    replaced. Raises as `fit` does, and ResizeAtBoundary to continue with another number of ranks.
    """
    heed_end_signals()
    job, loop, left = trainer.job, trainer.loop, span.goal - trainer.step
    if not joins:
        trainer.saves.check_shared()
    with (
        job.running(total=left, owner=trainer, arithmetic=str(trainer.arithmetic), joins=joins),
        rebalancing.listening() if loop.recovery.balance else nullcontext(),
        rescue(trainer, loop.recovery.on_oom) as memory,
        hang_watch(
            loop.recovery.hang_timeout,
            job.rank,
            ranks=job.world_size,
            replaceable=replaceable,
            say=None if trainer.step else say,
        ),
        held_to_boundaries(),
    ):
        trainer.saves.begin()
        # Equal on all ranks, because ranks agree on requests with the results that they read.
        told = bool(trainer._callbacks)
        job.ledger.at_once = told if joins else any_rank(told, device=job.device)
        if not joins:  # otherwise the ranks have done this already
            every = loop.recovery.backup_every
            job.backups.begin(0 if every is None and not _backed_up(left, replaceable) else every, say)
            job.back_up()
            trainer.snapshots.take()
        arrived = trainer.stops = False
        while not arrived:
            goal = trainer.step + left
            try:
                if span.fewer:
                    span = shrink(trainer, span, say)
                if left:
                    with memory.step():
                        make_step()
                        job.at_boundary()
                        collect(job.step)
                        if loop.recovery.balance:
                            rebalancing.act(job, trainer.arithmetic.total, left - 1)
                    left = 0 if trainer.stops else left - 1
                else:
                    trainer.saves.collect(wait=True)
                    if replaceable:
                        job.arrive()
                    arrived = True
            except (NotFinite, Stopped) as ended:
                trainer.saves.collect(wait=True)
                if isinstance(ended, NotFinite) and ended.spoiled and (saved := trainer.saves.last).path is not None:
                    ended.hint = f"trainer.load({str(saved.path)!r}), of step {saved.step};   {ended.hint}"
                raise
            except Exception as error:
                rebalancing.forget()
                if replaceable:
                    leave_device(error)
                if not memory.rolled_back(error):
                    if not replaceable:
                        raise
                    span = go_on(trainer, FitRange(span.first, goal, span.fewer), error)
                else:
                    job.follow_plan()
                trainer.saves.begin()
                left = goal - trainer.step


def _backed_up(steps: int, replaceable: bool) -> bool:
    """Return True if backups are made by default, without backup_every."""
    host = resume_fit.host
    return replaceable and host is not None and (host.enterable or steps >= _LONG_ENOUGH)
