"""A training job on this rank: forward, backward and the work of a step boundary. The Trainer is built on it.

A user's own loop looks like this:

job = nbkit.prepare(model, optimizer, loss=loss_fn)
for batch in job.batches(loader):       # global batches, the same on every rank; this rank takes its rows
    result = job.backward(batch)
    job.clip(1.0); job.optimizer.step(); job.optimizer.zero_grad()
    job.log(loss=result.loss)

`evaluate` computes the loss on other data, weighted over all samples and ranks. Each sample counts once.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import default_collate

from nbkit.errors import NotFinite, Stopped, StrategyError, SwitchError, TrainingError
from nbkit.quoting import user_path
from nbkit.rank.comm.agree import any_rank
from nbkit.rank.data import data_rng
from nbkit.rank.data.batch import Shard
from nbkit.rank.data.data_rng import alike, content
from nbkit.rank.data.open_stream import shards
from nbkit.rank.data.stream import fetched, is_map_style
from nbkit.rank.device import accelerator
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.rng.seeding import SHARED
from nbkit.rank.telemetry.phases import phase
from nbkit.rank.telemetry.sinks import Sink, add_users, check_sinks
from nbkit.rank.train import argument_checks, runs_dir
from nbkit.rank.train.builder import Blueprint, Builder, Model, Optimizer
from nbkit.rank.train.config import OWN_LOOP, TrainConfig
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.active_job import note
from nbkit.rank.train.control.rank_agreement import EVERY, compare_ranks
from nbkit.rank.train.control.switch_plan import SwitchPlan, SwitchSchedule
from nbkit.rank.train.own_loop import own_gradients, torch_clip
from nbkit.rank.train.replace import resume_fit
from nbkit.rank.train.run_recorder import new_run_dir
from nbkit.rank.train.step.step_stats import StepResult
from nbkit.rank.train.switch.switch import Switchable
from nbkit.rank.world import meeting, world
from nbkit.records.events import RunStarted, RunStopped, Switched
from nbkit.trainer_options import Compute, ModelHints, Recovery, check_options


def evaluate(job: Job, data: Any, *, batch_size: int, collate: Callable[[list[Any]], Any]) -> float:
    """Return the mean loss of the job's model over one pass of `data`. Collective. The model is in eval mode meanwhile.

    Raises TrainingError if the total weight of the samples is 0.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=job.device)
    axes = job.sharded_model.axes
    if is_map_style(data):
        ends = content(lambda: fetched(data, [0, -1 % len(data)], (0, 1), collate).data) if len(data) else 0
        compare_ranks(
            {"samples": len(data), "the first and the last one": ends},
            world_size=job.world_size,
            device=job.device,
            what="data to evaluate on",
            hint="the whole data on every rank, which divides it",
        )
    with job.sharded_model.evaluating(autocast=job.training_step.precision.dtype is not None), alike():
        every = shards(data, batch_size=batch_size, rank=axes.index("dp"), ranks=axes.size("dp"), collate=collate)
        for shard in every:
            sums += job.training_step.evaluate(shard)
    if job.world_size > 1:
        dist.all_reduce(sums)
    total, count = sums.tolist()
    if not count:
        raise TrainingError("There is nothing to evaluate.", numbers=f"weight {count:g}", hint="data with samples")
    return float(total / count)


@argument_checks.prepare_call
def prepare(
    model: Model,
    optimizer: Optimizer,
    *,
    loss: Loss,
    strategy: str = "ddp",
    precision: str | None = None,
    inputs: Sequence[str] | None = None,
    seed: int = 0,
    name: str | None = None,
    log_dir: str | None = runs_dir.DEFAULT,
    sinks: Sequence[Sink] = (),
    compute: Compute = Compute(),
    recovery: Recovery = Recovery(),
    hints: ModelHints = ModelHints(),
    switches: SwitchSchedule = None,
) -> Job:
    """Return a job for a user who has a loop of their own. Collective: every rank calls it.

    model: an nn.Module, or a callable that builds one. optimizer: a callable given the model, or, for a model that is a
    module, an optimizer of its parameters. loss: (output, target) -> mean or (sum, weight). inputs: the names of the
    entries of a dict batch that the model takes; loss then gets (output, batch). precision: None, "bf16" or "fp16".
    hints: `nbkit.ModelHints(example=batch)` gives a small batch to run the model on, which pipelines and context
    parallelism need, and tensor parallelism for all but well-known classes. recovery: `nbkit.Recovery` with on_failure
    "replace", where a rank that dies in a loop over `batches` is replaced by one that helps to save the job
    (docs/clusters.md), or "stop". For all other arguments see Trainer.
    Raises TrainingError or StrategyError if it could not train as asked.
    """
    check_options(compute=compute, hints=hints, recovery=recovery)
    config = TrainConfig(loss, seed, inputs, precision, compute, hints)
    argument_checks.check_own_loop(recovery, compute)
    check_sinks(sinks)
    job = Job(model, optimizer, config, strategy=strategy, switches=switches)
    job.own_loop = replace(OWN_LOOP, recovery=replace(recovery, on_oom="raise"))
    job.check_plan()
    job.record(log_dir, name=name)
    job.listen(sinks, name=name)
    return job


class Job(Switchable):
    """A training driven by a loop, the user's own or the Trainer's. See nbkit.rank.train.step.step for the step.

    own_loop: the settings of a loop over `batches`.
    """

    def __init__(
        self, model: Model, optimizer: Optimizer, config: TrainConfig, *, strategy: str, switches: SwitchSchedule = None
    ) -> None:
        self.plan = SwitchPlan(switches)
        first = self.plan.first(strategy)
        super().__init__(model, optimizer, config, strategy=first, later=self.plan.ahead)

    @classmethod
    def joining(
        cls,
        blueprint: Blueprint,
        plan: SwitchPlan,
        *,
        seed: int,
        switches: Sequence[Switched],
        like: Job | None = None,
    ) -> Job:
        """Return the job of a process that joins a running training. It has no sharded model before `start`.

        like: this process's job in an earlier world. The new job takes over the model object that its user holds.
        """
        self = cls.__new__(cls)
        here = self._take_place()
        self._begin(Builder.joining(blueprint, module=None if like is None else like.model, **here))
        if like is not None:
            self.recorder.base_bytes = like.recorder.base_bytes
        self.plan, self.seed, self.switches = plan, seed, list(switches)
        return self

    def start(self, sharded_model: ShardedModel, inner: torch.optim.Optimizer) -> None:
        """See Training.start."""
        super().start(sharded_model, inner)
        # Weak, so that a `break` ends the loop. After an error the traceback keeps it alive: `_leave_loop` ends it.
        self._loop: weakref.ref[Generator[Any, None, None]] | None = None
        self.own_loop = OWN_LOOP
        self._own: Any = None  # the OwnLoop that read batches last, if ranks are replaced in it
        note(self)
        torch_clip.watch(self)
        own_gradients.watch(self)

    def record(self, log_dir: str | None, *, name: str | None = None, batch: int | None = None) -> None:
        """Record everything from now on in a new directory under `log_dir`; None: nothing. Collective."""
        if log_dir is not None:
            made = new_run_dir(
                str(user_path(log_dir)),
                name=None if name is None else str(name),
                batch=batch,
                strategy=str(self.strategy),
                rank=self.rank,
                world_size=self.world_size,
                device=self.device,
            )
            self.record_on(made)

    def record_on(self, run_dir: Path | None) -> None:
        """Record into a directory that exists, such as that of a training that this process joins. Collective."""
        self.run_dir = run_dir
        if run_dir is not None:
            self.recorder.record_into(
                run_dir, self.ledger.bus, strategy=str(self.strategy), rank=self.rank, world_size=self.world_size
            )

    def listen(self, sinks: Sequence[Sink], *, name: str | None) -> None:
        """Hand all events to these sinks on rank 0. The other ranks keep theirs for a process that replaces rank 0."""
        self.sinks = tuple(sinks)
        if self.rank != 0:
            return
        run = {
            "name": name,
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            "strategy": str(self.strategy),
            "world_size": self.world_size,
            "parameters": sum(parameter.numel() for parameter in self.builder.skeleton.parameters()),
        }
        self.sinks = add_users(self.ledger.bus, sinks, run)

    @property
    def history(self) -> list[dict[str, Any]]:
        """Return one dict per finished step, the same on every rank. Within a run it is one step behind."""
        if not self._running:
            self.ledger.settle()
        return self.ledger.records

    @argument_checks.batches_call
    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator over the loader's batches, with a step boundary after each.

        The loader gives *global* batches, in the same order on every rank; `backward` takes this rank's rows. Random
        numbers of a DataLoader or dataset are seeded here, so that the ranks agree. A loop that was left by an error
        ends when the next one begins.
        """
        argument_checks.check_loader(loader)
        self._leave_loop()
        batches = self._steps(loader)
        self._loop = weakref.ref(batches)
        return batches

    def _steps(self, loader: Iterable[Any]) -> Generator[Any, None, None]:
        """Yield the loader's batches. Reading is seeded for each step, and its time counts as the phase "data"."""
        host = resume_fit.host
        own = self._own = None if host is None else host.loop(self)
        with self.running() if own is None else own.running():
            batches, end = None, object()
            while True:
                with phase("data"):
                    data_rng.seed(self.seed, self.step, SHARED)
                    batches = iter(loader) if batches is None else batches
                    batch = next(batches, end)
                if batch is end:
                    with self._in_order():
                        self.arrive()
                    return
                yield batch
                with self._in_order():
                    self.at_boundary()

    def _update(self) -> None:
        with self._in_order():
            super()._update()

    def _in_order(self) -> AbstractContextManager[None]:
        """Return a context for waiting on other ranks. In a loop of the user's own it saves the job if one dies."""
        return nullcontext() if self._own is None else self._own.saved_if_a_rank_dies()

    def _leave_loop(self, error: BaseException | None = None) -> None:
        """End the newest loop over `batches`. error: what ends it, if it is running."""
        if self._loop is not None and (batches := self._loop()) is not None:
            if error is not None:
                self.ledger.ended_by(error)
            batches.close()
        self._loop = None

    def backward(self, batch: Any) -> StepResult:
        """Run forward and backward of one global batch (or of this rank's Shard of it), in micro-batches.

        Afterwards every rank holds the same gradients: those of the loss over the whole global batch.
        On CPU ranks it raises NotFinite before the weights are touched. On GPUs `at_boundary` raises it one step later.
        """
        if self.training_step.reduced:
            raise TrainingError(
                "backward() twice in one step: the gradients hold the sum over all ranks already.",
                numbers=f"step {self.step + 1}",
                hint="job.optimizer.step(); job.optimizer.zero_grad()   "
                "(to accumulate: compute=nbkit.Compute(microbatch_size=...))",
            )
        if not self._running:
            self.ledger.settle(keep=1)
        self._handle.check()
        if not self.integrity.broken_off:
            own_gradients.refuse_before(self)
        new, place = str(self.strategy), self._place()
        self.ledger.begun = True
        while True:
            try:
                # This covers taking the rows, seeding, and the check that the loss is finite too.
                with self._in_order(), self.first_step() as first, phase("backward"):
                    result = self.training_step.backward(self.training_step.rows(batch))
            except BaseException as error:
                self.ledger.begun = False
                self.integrity.broken_off = not isinstance(error, NotFinite)
                self.optimizer.zero_grad()
                if isinstance(error, NotFinite) and not error.spoiled and (names := self.not_finite()):
                    argument_checks.blame_weights(error, names, self.ledger.made_last)
                self._leave_loop(error)  # its generator does not know that the body of the loop was left
                if isinstance(error, Exception) and (parted := meeting.parted()) is not None:
                    raise parted from None
                raise
            if not first.taken_back:
                return result
            if isinstance(batch, Shard) and self._place() != place:
                raise TrainingError(
                    f"The rows of this batch were cut for {new}, which was taken back.",
                    numbers=f"data-parallel place {place}, now {self._place()}",
                    hint="job.backward(batch) with the global batch, or the next one",
                )

    def _place(self) -> tuple[int, int]:
        """Return (number of this rank's part of a global batch, number of parts)."""
        axes = self.sharded_model.axes
        return axes.index("dp"), axes.size("dp")

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`.

        Returns the norm before scaling, as a tensor that is not waited for.
        """
        with self._passed_over(), self._in_order():
            return self.training_step.clip(max_norm)

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of all gradients, on the device. It is recorded in this step's history."""
        with self._passed_over(), self._in_order():
            return self.training_step.grad_norm()

    @contextmanager
    def _passed_over(self) -> Iterator[None]:
        """Drop the gradients and leave the loop if NotFinite is raised inside. Another batch may follow."""
        try:
            yield
        except NotFinite as error:
            self.optimizer.zero_grad()
            self._leave_loop(error)
            raise

    def evaluate(self, data: Any, *, batch_size: int, collate: Callable[[list[Any]], Any] = default_collate) -> float:
        """Return the mean loss over one pass of `data`. Collective, between two steps, under any strategy.

        data: samples as a DataLoader takes them; each counts once. batch_size: rows of a global batch. The model is in
        eval mode meanwhile. Raises TrainingError if the total weight of the samples is 0.
        """
        with self.ledger.clock.stopped():
            meeting.meet("evaluate")
            self.level()
            return evaluate(self, data, batch_size=batch_size, collate=collate)

    def log(self, **numbers: float | Tensor) -> None:
        """Add numbers to the record of the step just made. 0-dimensional tensors are not waited for.

        Give the same numbers on every rank, so that `history` stays equal on all of them. `loss` is there already.
        """
        self.ledger.log(numbers)

    @contextmanager
    def running(
        self, *, total: int = 0, owner: Any = None, arithmetic: str = "", joins: bool = False
    ) -> Iterator[None]:
        """Make steps inside. Requests are served at step boundaries, and the history is complete afterwards.

        joins: other ranks are inside already. Collective if they are not.
        """
        if isinstance(other := step_boundary.training(), Job):
            other._leave_loop()
        if step_boundary.training() is not None:
            raise TrainingError(
                "A training runs already.",
                numbers=f"it has made {step_boundary.training().step} steps",
                hint="wait, or stop it",
            )
        if not joins:
            if owner is None:
                meeting.meet("a loop over job.batches")
            self.level()  # a ZeRO 3 step that was broken off shows whole parameters until this call
            self.compare_ranks()
        else:
            self.check_model()
        reason = "error"
        try:
            # Within `try`: an interrupt from here on must reach `leave`, or every later training is refused.
            if not joins:
                step_boundary.forget(self.device)
            step_boundary.enter(owner or self)
            meeting.begin_run(step_boundary.run, lambda: self.ledger.making)
            self._running = True
            self.ledger.emit(RunStarted(self.step, strategy=str(self.strategy), arithmetic=arithmetic, total=total))
            self.ledger.begin(total)
            self.follow_plan()
            with data_rng.own_draws():
                yield
            self.sharded_model.data.settle()
            self.ledger.settle(act=True)
            self._prove()
            self.level()
            reason = "done"
        except BaseException as error:
            if isinstance(error, GeneratorExit):
                meeting.leave()  # the loop was left on this rank; ranks that go on are told
            if lost := accelerator().context_lost(error):
                reason = self.ledger.ended_by(error)
                raise TrainingError(
                    f"The CUDA context of rank {self.rank} is gone, and with it what it holds on its GPU.",
                    numbers=lost,
                    hint="%cluster restart, then trainer.load(path). CPU ranks name an index out of range",
                ) from error
            self.integrity.broken_off |= not isinstance(error, Stopped | GeneratorExit | NotFinite)
            reason = self.ledger.ended_by(error)
            meeting.end_run()
            self.break_off()
            self.backups.abandon()
            if isinstance(error, Exception) and (parted := meeting.parted()) is not None:
                raise parted from None
            raise
        finally:
            meeting.end_run()
            self._running = self.ledger.at_once = False
            step_boundary.leave()
            self.ledger.emit(RunStopped(self.step, reason=reason))

    def break_off(self) -> None:
        """Drop what is left of a step that was broken off, and read the numbers of the steps that were made."""
        here, half_way = world.current(), self.ledger.torn() | self.integrity.half_way
        self.integrity.half_way = True  # in case this is interrupted
        whole = self.sharded_model.data.break_off(broken=here is None or bool(here.dirty))
        self.integrity.half_way = half_way or not whole
        self._stays()
        with suppress(NotFinite):
            self.ledger.settle()
        self.ledger.pending.clear()
        self.optimizer.zero_grad()

    def arrive(self) -> None:
        """Wait at the end of a run until all ranks are there. Collective.

        So no rank has left the training while one that dies can still be replaced.
        """
        self.sharded_model.data.settle()
        self.ledger.settle(act=True)
        meeting.arrive()
        here = torch.ones((), device=self.device)
        dist.all_reduce(here)
        if (found := int(here)) != self.world_size:  # broken off on a device, where no call raises
            raise TrainingError(
                "The ranks did not meet at the end of the training.",
                numbers=f"{found} of {self.world_size}",
                hint="train again: the ranks go on from one that has whole weights",
            )

    def stop_if(self, flag: bool) -> bool:
        """Return True on every rank if `flag` is true on any: `if job.stop_if(loss < 0.1): break`. Collective.

        A rank that leaves a loop alone would leave the others waiting for it.
        """
        meeting.meet("stop_if")
        return any_rank(bool(flag), device=self.device)

    def at_boundary(self) -> None:
        """Act between two steps: read the numbers of the step before last, and serve requests that all ranks hold."""
        self.recorder.at_boundary(self.step)
        self.training_step.boundary()
        if self.step % EVERY == 0:
            self.compare_ranks()
            if self.sharded_model.data.apart == 1:
                self.training_step.compare_buffers()
        self.follow_plan()
        self.back_up()

    def check_plan(self) -> None:
        """Raise now what a planned switch would raise for its ranks, data, optimizer or model. Collective."""
        for old, new in itertools.pairwise([self.strategy, *self.plan.check(self.parsed, self.feed.fits)]):
            if str(old) != str(new):
                self.builder.template.check_moves(old, new)
                self.builder.agree_on(new)

    def follow_plan(self) -> None:
        """Switch, if the plan says so for this step."""
        if (strategy := self.plan.due(self.step)) is None:
            return
        try:
            self.switch(strategy)
        except (SwitchError, StrategyError):
            self.plan.done(self.step)
            raise
        # Only now: a switch that is broken off, as by a lack of memory on another rank, stays due on all ranks.
        self.plan.done(self.step)
        if self.pending is not None:
            # Nobody waits for this result. If the switch is taken back, training goes on under the old strategy.
            self.pending.add_done_callback(lambda pending: _warn_if_taken_back(pending.exception()))

    def seed_data(self, *, own: bool) -> tuple[int, int, int]:
        """Seed the random numbers drawn while reading the next batch, and return the seed.

        own: another seed for each rank's part of the data; otherwise the same on every rank.
        """
        rank = self.world_size + 1 + self.sharded_model.axes.index("dp") if own else SHARED
        data_rng.seed(self.seed, self.step, rank)
        return self.seed, self.step, rank


def _warn_if_taken_back(error: BaseException | None) -> None:
    if error is not None:
        warnings.warn(f"a planned switch was taken back: {error}", stacklevel=2)
