"""Take snapshots of a training in host memory, every n steps, for `trainer.rewind`.

As in a checkpoint, each element is kept once, by a rank that holds it. One exchange restores a snapshot under the
strategy that is in force then. A rank that joins later has no part of the snapshots, so all ranks drop theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.rank.comm.agree import largest
from nbkit.rank.parallel.reshard.redistribute import Exchange, plan_collectively
from nbkit.rank.train.checkpoint import checkpoint, job_state
from nbkit.rank.train.checkpoint.autosave import Autosave
from nbkit.rank.train.checkpoint.checkpoint import Taken
from nbkit.rank.train.checkpoint.job_state import by_name
from nbkit.rank.train.control.rank_sync import TrainingProgress
from nbkit.rank.train.estimate.free_memory import left
from nbkit.rank.train.job import Job
from nbkit.rank.train.replace.backup import Contents, copy_into, host_memory
from nbkit.rank.train.step.optimizer_state import forget, take_settings
from nbkit.rank.train.step.weight_average import refuse_shown
from nbkit.rank.train.transaction import Savepoint
from nbkit.records.events import Checkpointed

_SHARE_OF_FREE = 0.25  # fraction of a host's free memory for snapshots


class Snapshot(Savepoint):
    """This rank's part of the state after one step. flat: the memory of its tensors."""

    def __init__(self, job: Job, taken: Taken, flat: Tensor) -> None:
        super().__init__(job)
        self.flat, self._taken = flat, taken

    def restore_all(self, job: Job, error: Exception | None = None) -> None:
        """Restore the snapshot on all ranks, under the strategy in force now. Collective."""
        taken, about = self._taken, self._taken.about
        inner, sharded_model = job.optimizer.inner, job.sharded_model
        with job.ledger.clock.stopped(), job.integrity.changing():
            forget(inner)
            job_state.allocate(sharded_model, inner, by_name(taken.kinds), about["numbers"])
            target = job_state.state(sharded_model, inner)
            plan = plan_collectively(taken.held, {key: layout for key, (_, layout) in target.items()})
            Exchange(plan, job.rank).run(taken.held, target, device=job.device)
            sharded_model.data.refresh()
            take_settings(inner, about["settings"])
        records = [record for record in job.ledger.records if record["step"] <= self.step]
        job.rewind(TrainingProgress(about["precision"], self.step, records, about["position"]))


class Snapshots:
    """The snapshots of one Trainer on this rank, the oldest first. every: take one every n steps; None: take none."""

    def __init__(self, job: Job, saves: Autosave, *, every: int | None, say: Callable[[str], None]) -> None:
        self._job, self._saves, self._every, self._say = job, saves, every, say
        self._kept: list[Snapshot] = []
        self._told = False

    @property
    def steps(self) -> list[int]:
        """The steps that have a snapshot."""
        return [snapshot.step for snapshot in self._kept]

    def take(self) -> None:
        """Take a snapshot between these two steps if one is due, or if there is none yet. Collective if one is due."""
        if self._every is None:
            return
        job, step = self._job, self._job.step
        if self._kept and (step % self._every or step == self._kept[-1].step):
            return
        job.builder.template.check_saves(job.strategy)
        with job.ledger.clock.stopped():
            job.ledger.settle()
            taken = checkpoint.take("", job.state, job.builder, {"seed": job.seed})
            contents = Contents.by_key(taken.held, taken.shares)
            if not self._make_room(contents.num_bytes):
                return
            flat = host_memory(contents.num_bytes, job.device)
            copies = contents.views(flat)
            copy_into(copies, taken.held)
            self._kept.append(Snapshot(job, replace(taken, held=copies), flat))

    def back_to(self, step: int) -> int:
        """Go back to the newest snapshot of `step` or an earlier step, and return its step. Collective.

        Raises TrainingError, on every rank, if there is none.
        """
        refuse_shown(self._job, "A rewind")
        job, before = self._job, self._job.step
        self._saves.collect(wait=True)
        job.sync.resync()
        job.ledger.settle()
        at = max((number for number, each in enumerate(self.steps) if each <= step), default=-1)
        if at < 0:
            raise TrainingError(
                f"There is no snapshot of step {step} or earlier.",
                numbers=f"snapshots of steps {', '.join(map(str, self.steps))}" if self._kept else "there are none",
                hint=f"trainer.rewind({self.steps[0]})"
                if self._kept
                else "checkpoints=nbkit.Checkpoints(snapshot_every=50)",
            )
        del self._kept[at + 1 :]
        self._kept[at].restore_all(job)
        self._saves.rewound()
        job.ledger.emit(Checkpointed(job.step, path="a snapshot", action="loaded", before=before))
        return job.step

    def clear(self) -> None:
        """Drop all snapshots."""
        self._kept.clear()

    def _make_room(self, num_bytes: int) -> bool:
        """Drop the oldest snapshots until a new one of `num_bytes` fits. Return True if it fits. Collective."""
        sizes = [snapshot.flat.numel() for snapshot in self._kept]
        free = left(torch.device("cpu"))
        most = sum(sizes) + num_bytes if free is None else int(_SHARE_OF_FREE * (free + sum(sizes)))
        gone = next((n for n in range(len(sizes)) if sum(sizes[n:]) + num_bytes <= most), len(sizes))
        lacks, gone = largest([num_bytes * (num_bytes > most), gone], device=self._job.device)
        del self._kept[:gone]
        if lacks and not self._told:
            self._told = True
            self._say(
                f"no snapshots: one needs {lacks / 1e6:.3g} MB on a rank, and only {most / 1e6:.3g} MB may be used"
            )
        return not lacks
