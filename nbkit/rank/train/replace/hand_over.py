"""Send a training to a process that joins it. A surviving rank sends all but the weights and the optimizer state."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbkit import schedules, techniques
from nbkit.errors import TrainingError
from nbkit.rank.comm.agree import agree
from nbkit.rank.parallel.reshard.plain_attributes import Attributes, put, set_since
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.telemetry.sinks import AbsentSink, InThread, Sink
from nbkit.rank.train.builder import Blueprint
from nbkit.rank.train.config import LastCheckpoint, LoopSettings
from nbkit.rank.train.control.switch_plan import SwitchPlan
from nbkit.rank.train.job import Job
from nbkit.rank.train.own_loop.own_loop import OwnLoop
from nbkit.rank.train.replace.pickle_by_value import dumps, loads
from nbkit.rank.train.trainer import Trainer
from nbkit.records.events import Switched
from nbkit.schedules import ScheduleType
from nbkit.strategy import Strategy
from nbkit.techniques import Key

_HINT = (
    "objects that a new process can import, or that a cell has defined; or recovery=nbkit.Recovery(on_failure='stop')"
)


@dataclass(frozen=True)
class TrainingHandover:
    """Everything that a new process needs to join a training, except for weights and optimizer state.

    It is equal on all survivors, except for attributes that a forward pass sets in the submodules that a rank runs.
    attributes: attributes of the model that were set since its strategy began. schedules, keys: those that the user has
    registered. sinks: see `_sinks_for_new`.
    """

    blueprint: Blueprint
    loop: LoopSettings
    plan: SwitchPlan
    strategy: Strategy
    switches: tuple[Switched, ...]
    run_dir: Path | None
    seed: int
    saved: LastCheckpoint
    attributes: Attributes
    schedules: Sequence[ScheduleType]
    keys: Sequence[Key]
    sinks: Sequence[Sink]

    def job(self, like: Job | None = None) -> Job:
        """Return the job of the new process, without a sharded model. like: see Job.joining."""
        for each in self.schedules:
            schedules.add(each)
        for key in self.keys:
            techniques.add(key)
        return Job.joining(self.blueprint, self.plan, seed=self.seed, switches=self.switches, like=like)

    def start(self, job: Job, sharded_model: ShardedModel, inner: torch.optim.Optimizer) -> None:
        """Start `job` with the model and the optimizer that were built for it. Set the model's attributes first."""
        put(self.attributes, sharded_model.module)
        job.start(sharded_model, inner)

    def trainer(self, job: Job) -> Trainer | OwnLoop:
        """Return the Trainer of the new process. Call it after `start`. Collective: see Trainer.joining."""
        kind = Trainer if self.loop.data is not None else OwnLoop
        joined = kind.joining(job, self.loop, run_dir=self.run_dir, saved=self.saved)
        job.listen(self.sinks, name=self.loop.name)
        return joined


def hand_over(
    trainer: Trainer | OwnLoop | None,
    source: int,
    newcomers: Collection[int],
    *,
    rank: int,
    device: torch.device,
    strategy: Strategy | None = None,
) -> TrainingHandover | None:
    """Send the training from rank `source` to the ranks `newcomers`. Return it there, and None elsewhere. Collective.

    strategy: the strategy to continue with; default: the one in force. Raises TrainingError, on every rank, if
    something cannot be pickled. The error names it.
    """
    packed, found = [b""], list[TrainingHandover]()

    def pack() -> None:
        if rank == source and trainer is not None and newcomers:
            packed[0] = packed_for_new(trainer, strategy or trainer.job.strategy, first=0 in newcomers)

    def unpack() -> None:
        if rank in newcomers:
            found.append(loads(packed[0]))

    agree(pack, what="The training cannot be sent to a new process.", hint=_HINT)
    for newcomer in newcomers:
        if rank == source:
            dist.send(torch.tensor(len(packed[0]), device=device), newcomer)
            dist.send(torch.frombuffer(bytearray(packed[0]), dtype=torch.uint8).to(device), newcomer)
        elif rank == newcomer:
            length = torch.zeros((), dtype=torch.int64, device=device)
            dist.recv(length, source)
            received = torch.empty(int(length), dtype=torch.uint8, device=device)
            dist.recv(received, source)
            packed[0] = received.cpu().numpy().tobytes()
    agree(unpack, what="A new process cannot read the training that was sent to it.", hint=_HINT)
    return found[0] if found else None


def handed_by(trainer: Trainer | OwnLoop, strategy: Strategy) -> TrainingHandover:
    """Return the handover of `trainer`, to continue under `strategy`."""
    job, loop, saved = trainer.job, trainer.loop, trainer.saves.last
    switches, at = tuple(job.switches), trainer.run_dir
    attributes = set_since(job.sharded_model.module, job.sharded_model.built)
    attributes = {at: value for at, value in attributes.items() if at not in job.builder.facts.caches}
    return TrainingHandover(
        job.builder.blueprint, loop, job.plan, strategy, switches, at, job.seed, saved, attributes,
        schedules.registered(), techniques.registered(), job.sinks,
    )  # fmt: skip


def packed_for_new(trainer: Trainer | OwnLoop, strategy: Strategy, *, first: bool = False) -> bytes:
    """Return the bytes that `hand_over` sends. first: rank 0 is a new process.

    Raises TrainingError if the data is an iterator, if the model has state that cannot be sent to a new process, or if
    something cannot be pickled.
    """
    job, loop = trainer.job, trainer.loop
    if loop.data is not None and not job.feed.remakes:
        raise TrainingError(
            "The data is an iterator that cannot start again, so a new process cannot continue with it.",
            numbers=f"{type(loop.data).__name__}",
            hint="an IterableDataset, or any object whose __iter__ starts again",
        )
    blueprint = job.builder.blueprint
    outside = job.builder.facts.outside
    if outside is not None and (lost := outside.parted(job.model)[1]):
        raise TrainingError(
            f"The model or the loss keeps {', '.join(map(repr, lost[:3]))}, which nbkit cannot send to a new process.",
            numbers="it changes in each pass, and the next pass reads it",
            hint="register_buffer, because buffers are sent; or recovery=nbkit.Recovery(on_failure='stop')",
        )
    try:
        return dumps(replace(handed_by(trainer, strategy), sinks=_sinks_for_new(job, first=first)))
    except Exception:
        named: dict[str, Any] = {"model": job.builder.skeleton, "optimizer": blueprint.template}
        _name_unpicklable(named | vars(loop) | vars(blueprint.config))
        raise


def _sinks_for_new(job: Job, *, first: bool) -> list[Sink]:
    """Return the sinks for a new process. They are this rank's, except on rank 0, where the sinks are open.

    An AbsentSink replaces each sink that cannot be sent. first: the new process is rank 0, so warn of these sinks.
    """
    sinks = list[Sink]()
    for sink in job.sinks:
        why = "no remaining rank has it"
        if job.rank != 0 and not isinstance(sink, AbsentSink):
            try:
                dumps(sink)
                sinks.append(sink)
                continue
            except Exception as error:
                why = f"it cannot be sent to a new process: {type(error).__name__}: {error}"
        name = sink.name if isinstance(sink, AbsentSink | InThread) else type(sink).__name__
        sinks.append(AbsentSink(name))
        if first:
            warnings.warn(f"the sink {name} gets no more events: rank 0 is a new process; {why}", stacklevel=2)
    return sinks


def _name_unpicklable(named: dict[str, Any]) -> None:
    for name, value in named.items():
        try:
            dumps(value)
        except Exception as error:
            raise TrainingError(
                f"{name}= cannot be sent to a new process.", numbers=f"{type(error).__name__}: {error}", hint=_HINT
            ) from error
