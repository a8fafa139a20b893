"""Continue `fit` after another rank has died and was replaced. Survivors and new ranks call the same collectives.

Under torchrun no process can start another rank: `host` is None, and an error ends the training as usual.

`repair_torn_update` is called before a `fit`. It repairs weights after an error in the last `fit`. An error in the
middle of an update leaves one rank with partly new weights, and other ranks before or after the update. If ranks hold
the same tensors (ddp, hsdp), ranks with complete weights send them to the others; see rank_sync.py. If each rank holds
its own part, all ranks go back to the newest backup of all ranks. Without backups, the error says what to type.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Protocol

import torch

from nbkit.errors import NbkitError, Stopped, TrainingError
from nbkit.rank.comm.agree import largest
from nbkit.rank.device import accelerator
from nbkit.rank.train.argument_checks import check_counts
from nbkit.rank.train.control import step_boundary
from nbkit.records.events import Replaced

Trainer = Any  # nbkit.rank.train.trainer.Trainer: that file imports this one


@dataclass(frozen=True)
class FitRange:
    """The steps of a `fit`: after `first` finished steps, up to step `goal`.

    fewer: the number of ranks that died, were replaced and should be removed (on_failure "shrink").
    """

    first: int
    goal: int
    fewer: int = 0

    def without(self, trainer: Trainer, dead: int) -> FitRange:
        """Return the range after `dead` more ranks have died and were replaced."""
        return replace(self, fewer=self.fewer + dead * (trainer.loop.recovery.on_failure == "shrink"))


def span_of(trainer: Trainer, steps: int | None, until: int | None) -> FitRange:
    """Return the steps that `fit(steps, until=until)` makes. Collective with `until`.

    Raises TrainingError unless exactly one of them is given.
    """
    check_counts(steps=steps, until=until)
    if (steps is None) == (until is None):
        raise TrainingError(
            "fit() takes either steps or until.",
            numbers=f"steps={steps}, until={until}",
            hint="trainer.fit(500)   or   trainer.fit(until=2000)",
        )
    if until is not None:
        trainer.job.sync.resync()  # after an interrupt ranks may differ by a step, and would not make equally many
    return FitRange(trainer.step, trainer.step + (steps or max((until or 0) - trainer.step, 0)))


def check_same_goal(goal: int, device: torch.device) -> None:
    """Raise TrainingError, on every rank, if `fit` would end after different steps on the ranks. Collective."""
    last, first = largest([goal, -goal], device=device)
    if last != -first:
        raise TrainingError(
            "The ranks called fit with different numbers of steps.",
            numbers=f"fit ends after step {-first} on one rank, and after step {last} on another",
            hint="fit with the same number on every rank; to end early, in a callback: trainer.stop_if(flag)",
        )


@dataclass(frozen=True)
class NewWorld:
    """The world after it was formed again.

    newcomers: its new ranks. how: which ranks died and why, in words. since: the time of the death (time.time()).
    devices: a sentence about the devices of new ranks, or "".
    """

    newcomers: tuple[int, ...]
    how: str
    since: float
    devices: str = ""


class RankHost(Protocol):
    """An interface to the process that has started this rank and can start another one.

    enterable: a new rank can enter the code that called `fit`. If not, it takes part until the training is saved, and
    ends.
    """

    enterable: bool

    def enter(self, trainer: Any, caller: FrameType) -> bool:
        """Note that `caller` calls `fit`, until `leave` is called. Return True if ranks that die are replaced."""
        ...

    def loop(self, job: Any) -> Any:
        """Return an OwnLoop for a new loop over `job.batches`.

        Return None if the job cannot survive the death of a rank in this loop.
        """
        ...

    def leave(self, why: str = "") -> None:
        """Report that `fit` is over. why: the error that ended it, or ""."""
        ...

    def kept(self, path: str, step: int) -> None:
        """Report the newest checkpoint after an error has ended `fit`, even if `enter` was not called."""
        ...

    def await_world(self, error: BaseException, trainer: Any, span: FitRange) -> NewWorld:
        """Wait for the world with new ranks after `error` has interrupted a step. Send the new ranks what they need.

        Raises `error` if no rank died, or if none is replaced.
        """
        ...

    def recover(self, trainer: Any, newcomers: tuple[int, ...]) -> Any:
        """Call nbkit.rank.train.replace.recover. Importing it here would be circular, because of Trainer."""
        ...

    def resize(self, wanted: Any, trainer: Any, span: FitRange | None) -> tuple[int, ...]:
        """Form a world of `wanted.ranks` ranks (see WantedWorld). Return its new ranks. Collective in the old world.

        Raises ClusterError if it cannot be formed, and Left on a rank that is not part of it.
        """
        ...

    def resized(self, trainer: Any, asked: Any, span: FitRange | None) -> None:
        """Call nbkit.rank.train.resize.resize, which cannot be imported here either.

        asked: a ResizeAtBoundary, which gets the result. Raises only errors after which the training cannot go on.
        """
        ...

    def waits(self, seconds: float, *, due: bool = False) -> None:
        """Report how long this rank has waited for other ranks; 0: it goes on. From any thread.

        due: end the rank that it waits for.
        """
        ...

    def leave_device(self, said: str) -> None:
        """End this process because its device has failed. Another process takes its place. said: the device's error."""
        ...

    def asks(self) -> bool:
        """Return True if this rank waits for input from the user. From any thread."""
        ...

    def is_broken(self, error: BaseException) -> bool:
        """Return True if a rank has died since the world was formed. This may be the cause of `error`."""
        ...

    def tell(self, said: str) -> None:
        """Tell the user that the training goes on, with the text `said`."""
        ...


host: RankHost | None = None  # set once, by the bridge


@contextmanager
def seat(trainer: Trainer, caller: FrameType, *, wanted: bool) -> Iterator[bool]:
    """Open a context for `fit`. Yield True if a rank that dies inside can be replaced."""
    if host is None:
        yield False
        return
    entered = wanted and host.enter(trainer, caller)
    try:
        yield entered
    except BaseException as error:
        if (last := trainer.saves.last).path is not None:
            host.kept(str(last.path), last.step)
        if not entered:
            raise
        why = f"{error.what} {error.numbers}" if isinstance(error, NbkitError) else f"{type(error).__name__}: {error}"
        host.leave(why)
        raise
    if entered:
        host.leave()


def leave_device(error: Exception) -> None:
    """End this process if `error` says that its device has failed. Does nothing if dead ranks are not replaced.

    A new process continues on a spare device, or on the same one.
    """
    if host is not None and (said := accelerator().failed(error)):
        host.leave_device(said)


def go_on(trainer: Trainer, span: FitRange, error: Exception) -> FitRange:
    """Recover after `error` has interrupted a step. Return the range of steps for the rest of `fit`.

    Afterwards all ranks are at the same step boundary, with new ranks in place of dead ones.

    Raises `error`, or a later error, if no rank died or it could not be replaced. Raises TrainingError if a new rank
    cannot enter the cell. Even then, all ranks are at the same boundary, and the training is saved.
    """
    assert host is not None
    world = meet_again(trainer, span, error)
    if not host.enterable:
        raise _ended(trainer, world, span) from None
    return span.without(trainer, len(world.newcomers))


def meet_again(trainer: Trainer, span: FitRange, error: Exception) -> NewWorld:
    """Bring all ranks to the same step boundary in a world with new ranks, after `error` has interrupted a step.

    Raises as `await_world` does. Also raises later errors, unless the death of another rank explains them.
    """
    assert host is not None
    reached = trainer.step
    while True:
        world = host.await_world(error, trainer, span)
        try:
            together(trainer, world, reached)
            trainer.job.follow_plan()
            return world
        except Exception as another:  # another rank has died since, or this error is final
            leave_device(another)
            if not host.is_broken(another):
                raise
            error = another


def _ended(trainer: Trainer, world: NewWorld, span: FitRange) -> TrainingError:
    """Save the training, and return the error that ends it. Collective: new ranks call `save_and_leave`."""
    saved = trainer.saves.save_at_end()
    return TrainingError(
        "A rank died in fit, and a new rank cannot continue this cell: fit is in a loop, in a function, or beside "
        "another call.",
        numbers=f"{world.how}; it was replaced, and the training has ended after step {trainer.step}, {saved}",
        hint=f"trainer.fit(until={span.goal})   as a statement of its own continues, even after a rank has died",
    )


def save_and_leave(trainer: Trainer) -> None:
    """Save the training with the other ranks, on a new rank that cannot enter the cell. Collective."""
    with suppress(Stopped), trainer.job.running(owner=trainer, joins=True):
        trainer.saves.save_at_end()
        raise Stopped("a new rank does not make steps where it cannot enter the cell")


def resized(trainer: Trainer, asked: Any, span: FitRange) -> FitRange:
    """Change the number of ranks, after a step boundary of `fit` has raised `asked`. Return `span`.

    If the new world cannot be formed, continue with the old one. Raises Left on a rank that is no longer needed.
    """
    assert host is not None
    host.resized(trainer, asked, span)
    return span


def together(trainer: Trainer | None, world: NewWorld, reached: int = 0) -> Trainer:
    """Recover the training in the new world, tell the user, and return the training. Collective.

    trainer: the training of this rank; None on a new rank. reached: the number of steps that it had finished.
    """
    assert host is not None
    trainer = host.recover(trainer, world.newcomers)
    job = trainer.job
    steps_lost = largest([reached], device=job.device)[0] - job.step
    ranks = ", ".join(map(str, world.newcomers))
    seconds = time.time() - world.since
    event = Replaced(job.step, ranks, world.how, steps_lost, seconds, world.devices)
    job.ledger.emit(event)
    if job.rank == min(set(range(job.world_size)) - set(world.newcomers)):
        host.tell(event.said)
    step_boundary.meet(job.device)  # no rank leaves the training before the user is told that it goes on
    job.ledger.begin_again()
    return trainer


def repair_torn_update(trainer: Trainer) -> None:
    """Bring all ranks to the same step with complete weights. Collective, before the first step.

    Raises TrainingError, on every rank, if no step is complete and there is no backup.
    """
    job = trainer.job
    try:
        if not job.is_running:
            job.sync.resync_now()
    except TrainingError as torn:
        if host is None or not job.backups.on:
            raise _named(torn, trainer.saves.last.path) from None
        _take_back(trainer, torn)
    job.sync.take_over()


def _take_back(trainer: Trainer, torn: TrainingError) -> None:
    assert host is not None
    host.recover(trainer, ())
    job = trainer.job
    if job.rank == 0:
        warnings.warn(f"{torn.what} {torn.numbers}: all ranks continue from step {job.step}", stacklevel=4)


def _named(torn: TrainingError, saved: Any) -> TrainingError:
    hint = (
        "build the Trainer again: nothing is saved; recovery=nbkit.Recovery(backup_every=1) would have kept "
        "the step before"
    )
    if saved is not None:
        hint = f"trainer.load({str(saved)!r})"
    return TrainingError(torn.what, numbers=torn.numbers, hint=hint)
