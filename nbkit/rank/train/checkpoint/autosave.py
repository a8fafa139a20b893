"""Save a Trainer automatically: decide when and where to save, delete old checkpoints, and find one for `resume`."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from nbkit.durations import seconds_of
from nbkit.errors import NbkitError, TornCheckpoint, TrainingError
from nbkit.rank.comm.agree import all_gather_objects, largest
from nbkit.rank.train.checkpoint.checkpoint import check_shared
from nbkit.rank.train.config import LastCheckpoint, LoopSettings
from nbkit.rank.train.control.step_boundary import DETACHED
from nbkit.rank.train.job import Job
from nbkit.rank.train.runs_dir import runs_named
from nbkit.records.events import Checkpointed

DETACHED_SAVE_EVERY = "10min"


class Autosave:
    """Saves and resumes checkpoints. last: the newest complete one. pending: future of one that is being written."""

    def __init__(self, job: Job, loop: LoopSettings) -> None:
        self._job, self._loop = job, loop
        limits = loop.checkpoints.limits
        self._keep = None if limits is None else Keep(*limits)
        self._seconds, self._every = loop.checkpoints.seconds, loop.checkpoints.steps
        self._told, self._unsaved_s = False, 0.0
        self.last = LastCheckpoint()
        self.pending: Future[Checkpointed] | None = None

    @property
    def folder(self) -> Path:
        """The directory of automatic saves."""
        return Path(self._loop.checkpoints.path or (self._job.run_dir or Path()) / "checkpoint")

    def begin(self) -> None:
        """Begin a `fit`, or continue it after ranks were replaced. Collective if saves are due by time."""
        self.collect()
        if self._loop.checkpoints.every:
            self._job.builder.template.check_saves(self._job.strategy)
        if self._loop.saves_if_detached:
            self._seconds = seconds_of(DETACHED_SAVE_EVERY) if DETACHED.get() else None
        if self._seconds is not None:
            # After an interrupted save, some ranks may not know that it was begun.
            (tried,) = largest([self.last.tried], device=self._job.device)
            self._unsaved_s = sum(one["seconds"] for one in self._job.history if one["step"] > tried)

    def check_shared(self) -> None:
        """Raise TrainingError if the ranks do not share the folder of automatic saves. Collective.

        Call it before the first step: checkpoints in such a folder could not be read.
        """
        job, loop = self._job, self._loop
        if job.world_size > 1 and loop.checkpoints.every:
            gather = partial(all_gather_objects, world_size=job.world_size, device=job.device)
            check_shared(self.folder, rank=job.rank, gather=gather)

    def trained(self, seconds: float) -> None:
        """Add the `seconds` of a step. They are equal on every rank, so all ranks save after the same step."""
        self._unsaved_s += seconds

    def after_step(self) -> None:
        """Save if a checkpoint is due. Collective."""
        self.collect()
        step = self._job.step
        by_time = self._seconds is not None and self._unsaved_s >= self._seconds
        if by_time or (self._every and step % self._every == 0):
            try:
                self.save(self.folder if self._keep is None else place(self.folder, step), beside=True)
            except NbkitError as error:  # every rank raises the same
                self._not_saved(step, error)

    def save_at_end(self) -> str:
        """Save to the directory of automatic saves, even if none is due. Return the result in words. Collective."""
        if self._loop.checkpoints.path is None and self._job.run_dir is None:
            return "not saved: there is neither log_dir= nor a path= of nbkit.Checkpoints"
        path = self.folder if self._keep is None else place(self.folder, self._job.step)
        try:
            self.save(path, beside=False)
        except NbkitError as error:  # every rank raises the same
            return f"not saved: {error.what} {error.numbers}"
        return f"saved to {path.absolute()}"

    def save(self, path: str | Path, *, beside: bool) -> None:
        """Save to `path`. Collective. See Trainer.save."""
        job, path = self._job, Path(path).absolute()
        with job.ledger.clock.stopped():
            job.sync.resync()
            job.ledger.settle()
            self.collect(wait=True)
            self.last, self._unsaved_s = replace(self.last, tried=job.step), 0.0
            prune = None
            if self._keep is not None and path.parent == self.folder:
                prune = partial(self._keep.prune, self.folder, path)
            job.save(path, beside=beside, then=prune)
        self.pending = Future()
        self.collect()

    def collect(self, *, wait: bool = False) -> None:
        """Report the result of a save, if it is known. Call this at a step boundary, or outside of a training."""
        outcome = self._job.checkpoint_writer.outcome(wait=wait)
        if outcome is None:
            return
        pending, self.pending = self.pending, None
        if outcome.error is not None:
            self._not_saved(outcome.step, outcome.error)
            if pending is not None:
                pending.set_exception(outcome.error)
            return
        self.last = replace(self.last, path=outcome.path.absolute(), step=outcome.step)
        event = Checkpointed(outcome.step, path=str(outcome.path))
        self._job.ledger.emit(event)
        if pending is not None:
            pending.set_result(event)
        own = self.folder in (outcome.path, outcome.path.parent)
        if own and self._loop.saves_if_detached and self._seconds is not None and not self._told:
            self._told = True
            every = f"every {DETACHED_SAVE_EVERY} in a detached cell (nbkit.Checkpoints(every=False): never)"
            self._print(f"saved to {outcome.path}, as {every}")

    def loaded(self, path: str | Path) -> None:
        """Note that the checkpoint at `path` was loaded."""
        step = self._job.step
        self.last = LastCheckpoint(Path(path).absolute(), step, step)

    def rewound(self) -> None:
        """Note that the training went back to an earlier step. Later checkpoints no longer belong to it."""
        step = self._job.step
        self.last = LastCheckpoint() if self.last.step > step else self.last
        self.last = replace(self.last, tried=min(self.last.tried, step))

    def resume(self, asked: str, load: Callable[[Path], None]) -> None:
        """Call `load` with the newest complete checkpoint of this Trainer, or of an earlier run of it. Collective.

        Raises TrainingError if no setting says where to look, or if the checkpoint belongs to another model.
        """
        job, loop = self._job, self._loop
        if asked != "auto":
            raise TrainingError(f"resume={asked!r} is not possible.", numbers="'auto', None", hint="trainer.load(path)")
        if loop.checkpoints.path is None and (not loop.name or job.run_dir is None):
            raise TrainingError(
                "nbkit cannot find the checkpoints of this training, because each run has a new directory.",
                numbers=f"checkpoints={loop.checkpoints!r}, name={loop.name!r}",
                hint="checkpoints=nbkit.Checkpoints(path='checkpoints')   or   name='gpt'",
            )
        paths: list[list[Path]] = [[]]
        if job.rank == 0:
            named = [] if not loop.name or job.run_dir is None else of_runs(job.run_dir.parent, loop.name)
            paths = [found(named if loop.checkpoints.path is None else [Path(loop.checkpoints.path)])]
        if job.world_size > 1:
            dist.broadcast_object_list(paths, src=0, device=job.device)
        for path in paths[0]:
            try:
                load(path)
            except TornCheckpoint as error:
                self._print(f"{path} is skipped: {error.numbers}")
            else:
                self._print(f"continues from step {job.step}: {path}")
                return
        self._print("there is no checkpoint yet: begins at step 0")

    def _not_saved(self, step: int, error: NbkitError) -> None:
        self._print(f"not saved at step {step}, training continues: {error.what} {error.numbers}")

    def _print(self, said: str) -> None:
        if self._job.rank == 0:
            print(f"\r{said:<80}", flush=True)


_NAMED = re.compile(r"step-\d+")
_MANIFEST = ".metadata"


@dataclass(frozen=True)
class Keep:
    """Limits for the checkpoints that are kept: their number and their age in seconds. None: no limit.

    The newest checkpoint is always kept.
    """

    number: int | None
    seconds: float | None

    def prune(self, folder: Path, newest: Path) -> None:
        """Delete the checkpoints of `folder` that exceed the limits, and the remains of interrupted saves."""
        number = 1
        for path in found([folder]):
            if path == newest or not _NAMED.fullmatch(path.name):
                continue
            whole = (path / _MANIFEST).exists()
            number += whole
            old = self.seconds is not None and time.time() - _written(path) > self.seconds
            if old or not whole or (self.number is not None and number > self.number):
                with suppress(OSError):
                    (path / _MANIFEST).unlink(missing_ok=True)  # first, so that nobody reads a half-deleted checkpoint
                shutil.rmtree(path, ignore_errors=True)


def place(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step` in a folder of several checkpoints."""
    return folder / f"step-{step}"


def found(folders: Iterable[Path]) -> list[Path]:
    """Return all checkpoints in `folders`, complete or not, the newest first. A folder can be a checkpoint itself."""
    paths = [
        path
        for folder in folders
        for path in (folder, *(folder.glob("step-*") if folder.is_dir() else ()))
        if (path / _MANIFEST).exists() or (_NAMED.fullmatch(path.name) and path.is_dir())
    ]
    return sorted(paths, key=_written, reverse=True)


def of_runs(log_dir: Path, name: str) -> list[Path]:
    """Return the checkpoint directories of the runs called exactly `name`."""
    return [run / "checkpoint" for run in runs_named(log_dir, name)]


def _written(path: Path) -> float:
    for one in (path / _MANIFEST, path):
        with suppress(OSError):
            return one.stat().st_mtime
    return 0.0
