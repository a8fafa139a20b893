"""Snapshots of a training in host memory, every so many steps, and the way back to one of them.

Each element is kept once, by a rank that holds it, as in a checkpoint; one exchange brings it back under whatever
strategy is in force then. A rank that joins later has none of it: then all begin anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from nbkit.errors import TrainingError
from nbkit.rank.comm.agree import largest
from nbkit.rank.parallel.reshard.redistribute import Exchange, plan_collectively
from nbkit.rank.train.checkpoint import checkpoint, job_state
from nbkit.rank.train.checkpoint.autosave import Autosave
from nbkit.rank.train.checkpoint.checkpoint import Taken
from nbkit.rank.train.checkpoint.write_plan import by_name
from nbkit.rank.train.control.recovery import Progress
from nbkit.rank.train.estimate.free_memory import left
from nbkit.rank.train.job import Job
from nbkit.rank.train.replace.snapshot import Contents, copy_into, host_memory
from nbkit.rank.train.step.optimizer_state import forget, take_settings
from nbkit.records.events import Checkpointed

_SHARE_OF_FREE = 0.25  # of a host's memory: as many snapshots as fit there


class Snapshots:
    """Of one Trainer on this rank, the oldest first. every: steps; None: there are none."""

    def __init__(self, job: Job, saves: Autosave, *, every: int | None, say: Callable[[str], None]) -> None:
        self._job, self._saves, self._every, self._say = job, saves, every, say
        self._kept: list[tuple[Taken, torch.Tensor]] = []
        self._told = False

    @property
    def steps(self) -> list[int]:
        """The steps that there is a way back to."""
        return [taken.step for taken, _ in self._kept]

    def take(self) -> None:
        """A snapshot of this boundary, where one is due: the first one of all is. Collective then."""
        step = self._job.step
        if self._every is None or (self._kept and (step % self._every or step == self.steps[-1])):
            return
        job = self._job
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
            self._kept.append((replace(taken, held=copies), flat))

    def back_to(self, step: int) -> int:
        """The training is where it was after the newest of `steps` that is not beyond `step`, which is returned.

        Collective. Raises TrainingError, on every rank, where there is none.
        """
        job, before = self._job, self._job.step
        self._saves.collect(wait=True)
        job.level()
        job.ledger.settle()
        at = max((number for number, each in enumerate(self.steps) if each <= step), default=-1)
        if at < 0:
            raise TrainingError(
                f"There is no snapshot of step {step} or before.",
                numbers=f"snapshots of steps {', '.join(map(str, self.steps))}" if self._kept else "there are none",
                hint=f"trainer.rewind({self.steps[0]})" if self._kept else "Trainer(snapshot_every=50)",
            )
        taken, _ = self._kept[at]
        del self._kept[at + 1 :]
        about, inner, sharded_model = taken.about, job.optimizer.inner, job.sharded_model
        with job.ledger.clock.stopped(), job.integrity.changing():
            forget(inner)
            job_state.allocate(sharded_model, inner, by_name(taken.kinds), about["numbers"])
            target = job_state.state(sharded_model, inner)
            plan = plan_collectively(taken.held, {key: layout for key, (_, layout) in target.items()})
            Exchange(plan, job.rank).run(taken.held, target, device=job.device)
            sharded_model.data.refresh()
            take_settings(inner, about["settings"])
        records = [record for record in job.ledger.records if record["step"] <= taken.step]
        job.rewind(Progress(about["precision"], taken.step, records, about["position"]))
        self._saves.rewound()
        job.ledger.emit(Checkpointed(job.step, path="a snapshot", action="loaded", before=before))
        return job.step

    def clear(self) -> None:
        """There is no way back any more."""
        self._kept.clear()

    def _make_room(self, num_bytes: int) -> bool:
        """Let go of the oldest until another one of `num_bytes` has room; whether it has. Collective."""
        sizes = [flat.numel() for _, flat in self._kept]
        free = left(torch.device("cpu"))
        most = sum(sizes) + num_bytes if free is None else int(_SHARE_OF_FREE * (free + sum(sizes)))
        gone = next((n for n in range(len(sizes)) if sum(sizes[n:]) + num_bytes <= most), len(sizes))
        lacks, gone = largest([num_bytes * (num_bytes > most), gone], device=self._job.device)
        del self._kept[:gone]
        if lacks and not self._told:
            self._told = True
            self._say(f"no snapshots: one takes {lacks / 1e6:.3g} MB of a rank, and {most / 1e6:.3g} MB may be taken")
        return not lacks
