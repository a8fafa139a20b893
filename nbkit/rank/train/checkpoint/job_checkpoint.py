"""Save and load a job: check that this is possible, and add the values that are no tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.quoting import user_path
from nbkit.rank.comm.agree import all_gather_objects
from nbkit.rank.parallel.reshard.plain_attributes import put
from nbkit.rank.train.checkpoint import checkpoint, job_state
from nbkit.rank.train.checkpoint.manifest import writable
from nbkit.rank.train.runs_dir import check_room
from nbkit.rank.train.step.weight_average import refuse_shown
from nbkit.rank.world import meeting

Job = Any  # nbkit.rank.train.job.Job: that file imports this one


def save(job: Job, path: str | Path, *, beside: bool = False, then: Callable[[], None] | None = None) -> None:
    """Write a checkpoint: see Job.save. Collective."""
    refuse_shown(job, "A checkpoint")
    path = user_path(path).absolute()  # a thread writes later, and a cell may change the working directory before
    meeting.meet("save")
    job.builder.template.check_saves(job.strategy)
    if job.run_dir is not None:
        check_room(job.run_dir.parent, path, "no checkpoint is written", run=job.run_dir.name)
    if not job.integrity.broken_off:
        job.check_model()
    job.sync.compare_settings()
    job.sync.average_replicas()
    if names := not_finite(job):
        raise TrainingError(
            "The weights are not finite, so this checkpoint is not written, and no earlier one is replaced.",
            numbers=f"step {job.step}: {names}; not written to {str(path)!r}",
            hint="trainer.load(path) of an earlier checkpoint   (to keep these weights: trainer.full_state_dict())",
        )
    about = {"history": list(job.ledger.records), "seed": job.seed, "data": writable(job.feed.where())}
    if (outside := job.builder.facts.outside) is not None:
        about["attributes"], lost = outside.parted(job.model)
        if lost and job.rank == 0:
            named = ", ".join(map(repr, lost[:3]))
            warnings.warn(
                f"no checkpoint holds {named}, which the model or the loss changes in each pass and reads in the "
                "next pass, so a training that loads the checkpoint starts without it. Use a buffer, which a "
                "checkpoint holds",
                stacklevel=4,
            )
    job.checkpoint_writer.begin(checkpoint.take(path, job.state, job.builder, about), beside=beside, then=then)


def not_finite(job: Job) -> str:
    """Return in words which weights are not finite, and on which ranks; "" if there are none. Collective."""
    own = job_state.not_finite(job.sharded_model)
    told = all_gather_objects((own[:1], len(own)), world_size=job.world_size, device=job.device)
    ranks = [rank for rank, (_, count) in enumerate(told) if count]
    if not ranks:
        return ""
    (first,), count = told[ranks[0]]
    more = f" and {count - 1} more" if count > 1 else ""
    shown = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    return f"{first}{more} on rank{'s' * (len(ranks) > 1)} {shown}"


def opened(job: Job, path: str | Path) -> checkpoint.Saved:
    """Open the checkpoint at `path` if it fits. Changes nothing. Collective. Raises as checkpoint.opened does."""
    meeting.meet("load")
    return checkpoint.opened(user_path(path), job.state, job.builder, seed=job.seed, place_after=job.feed.after)


def load(job: Job, saved: checkpoint.Saved) -> None:
    """Load a checkpoint: see Job.load. Collective."""
    refuse_shown(job, "A load")
    job.builder.template.check_saves(job.strategy)
    about = saved.about
    with job.integrity.changing():
        checkpoint.restore(saved, job.sharded_model, job.optimizer.inner)
        job.reseed(about["seed"])
        job.ledger.replace(about["step"], about["history"], loaded=True)
        job.precision.load_state_dict(about.get("precision", {}))
        kept = ((name.rpartition("."), value) for name, value in about.get("attributes", {}).items())
        put({(path, name): value for (path, _, name), value in kept}, job.model)
    job.sync.restored()
    if saved.foreign and job.rank == 0:
        print(f"{saved.named}: continues after step {job.step} with the next batch in the order of this training")


def full_state_dict(job: Job) -> dict[str, Tensor]:
    """Return the state dict of the whole model, on the CPU, on every rank. Collective."""
    meeting.meet("full_state_dict")
    job.sync.resync()
    return checkpoint.full_state_dict(job.sharded_model, job.builder)
