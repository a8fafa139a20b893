"""Before a `fit`: what an error of the last one has torn is taken back from the backups, or it is said what to type.

An error in the middle of an update leaves one rank with weights that are partly new, and others before the update or
behind it. Where ranks hold the same (ddp, hsdp) those that are whole give to the others: see recovery.py. Where each
holds its own part no rank can, and the newest backup of all ranks is where they go on.
"""

from __future__ import annotations

import warnings
from typing import Any

from nbkit.errors import TrainingError
from nbkit.rank.train.replace import resume_fit

Trainer = Any  # nbkit.rank.train.trainer's, which imports this file


def mend(trainer: Trainer) -> None:
    """All ranks stand at one step, with whole weights. Collective, before steps are made.

    Raises TrainingError, on every rank, where no step is whole and nothing of it is kept.
    """
    try:
        trainer.job.level()
    except TrainingError as torn:
        if resume_fit.host is None or not trainer.job.backups.on:
            raise _named(torn, trainer.saves.last.path) from None
        _take_back(trainer, torn)


def _take_back(trainer: Trainer, torn: TrainingError) -> None:
    assert resume_fit.host is not None
    resume_fit.host.recover(trainer, ())
    job = trainer.job
    if job.rank == 0:
        warnings.warn(f"{torn.what} {torn.numbers}: all go on from step {job.step}", stacklevel=4)


def _named(torn: TrainingError, saved: Any) -> TrainingError:
    hint = "build the Trainer again: nothing is saved; backup_every=1 would have kept the step before"
    if saved is not None:
        hint = f"trainer.load({str(saved)!r})"
    return TrainingError(torn.what, numbers=torn.numbers, hint=hint)
