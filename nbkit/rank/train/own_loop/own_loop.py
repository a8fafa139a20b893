"""A loop over `job.batches` that is a statement of a cell, and goes on when a rank dies, as a `fit` does.

After a death all ranks leave the loop's body where they stand. The job goes back to a boundary that all have reached,
the names that the body uses are those of that boundary again, and the statement is run again, on new ranks too. The
batches up to the boundary are read again, each under the seed of its step, and compared; no body runs for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nbkit.errors import TrainingError
from nbkit.rank.telemetry.clock_offset import clock_offset
from nbkit.rank.telemetry.collectives import mode
from nbkit.rank.train.checkpoint.autosave import Autosave
from nbkit.rank.train.config import LastCheckpoint, LoopSettings
from nbkit.rank.train.own_loop.batch_checksum import NoChecksum, checksum
from nbkit.rank.train.replace import resume_fit
from nbkit.rank.train.replace.resume_fit import NewWorld, Span, leave_device, meet_again

Job = Any  # nbkit.rank.train.job's, which asks the host for the loop that it is read in

_KEPT = 2  # boundaries beside those of which there are backups: ranks differ by one


@dataclass(frozen=True)
class Boundary:
    """The body has run for the batches before it. step: finished steps. go_back: makes names what they were here."""

    step: int
    go_back: Callable[[], None]


@dataclass(frozen=True)
class Read:
    """A batch that was read after `step` finished steps. content: its checksum; None where none can be made."""

    step: int
    content: int | None


class OwnLoop:
    """What `recover` and its like take for the Trainer of a `fit`. reads: the batches that a body was run for.

    take_names: called at each boundary; see Boundary.go_back. ends: why it cannot go on after a death, or "".
    enterable: it is a statement that can be run again; else the job is saved after a death, and the loop ends.
    """

    def __init__(
        self, job: Job, *, enterable: bool = True, joins: bool = False, saved: LastCheckpoint | None = None
    ) -> None:
        self.job, self.loop, self.joins, self.enterable = job, job.own_loop, joins, enterable
        self.saves = Autosave(job, self.loop)
        self.saves.last = saved or LastCheckpoint()
        self.reads: list[Read] = []
        self.take_names: Callable[[], Callable[[], None]] = lambda: lambda: None
        self.ends = "" if enterable else "it is no statement of its own in the cell, or its loader cannot begin again"
        self._kept: dict[int, Boundary] = {}
        self._around: AbstractContextManager[None] | None = None
        self._pass = 0
        self._finished = self._once = False

    @classmethod
    def joining(cls, job: Job, loop: LoopSettings, *, run_dir: Path | None, saved: LastCheckpoint) -> OwnLoop:
        """The loop of a process that joins a training under way. Collective: the others `reopen`."""
        job.own_loop = loop
        job.record_on(run_dir)
        return cls(job, joins=True, saved=saved)

    def reopen(self) -> None:
        """Beside ranks that join. Collective."""
        self.saves.collect(wait=True)
        self.job.checkpoint_writer.form_again()
        if self.run_dir is not None and mode() != "off":
            clock_offset()  # which ranks that join measure

    def load(self, path: str | Path) -> None:
        """The job is that of a checkpoint. Where that is in the loop, nobody knows. Collective."""
        self.job.load(self.job.opened(path))
        self.ends = "it went back to a checkpoint"

    @property
    def model(self) -> torch.nn.Module:
        """What this rank holds."""
        model: torch.nn.Module = self.job.model
        return model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """As a stable handle."""
        optimizer: torch.optim.Optimizer = self.job.optimizer
        return optimizer

    @property
    def step(self) -> int:
        """Finished steps."""
        return int(self.job.step)

    @property
    def run_dir(self) -> Path | None:
        """Where it is recorded."""
        found: Path | None = self.job.run_dir
        return found

    @property
    def boundaries(self) -> dict[int, int]:
        """Batches that were read -> finished steps, of the boundaries that this rank can go back to."""
        return {number: each.step for number, each in self._kept.items()}

    @contextmanager
    def running(self) -> Iterator[None]:
        """One pass over the batches. The first begins the training, which goes on over further ones, until `end`."""
        self._pass += 1
        own, self._finished = self._pass, False
        if self._around is None:
            around = self.job.running(joins=self.joins)
            around.__enter__()
            self._around = around
            if not self.joins:
                self.job.backups.begin(self.loop.backup_every, self._say)
                self.job.back_up()
            self.boundary()
        yield
        self._finished = own == self._pass  # not after a break, an error or a death

    @contextmanager
    def running_once(self) -> Iterator[None]:
        """The only pass over the batches, where the loop is not to be run again."""
        assert resume_fit.host is not None
        try:
            with self.job.running():
                self._once = True
                self.job.backups.begin(self.loop.backup_every, self._say)
                self.job.back_up()
                yield
        finally:
            self._once = False
            if (last := self.saves.last).path is not None:
                resume_fit.host.kept(str(last.path), last.step)
            resume_fit.host.leave("the loop has ended")

    @contextmanager
    def ending_in_order(self) -> Iterator[None]:
        """Whatever waits for other ranks, inside: where one has died, and the loop cannot be run again, all meet at a
        boundary and save. Raises TrainingError then, which says where."""
        try:
            yield
        except Exception as error:
            if not self.enterable and self.goes_on(error):
                go_on(self, error)
            raise

    def arrive(self) -> None:
        """No rank reads a further batch. See Job.arrive."""
        if self._around is not None:
            self.job.arrive()

    def end(self, error: BaseException | None = None) -> None:
        """No further batch is read. error: what has ended the loop. Collective without one."""
        around, self._around = self._around, None
        if around is None:
            return
        if error is None and not self._finished:
            error = GeneratorExit()
        around.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def again(self, number: int, batch: Any, *, over: bool) -> bool:
        """Whether a body was run for batch `number` before. over: there is none. Raises TrainingError if it differs."""
        before = number < len(self.reads)
        if over and not before:
            return False
        content = None if over else self._content(batch)
        if not before:
            self.reads.append(Read(self.step, content))
        elif over or content != self.reads[number].content:
            there = f"it has {number} batches now" if over else "its contents are others now"
            raise TrainingError(
                "A rank died, and the loader does not give again what it gave before.",
                numbers=f"batch {number} of the {len(self.reads)} that were trained on: {there}",
                hint="a loader that gives the same each time: draws of torch, numpy and random are seeded by the job",
            )
        return before

    def _content(self, batch: Any) -> int | None:
        try:
            return checksum(batch)
        except NoChecksum as part:
            self.ends = self.ends or f"no checksum can be made of its batches, which hold {part}"
            return None

    def boundary(self) -> None:
        """The body has run for all batches that were read: from here it may go on after a death."""
        self._kept[len(self.reads)] = Boundary(self.step, self.take_names())
        backed_up = {each.step for each in self.job.backups.own}
        newest = {each.step: number for number, each in sorted(self._kept.items()) if each.step in backed_up}
        kept = {*sorted(self._kept)[-_KEPT:], *newest.values()}
        self._kept = {number: each for number, each in self._kept.items() if number in kept}

    def go_back(self, number: int | None) -> None:
        """The job stands at the boundary after `number` batches; None: where the body had run in part."""
        self._pass += 1
        if number is None:
            self.ends = self.ends or "the rank died while others were in the loop's body behind the update of that step"
            return
        self._kept[number].go_back()
        del self.reads[number:]
        self._kept = {each: boundary for each, boundary in self._kept.items() if each <= number}

    def goes_on(self, error: BaseException) -> bool:
        """Whether `error`, in the body, is that of a rank that has died and is replaced."""
        if not (self._around is not None or self._once) or resume_fit.host is None:
            return False
        if isinstance(error, Exception):
            leave_device(error)
        return resume_fit.host.is_broken(error)

    def join(self, span: Span) -> None:
        """See Trainer.join: how many steps are left says the loader."""

    def _say(self, text: str) -> None:
        if self.job.rank == 0:
            print(text, flush=True)


def common(everyone: Sequence[Mapping[int, int] | None]) -> dict[int, int] | None:
    """The boundaries of all of these ranks; None where they make the steps of a `fit`."""
    found = [each for each in everyone if each is not None]
    if not found:
        return None
    return {number: step for number, step in found[0].items() if all(each.get(number) == step for each in found)}


def go_on(loop: OwnLoop, error: Exception) -> None:
    """`error` has ended the body on this rank. Return where the statement is to be run again, on all ranks.

    Raises `error` or what was raised on the way, where no rank died or none is replaced; and TrainingError, with all
    ranks at one boundary and the job saved, where the loop cannot go on as it was.
    """
    world = meet_again(loop, Span(0, 0), error)
    if loop.ends:
        raise _ended(loop, world) from None


def _ended(loop: OwnLoop, world: NewWorld) -> TrainingError:
    """Collective, with `save_and_leave` on a new rank."""
    saved, path = loop.saves.save_at_end(), loop.saves.last.path
    load = "%cluster restart" if path is None else f"job.load(job.opened({str(path)!r}))"
    return TrainingError(
        f"A rank died in a loop over job.batches that cannot go on as it was: {loop.ends}.",
        numbers=f"{world.how}; it was replaced, and the training has ended after step {loop.step}, {saved}",
        hint=f"{load}   in a new job, then the loop over the batches that are left",
    )
