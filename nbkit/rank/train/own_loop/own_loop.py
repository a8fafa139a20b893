"""Save the job at a step boundary and end it, if a rank dies in a user's own loop over `job.batches`.

A new process replaces the dead one only to save the job. It does not run the body of the loop: the variables of the
body could differ between ranks, and only the user knows which of them matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nbkit.errors import TrainingError
from nbkit.rank.telemetry.clock_offset import clock_offset
from nbkit.rank.telemetry.collectives import mode
from nbkit.rank.train.checkpoint.autosave import Autosave
from nbkit.rank.train.config import LastCheckpoint, LoopSettings
from nbkit.rank.train.replace import resume_fit
from nbkit.rank.train.replace.resume_fit import FitRange, leave_device, meet_again

Job = Any  # nbkit.rank.train.job.Job: that file imports this one


class OwnLoop:
    """Replaces a Trainer in `recover`, for a loop over `job.batches`."""

    def __init__(self, job: Job, *, saved: LastCheckpoint | None = None) -> None:
        self.job, self.loop = job, job.own_loop
        self.saves = Autosave(job, self.loop)
        self.saves.last = saved or LastCheckpoint()
        self._running = False

    @classmethod
    def joining(cls, job: Job, loop: LoopSettings, *, run_dir: Path | None, saved: LastCheckpoint) -> OwnLoop:
        """Return the loop of a process that joins a running training. Collective: other ranks call `reopen`."""
        job.own_loop = loop
        job.record_on(run_dir)
        return cls(job, saved=saved)

    def reopen(self) -> None:
        """Prepare to save with ranks that join. Collective."""
        self.saves.collect(wait=True)
        self.job.checkpoint_writer.form_again()
        if self.run_dir is not None and mode() != "off":
            clock_offset()  # collective: ranks that join measure it

    def load(self, path: str | Path) -> None:
        """Load a checkpoint into the job. Collective."""
        self.job.load(self.job.opened(path))

    @property
    def model(self) -> torch.nn.Module:
        """The model, as this rank holds it."""
        model: torch.nn.Module = self.job.model
        return model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, as a stable handle."""
        optimizer: torch.optim.Optimizer = self.job.optimizer
        return optimizer

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return int(self.job.step)

    @property
    def run_dir(self) -> Path | None:
        """The directory of the run's records."""
        found: Path | None = self.job.run_dir
        return found

    @contextmanager
    def running(self) -> Iterator[None]:
        """Open a context for one pass over the batches."""
        assert resume_fit.host is not None
        try:
            with self.job.running():
                self._running = True
                self.job.backups.begin(self.loop.recovery.backup_every, self._say)
                self.job.back_up()
                yield
        finally:
            self._running = False
            if (last := self.saves.last).path is not None:
                resume_fit.host.kept(str(last.path), last.step)
            resume_fit.host.leave("the loop has ended")

    @contextmanager
    def saved_if_a_rank_dies(self) -> Iterator[None]:
        """Open a context for code that waits for other ranks. If one dies, save the job at a step boundary.

        Then raises TrainingError, which says where the job was saved.
        """
        try:
            yield
        except Exception as error:
            if not self._is_broken(error):
                raise
            world = meet_again(self, FitRange(0, 0), error)
            saved, path = self.saves.save_at_end(), self.saves.last.path
            load = "%cluster restart" if path is None else f"job.load(job.opened({str(path)!r}))"
            raise TrainingError(
                "A rank died in a loop of your own over job.batches.",
                numbers=f"{world.how}; the training has ended after step {self.step}, {saved}",
                hint=f"{load}   in a new job, then the loop over the batches that are left",
            ) from None

    def _is_broken(self, error: Exception) -> bool:
        if not self._running or resume_fit.host is None:
            return False
        leave_device(error)
        return resume_fit.host.is_broken(error)

    def _say(self, text: str) -> None:
        if self.job.rank == 0:
            print(text, flush=True)
