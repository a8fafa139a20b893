"""A training job on this rank: forward, backward and the work between two steps. The Trainer is built on it.

A user's own loop looks like this:

job = nbkit.prepare(model, optimizer, loss=loss_fn)
for batch in job.batches(loader):       # global batches, the same on every rank; this rank takes its rows
    result = job.backward(batch)
    job.clip(1.0); job.optimizer.step(); job.optimizer.zero_grad()
    job.log(loss=result.loss)

Without `loss=`, the loop calls the model and computes the loss itself:

    x, y = job.rows(batch)
    job.backward(F.mse_loss(job.model(x), y))

`evaluate` computes the mean loss on other data over all ranks. Each sample counts once.
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
from torch import Tensor, nn
from torch.utils.data import default_collate

from nbkit.errors import NotFinite, Stopped, StrategyError, SwitchError, TrainingError
from nbkit.planner.link_speed import WorldLinks, ranks_of_node
from nbkit.quoting import user_path
from nbkit.rank.comm.agree import any_rank
from nbkit.rank.comm.link_probe import link_of
from nbkit.rank.data import data_rng
from nbkit.rank.data.batch import Shard
from nbkit.rank.data.data_rng import alike, content
from nbkit.rank.data.data_state import DataHooks
from nbkit.rank.data.open_stream import shards
from nbkit.rank.data.stream import fetched, is_map_style
from nbkit.rank.device import accelerator
from nbkit.rank.loss.output_tensors import loss_of_outputs
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.rng.seeding import SHARED
from nbkit.rank.telemetry.phases import phase
from nbkit.rank.telemetry.sinks import Sink, add_users, check_sinks
from nbkit.rank.train import argument_checks, runs_dir
from nbkit.rank.train.builder import Blueprint, Builder, Model, Optimizer
from nbkit.rank.train.checkpoint import job_checkpoint
from nbkit.rank.train.checkpoint.checkpoint import Saved
from nbkit.rank.train.checkpoint.job_state import bytes_per_element
from nbkit.rank.train.checkpoint.writer import CheckpointWriter
from nbkit.rank.train.config import OWN_LOOP, TrainConfig
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.rank_sync import EVERY, Integrity, RankSync, TrainingProgress, compare_ranks
from nbkit.rank.train.control.step_boundary import note
from nbkit.rank.train.control.switch_plan import SwitchPlan, SwitchSchedule
from nbkit.rank.train.estimate.cost_model import CostModel
from nbkit.rank.train.estimate.recommend import AUTO, ordered, recommend
from nbkit.rank.train.own_loop import user_gradients
from nbkit.rank.train.own_loop.forward_step import ForwardStep, in_two
from nbkit.rank.train.own_loop.own_forward import OwnForward, other_jobs_left_out
from nbkit.rank.train.replace import resume_fit
from nbkit.rank.train.replace.backup import Backups
from nbkit.rank.train.run_facts import run_facts
from nbkit.rank.train.run_recorder import Recorder, new_run_dir
from nbkit.rank.train.step.history import History
from nbkit.rank.train.step.model_handle import ModelHandle, show_again, shown_by
from nbkit.rank.train.step.optimizer_mode import follow_modes
from nbkit.rank.train.step.optimizer_state import OptimizerHandle, settings_of
from nbkit.rank.train.step.precision import Precision
from nbkit.rank.train.step.step import TrainingStep
from nbkit.rank.train.step.step_stats import StepResult
from nbkit.rank.train.step.weight_average import refuse_shown
from nbkit.rank.train.switch.switch import Switcher
from nbkit.rank.train.transaction import TrainingState
from nbkit.rank.world import meeting, world
from nbkit.rank.world.world import World
from nbkit.records.events import RunStarted, RunStopped, Switched
from nbkit.strategy import Strategy
from nbkit.trainer_options import Compute, ModelHints, Recovery, check_options


def evaluate(job: Job, data: Any, *, batch_size: int, collate: Callable[[list[Any]], Any]) -> float:
    """Return the mean loss of the job's model over one pass of `data`, with the model in eval mode. Collective.

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
            hint="give every rank the whole data: each takes its own rows",
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
    loss: Loss | None = None,
    strategy: str = "ddp",
    precision: str | None = None,
    inputs: Sequence[str] | None = None,
    forward_step: ForwardStep | None = None,
    seed: int = 0,
    name: str | None = None,
    log_dir: str | None = runs_dir.DEFAULT,
    sinks: Sequence[Sink] = (),
    compute: Compute = Compute(),
    recovery: Recovery = Recovery(),
    hints: ModelHints = ModelHints(),
    switches: SwitchSchedule = None,
) -> Job:
    """Return a job for a training loop of your own. Collective: every rank calls it.

    model: an nn.Module, or a callable that builds one. optimizer: a function that gets the model and returns an
    optimizer, or a list or dict of several, as for the Trainer. If `model` is a module, you can also pass the
    optimizers themselves. loss: a function (output, target) that returns a mean, or (sum, weight). None if the loop
    computes the loss itself, with `rows`, `model` and `backward(loss)`. inputs: for dict batches, the names of the
    entries that the model takes; loss then gets (output, batch). forward_step: instead of loss and inputs, a function
    (model, batch) that calls the model once and returns a mean, or (sum, weight). It works under every strategy.
    precision: None, "bf16" or "fp16". hints: `nbkit.ModelHints(example=batch)` gives a small batch to run the model on.
    Pipelines and context parallelism need it. Tensor parallelism needs it, except for well-known classes. recovery:
    `nbkit.Recovery` with on_failure "replace" or "stop". With "replace", if a rank dies in a loop over `batches`, a new
    rank takes its place, so that all ranks can save a checkpoint. Then the training ends. See
    docs/reference/dead-ranks.md.

    The arguments strategy, seed, name, log_dir, sinks, compute and switches mean the same as for the Trainer. Raises
    TrainingError or StrategyError if the job cannot train with these arguments.
    """
    check_options(compute=compute, hints=hints, recovery=recovery)
    taken: Any = inputs
    if forward_step is not None:
        if loss is not None or inputs is not None:
            raise TrainingError(
                "forward_step= calls the model and computes the loss, so loss= and inputs= are not allowed.",
                numbers=" and ".join(name for name, each in (("loss=", loss), ("inputs=", inputs)) if each is not None)
                + " is given too",
                hint="nbkit.prepare(model, optimizer, forward_step=forward_step)",
            )
        taken, loss = in_two(forward_step)
    config = TrainConfig(loss or loss_of_outputs, seed, taken, precision, compute, hints)
    argument_checks.check_own_loop(recovery, compute, loss)
    check_sinks(sinks)
    job = Job(model, optimizer, config, strategy=strategy, switches=switches)
    job.own_loop = replace(OWN_LOOP, recovery=replace(recovery, on_oom="raise"))
    job.own_forward.possible = True
    user_gradients.watch_steps(job)
    job.check_plan()
    job.record(log_dir, name=name)
    job.listen(sinks, name=name)
    return job


class Job:
    """A training that a loop drives, either the user's or the Trainer's. See nbkit.rank.train.step.step for the step.

    `model` and `optimizer` stay the same objects for the whole training. own_loop: the settings of a loop over
    `batches`.
    """

    def __init__(
        self, model: Model, optimizer: Optimizer, config: TrainConfig, *, strategy: str, switches: SwitchSchedule = None
    ) -> None:
        self.plan = SwitchPlan(switches)
        strategy = self.plan.first(strategy)
        here = self._take_place()
        meeting.meet("Trainer() or prepare()")
        # Refuse a wrong strategy before a model is built.
        if strategy != AUTO:
            Strategy.parse(strategy, self.world_size)
        link = link_of(self.device)
        chosen = None if strategy == AUTO else _parsed(strategy, self.world_size, link)
        asked = Strategy.every(self.world_size, schedules=("1f1b",)) if chosen is None else [chosen]
        for text in self.plan.ahead:
            with suppress(StrategyError):  # check_plan checks the plan later, when the batch size is known too
                asked = [*asked, _parsed(text, self.world_size, link)]
        with other_jobs_left_out():
            builder = Builder(model, optimizer, config, asked=asked, **here)
            self._begin(builder)
            self.precision.check(builder.skeleton)
            builder.check_fp8()
            if chosen is None:
                recommended = recommend(builder)
                chosen = recommended.strategy
                if self.rank == 0:
                    print(recommended)
            chosen = ordered(builder, chosen)
            self.model_handle.check_alone(chosen)
            self.start(*builder.first(chosen))

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

        like: this process's job in an earlier world. The new job takes over its model object, which the user holds.
        """
        self = cls.__new__(cls)
        here = self._take_place()
        self._begin(Builder.joining(blueprint, module=None if like is None else like.model, **here))
        if like is not None:
            self.recorder.base_bytes = like.recorder.base_bytes
        self.plan, self.seed = plan, seed
        self.switches[:] = switches
        return self

    def _take_place(self) -> dict[str, Any]:
        place = World.join_from_env().place
        self.rank, self.world_size = place.rank, place.world_size
        self.device = accelerator().device(place.device)
        self.recorder = Recorder(self.device)  # before the model exists: memory is counted from here
        return {"rank": self.rank, "world_size": self.world_size, "device": self.device}

    def _begin(self, builder: Builder) -> None:
        self.builder, self.config, self.seed = builder, builder.config, builder.config.seed
        self.precision = Precision(self.config.precision, device=self.device, world_size=self.world_size)
        self.model, self.model_handle = builder.module, ModelHandle(builder.module)
        self.ledger = History(world_size=self.world_size, device=self.device)
        self.integrity, self.feed = Integrity(), DataHooks()
        self.own_forward = OwnForward(self)
        self.backups = Backups(rank=self.rank, world_size=self.world_size, device=self.device)
        self.checkpoint_writer = CheckpointWriter(rank=self.rank, world_size=self.world_size, device=self.device)
        self.sync, self.switcher = RankSync(self), Switcher(self)
        self.run_dir: Path | None = None
        self.sinks: tuple[Sink, ...] = ()  # the user's
        self.is_running = self._late = False
        self._cost_model: CostModel | None = None

    def start(self, sharded_model: ShardedModel, inner: torch.optim.Optimizer) -> None:
        """Compute with `sharded_model`, the first one of this process, and update it with `inner`."""
        self.optimizer = OptimizerHandle(inner, update=self._update, forgotten=self._forgotten, fits=self._fits)
        self._take(sharded_model, inner)
        self.training_step.note_versions()
        # Weak, so that a `break` ends the loop. After an error the traceback keeps it alive: `_leave_loop` ends it.
        self._loop: weakref.ref[Generator[Any, None, None]] | None = None
        self.own_loop = OWN_LOOP
        self._own: Any = None  # the OwnLoop of the newest loop over batches, if dead ranks are replaced in it
        note(self)
        user_gradients.watch_clipping(self)
        user_gradients.watch_backward(self)

    def _take(self, sharded_model: ShardedModel, inner: torch.optim.Optimizer) -> None:
        self.sharded_model = sharded_model
        self.optimizer.inner = inner
        # The user's model object now shows the modules of this sharded model. Those of the old one are freed.
        self.model_handle.show(sharded_model.module, sharded_model.strategy)
        self._known = {id(p) for p in self.model.parameters()}
        self.own_forward.begin_again()
        self.own_forward.install()
        self.builder.computing = weakref.ref(sharded_model)
        follow_modes(inner, self)
        self.builder.took(inner)
        self.training_step = TrainingStep(
            sharded_model,
            inner,
            self.builder,
            precision=self.precision,
            ledger=self.ledger,
            integrity=self.integrity,
            backups=self.backups,
            seed=self.seed,
            before_count=self.recorder.before_count,
        )

    def parsed(self, text: str) -> Strategy:
        """Parse `text` for this number of ranks and for the nodes they are on. Raises StrategyError."""
        return _parsed(text, self.world_size, self.builder.link)

    @property
    def strategy(self) -> Strategy:
        """The current strategy."""
        return self.sharded_model.strategy

    @property
    def previous(self) -> str | None:
        """The strategy before the last switch, proven or not. From any thread."""
        return self.switcher.previous

    @property
    def switches(self) -> list[Switched]:
        """The switches that were made and not taken back."""
        return self.switcher.made

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self.ledger.step

    @property
    def state(self) -> TrainingState:
        """Return the state that is in force now, between two steps."""
        sharded_model, inner = self.sharded_model, self.optimizer.inner
        position, precision = self.feed.position(), self.precision.state_dict()
        return TrainingState(sharded_model, inner, shown_by(sharded_model.module), self.step, position, precision)

    def adopt(self, state: TrainingState) -> None:
        """Compute with the sharded model of `state` and update with its optimizer from now on."""
        self.training_step.release()
        show_again(state.shown)
        self._take(state.sharded_model, state.optimizer)
        self.feed.recut()

    def restore(self, state: TrainingState) -> None:
        """Go back to `state`, and undo later steps. Close the sharded model of a later switch. Not collective."""
        self.optimizer.zero_grad()
        if (other := self.sharded_model) is not state.sharded_model:
            self.adopt(state)
            other.close()
        # Only the other sharded model can have been interrupted in a step. The weights of `state` are whole.
        self.integrity.restored(ranks_agree=False)
        self.ledger.step = state.step
        self.precision.load_state_dict(state.precision)
        self.feed.go_to(state.position)

    @property
    def progress(self) -> TrainingProgress:
        """Return the state of this rank between two steps, without the weights and the optimizer state."""
        precision, position = self.precision.state_dict(), self.feed.position()
        return TrainingProgress(precision, self.step, list(self.ledger.records), position)

    def stand_at(self, progress: TrainingProgress) -> None:
        """Set step, history and position to those of `progress`. The weights do not change. Not collective."""
        self.ledger.replace(progress.step, progress.records)
        self.precision.load_state_dict(progress.precision)
        self.feed.go_to(progress.position)

    def go_on(self, progress: TrainingProgress) -> None:
        """Continue from `progress`, after its weights were restored. Not collective. Call `sync.sync_step` after it."""
        self.stand_at(progress)
        self.integrity.restored(ranks_agree=False)

    def rewind(self, progress: TrainingProgress) -> None:
        """Go back to the earlier step of `progress`, after its weights were restored. Collective."""
        self.backups.back_to(progress.step)
        self.ledger.replace(progress.step, progress.records, loaded=True)
        self.precision.load_state_dict(progress.precision)
        self.feed.go_to(progress.position)
        self.sync.restored()

    def read_from(self, feed: DataHooks) -> None:
        """Get and set the position in the data with the hooks `feed` from now on."""
        self.feed = feed

    def reseed(self, seed: int) -> None:
        """Use `seed` for random numbers from the next step on."""
        self.seed = seed
        self.training_step.reseed(seed)

    def configure(self, **changed: Any) -> None:
        """Change fields of nbkit.Compute from the next step on."""
        compute = replace(self.config.compute, **changed)
        self.config = self.builder.config = replace(self.config, compute=compute)
        self.training_step.microbatch_size = compute.microbatch_size
        self.ledger.counts.clear()
        self.training_step.count_again()

    @property
    def waits_for_update(self) -> bool:
        """Return True if gradients are summed over the ranks and the optimizer has not stepped with them yet."""
        pending = self.ledger.pending
        return self.training_step.reduced and bool(pending) and not pending[-1].made

    def check_model(self) -> None:
        """Use the new tensors if the user has replaced the model's parameters or their memory.

        Raises TrainingError if that is impossible, or if the model belongs to another job.
        """
        self.model_handle.check()
        self.own_forward.close()
        self.sharded_model.data.follow()
        argument_checks.check_parameters(
            self.optimizer, self.model, known=self._known, held=self.sharded_model.held.values()
        )

    def record(self, log_dir: str | None, *, name: str | None = None, batch: int | None = None) -> None:
        """Record everything from now on in a new directory under `log_dir`. None records nothing. Collective."""
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
        """Record into an existing directory, for example of a training that this process joins. Collective."""
        self.run_dir = run_dir
        if run_dir is not None:
            self.recorder.record_into(
                run_dir, self.ledger.bus, strategy=str(self.strategy), rank=self.rank, world_size=self.world_size
            )

    def listen(self, sinks: Sequence[Sink], *, name: str | None) -> None:
        """Send all events to `sinks` on rank 0. The other ranks keep theirs in case rank 0 must be replaced."""
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
        """Return one dict per finished step, the same on every rank. In a running loop, the newest step is missing."""
        if not self.is_running:
            self.ledger.settle()
        return self.ledger.records

    @argument_checks.batches_call
    def batches(self, loader: Iterable[Any], *, others: Sequence[Job] = ()) -> Iterator[Any]:
        """Return an iterator over the loader's batches, with a step boundary after each.

        The loader gives global batches, in the same order on every rank. `backward` takes this rank's rows of a batch.
        The iterator seeds the random numbers of a DataLoader or dataset, so that all ranks get the same batches.
        others: more jobs that train in this loop. They use this job's strategy from now on, so one switch changes all
        jobs.
        """
        argument_checks.check_loader(loader)
        self._leave_loop()
        batches = self._steps(loader, others)
        self._loop = weakref.ref(batches)
        return batches

    def _steps(self, loader: Iterable[Any], others: Sequence[Job]) -> Generator[Any, None, None]:
        """Yield the loader's batches. Reading is seeded for each step, and its time counts as the phase "data"."""
        host = resume_fit.host
        own = self._own = None if host is None else host.loop(self)
        with self.running() if own is None else own.running():
            batches, end, read = None, object(), (-1, 0)
            while True:
                for other in others:
                    other._own = own
                    other.follow(self)
                # A step may read several batches, to accumulate their losses. Each batch gets another seed.
                read = self.step, read[1] + 1 if read[0] == self.step else 0
                with phase("data"):
                    data_rng.seed(self.seed + read[1] * _READ, self.step, SHARED)
                    batches = iter(loader) if batches is None else batches
                    batch = next(batches, end)
                if batch is end:
                    with self.order():
                        self.arrive()
                    return
                yield batch
                if not self.own_forward.losses:  # otherwise a step is under way: its gradients are not summed yet
                    with self.order():
                        self.at_boundary()

    def follow(self, other: Job) -> None:
        """Switch to the strategy of `other`, and read the results of finished steps. Collective if they differ."""
        self.ledger.settle(keep=1)
        if str(self.strategy) != str(other.strategy):
            self.switch(str(other.strategy))

    def order(self) -> AbstractContextManager[None]:
        """Return a context for code that waits for other ranks. In the user's loop it saves the job if a rank dies."""
        return nullcontext() if self._own is None else self._own.saved_if_a_rank_dies()

    def _leave_loop(self, error: BaseException | None = None) -> None:
        """End the newest loop over `batches`, if it is running. error: the reason."""
        if self._loop is not None and (batches := self._loop()) is not None:
            if error is not None:
                self.ledger.ended_by(error)
            batches.close()
        self._loop = None

    def rows(self, batch: Any) -> Any:
        """Return this rank's rows of a global batch, on its device, for your own forward and loss.

        batch: a tensor, or tensors in a list, tuple or dict; dim 0 is the row. A list is returned as a tuple. Every
        rank passes the same batch. Ranks that share the work on a row (tp, cp) get the same rows. Raises StrategyError
        under pp, and TrainingError if a rank would have no row.
        """
        return self.own_forward.rows(batch)

    def draw(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return `function(*args, **kwargs)`, a random function of torch, with random numbers that depend on the row.

        The numbers depend on the job's seed, the step, the number of the call in the step, and each row's place in the
        global batch. So they are the same under every strategy and on any number of ranks. Dim 0 of the result is the
        row: `job.draw(torch.randn_like, x)`, `job.draw(torch.randint, 1000, (len(x),))`. Call it after `rows`, equally
        often on every rank. Raises TrainingError for any other function.
        """
        drawn: Tensor = self.own_forward.draw(function, *args, **kwargs)
        return drawn

    def mean(self, value: Tensor | float, weight: Tensor | float | None = None) -> Tensor:
        """Return the mean over the rows of all ranks. `value` is the mean over this rank's rows. Collective.

        The result is a 0-dimensional float64 tensor. weight: the number of items over which `value` is a mean; default:
        the number of rows.
        """
        return self.own_forward.mean(value, weight)

    def backward(
        self,
        batch: Any,
        *,
        weight: float | Tensor | None = None,
        reduction: str = "mean",
        retain_graph: bool = False,
        last: bool = False,
    ) -> StepResult:
        """Compute the gradients of a global batch (see `nbkit.prepare(loss=)`), or of a loss of your own.

        batch: a global batch, or a Shard, which has this rank's rows of one. Forward and backward run in micro-batches.
        Afterwards every rank holds the gradients of the whole global batch, or its part of these gradients. You can
        also pass a loss of this rank's rows instead of a batch: a 0-dimensional tensor that requires a gradient.

        You may pass any number of losses before a step. Their gradients add up. `clip`, `grad_norm` or `optimizer.step`
        sums the gradients over the ranks. After that, `loss` of the result is known. The other arguments are for losses
        of your own. weight: the number of items (rows, tokens, ...) over which this rank's loss is a mean; default: the
        number of rows from `rows`. reduction: "sum" if the loss is a sum over the rows. retain_graph: as in torch.
        last: True if no other loss follows in this step. Then the sum over the ranks begins during the backward pass.

        If the loss is not finite, CPU ranks raise NotFinite before the weights change. On GPUs, the loop over `batches`
        raises it one step later.
        """
        if isinstance(batch, Tensor) and batch.ndim == 0:
            return self.own_forward.backward(
                batch, weight=weight, reduction=reduction, retain_graph=retain_graph, last=last
            )
        if self.own_forward.losses:
            raise TrainingError(
                "job.backward got losses and a batch in one step.",
                numbers=f"step {self.step + 1}, {self.own_forward.losses} losses",
                hint="job.optimizer.step() between them; or job.rows(batch) and a loss for both",
            )
        self._check_loss_is_known("job.backward(batch)")
        if self.training_step.reduced:
            raise TrainingError(
                "backward() was called twice in one step, but the gradients already hold the sum over all ranks.",
                numbers=f"step {self.step + 1}",
                hint="job.optimizer.step(); job.optimizer.zero_grad()   "
                "(to accumulate: compute=nbkit.Compute(microbatch_size=...))",
            )
        if not self.is_running:
            self.ledger.settle(keep=1)
        self.model_handle.check()
        if not self.integrity.broken_off:
            user_gradients.refuse_before(self)
        new, place = self.strategy, self._place()
        self.ledger.begun = True
        while True:
            try:
                self.own_forward.share_weights()
                self.own_forward.end()
                # The context also covers taking the rows, seeding, and the check that the loss is finite.
                with self.order(), self.own_forward.left_out(), self.switcher.first_step() as first, phase("backward"):
                    result = self.training_step.backward(self.training_step.rows(batch))
            except BaseException as error:
                self.broken(error)
                raise
            if not first.taken_back:
                return result
            if isinstance(batch, Shard) and self._place() != place:
                raise TrainingError(
                    f"The rows of this batch were cut for {new}, and the switch to it was taken back.",
                    numbers=f"data-parallel place {place}, now {self._place()}",
                    hint="job.backward(batch) with the global batch, or the next one",
                )

    def broken(self, error: BaseException) -> None:
        """Drop the step that `error` has interrupted, and leave the loop.

        If this rank was cut off from the others, raises the error that says so.
        """
        self.ledger.begun = False
        self.integrity.broken_off = not isinstance(error, NotFinite)
        self.own_forward.begin_again()
        self.optimizer.zero_grad()
        if isinstance(error, NotFinite) and not error.spoiled and (names := job_checkpoint.not_finite(self)):
            argument_checks.blame_weights(error, names, self.ledger.made_last)
        self._leave_loop(error)  # the generator does not notice that an error left the loop's body
        if isinstance(error, Exception) and (parted := meeting.parted()) is not None:
            raise parted from None

    def _check_loss_is_known(self, what: str) -> None:
        if self.config.own_loss:
            raise TrainingError(
                f"{what} computes the loss, but this job was given no loss function.",
                numbers="loss=None",
                hint="nbkit.prepare(..., loss=loss); or x, y = job.rows(batch), then job.backward(loss)",
            )

    def _place(self) -> tuple[int, int]:
        """Return (index of this rank's part of a global batch, number of parts)."""
        axes = self.sharded_model.axes
        return axes.index("dp"), axes.size("dp")

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`.

        Returns the norm before scaling, as a tensor. The call does not wait until the GPU has computed this tensor.
        """
        with self._passed_over(), self.order():
            self.own_forward.sum_up()
            return self.training_step.clip(max_norm)

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of all gradients, as a tensor on the device. The history of this step records it."""
        with self._passed_over(), self.order():
            self.own_forward.sum_up()
            return self.training_step.grad_norm()

    @contextmanager
    def _passed_over(self) -> Iterator[None]:
        """Drop the gradients and leave the loop if NotFinite is raised inside. The job may go on with another batch."""
        try:
            yield
        except NotFinite as error:
            self.optimizer.zero_grad()
            self._leave_loop(error)
            raise

    def evaluate(self, data: Any, *, batch_size: int, collate: Callable[[list[Any]], Any] = default_collate) -> float:
        """Return the mean loss over one pass of `data`, in eval mode. Collective, between two steps.

        It works under any strategy. data: samples, as for a DataLoader. Each sample counts once. batch_size: rows of a
        global batch. Raises TrainingError if the total weight of the samples is 0.
        """
        self._check_loss_is_known("job.evaluate")
        with self.ledger.clock.stopped():
            meeting.meet("evaluate")
            self.sync.resync()
            return evaluate(self, data, batch_size=batch_size, collate=collate)

    def switch(self, strategy: str, *, beside: bool = False) -> Switched:
        """Continue under another strategy, with the same global batch. Collective, between two steps.

        If the first step under the new strategy fails, all ranks return to the old strategy. beside: compare the old
        and the new state during the next step, and do not wait for the result. This works only if a Trainer makes that
        step, and if memory holds both states. Otherwise nbkit compares the states at once. Do not change a weight
        before that step. If an earlier switch was not compared yet, it is compared first.

        Raises StrategyError for a strategy that does not fit, and SwitchError if the switch failed on any rank. In both
        cases the old strategy stays, and nothing has changed.
        """
        return self.switcher.switch(strategy, beside=beside)

    def undo(self, *, beside: bool = False) -> Switched:
        """Switch back to the strategy before the last switch. The weights stay as they are now. Collective."""
        return self.switcher.undo(beside=beside)

    def save(self, path: str | Path, *, beside: bool = False, then: Callable[[], None] | None = None) -> None:
        """Write model, optimizer, step, position in the data, history and seed to the directory `path`. Collective.

        beside: copy the state to host memory and return. A thread writes the checkpoint
        (docs/reference/checkpoints.md). then: a function that rank 0 calls when the checkpoint is complete.

        Raises TrainingError on every rank if a rank could not write, the ranks do not share `path`, weights are not
        finite, or the folder of runs has reached max_disk (docs/reference/settings.md). An earlier checkpoint at `path`
        then stays intact.
        """
        job_checkpoint.save(self, path, beside=beside, then=then)

    def opened(self, path: str | Path) -> Saved:
        """Open the checkpoint at `path` for `load`, and check that it fits the job. This changes nothing. Collective.

        Raises TornCheckpoint on every rank if the checkpoint cannot be read or is not complete, and TrainingError if it
        does not fit.
        """
        return job_checkpoint.opened(self, path)

    def load(self, saved: Saved) -> None:
        """Load weights, optimizer, step, seed and history, but not the position in the data. Collective.

        saved: what `opened` has returned. Its values go into the existing tensors, without a second copy. If a rank
        cannot read its part, the weights are incomplete on all ranks, and an error says so.
        """
        job_checkpoint.load(self, saved)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model, on the CPU, on every rank. Collective.

        Its keys are the names of the unsplit model.
        """
        return job_checkpoint.full_state_dict(self)

    def log(self, **numbers: float | Tensor) -> None:
        """Add numbers to the record of the newest step.

        A number may be a 0-dimensional tensor. The call does not wait until the GPU has computed this tensor. Pass the
        same numbers on every rank, so that `history` stays equal on all of them. The record already has `loss`.
        """
        if not self.own_forward.log(numbers):
            self.ledger.log(numbers)

    @contextmanager
    def running(
        self, *, total: int = 0, owner: Any = None, arithmetic: str = "", joins: bool = False
    ) -> Iterator[None]:
        """Open a context for making steps. Requests are served at step boundaries. The history is complete afterwards.

        joins: the other ranks are in this context already. Collective if they are not.
        """
        if isinstance(other := step_boundary.training(), Job):
            other._leave_loop()
        if step_boundary.training() is not None:
            raise TrainingError(
                "A training runs already.",
                numbers=f"it has made {step_boundary.training().step} steps",
                hint="wait, or stop it",
            )
        refuse_shown(self, "A training")
        if not joins:
            if owner is None:
                meeting.meet("a loop over job.batches")
            self.sync.resync()  # after an interrupted ZeRO 3 step, whole parameters are visible until this call
            self.sync.compare_settings()
        else:
            self.check_model()
        reason = "error"
        try:
            # Within `try`: an interrupt from here on must reach `leave`, or every later training is refused.
            if not joins:
                step_boundary.forget(self.device)
            step_boundary.enter(owner or self)
            meeting.begin_run(step_boundary.run, lambda: self.ledger.making)
            self.is_running = True
            now, about = str(self.strategy), run_facts(self)
            self.ledger.emit(RunStarted(self.step, strategy=now, arithmetic=arithmetic, total=total, about=about))
            self.ledger.begin(total)
            self.follow_plan()
            with data_rng.own_draws():
                yield
            self.sharded_model.data.settle()
            self.ledger.settle(act=True)
            self.switcher.prove()
            self.sync.resync()
            reason = "done"
        except BaseException as error:
            if isinstance(error, GeneratorExit):
                meeting.leave()  # this rank has left the loop; tell the ranks that go on
            if lost := accelerator().context_lost(error):
                reason = self.ledger.ended_by(error)
                raise TrainingError(
                    f"The CUDA context of rank {self.rank} is gone, and all data on its GPU is lost.",
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
            self.is_running = self.ledger.at_once = False
            step_boundary.leave()
            self.ledger.emit(RunStopped(self.step, reason=reason))

    def break_off(self) -> None:
        """Drop the rest of an interrupted step, and read the results of the finished steps."""
        here, half_way = world.current(), self.ledger.torn() | self.integrity.half_way
        self.integrity.half_way = True  # in case this is interrupted
        whole = self.sharded_model.data.break_off(broken=here is None or bool(here.dirty))
        self.integrity.half_way = half_way or not whole
        self.switcher.commit()
        with suppress(NotFinite):  # the caller raises the error that interrupted the step
            self.ledger.settle()
        self.ledger.pending.clear()
        self.own_forward.begin_again()
        self.optimizer.zero_grad()

    def arrive(self) -> None:
        """Wait at the end of a run until all ranks have arrived. Collective.

        So if a rank dies before the end, all other ranks are still there to replace it.
        """
        self.sharded_model.data.settle()
        self.ledger.settle(act=True)
        meeting.arrive()
        here = torch.ones((), device=self.device)
        dist.all_reduce(here)
        if (found := int(here)) != self.world_size:  # on a device, an aborted collective does not raise
            raise TrainingError(
                "The ranks did not meet at the end of the training.",
                numbers=f"{found} of {self.world_size}",
                hint="train again: all ranks continue from a rank that has whole weights",
            )

    def stop_if(self, flag: bool) -> bool:
        """Return True on every rank if `flag` is true on any rank: `if job.stop_if(loss < 0.1): break`. Collective.

        If one rank left the loop alone, the other ranks would wait for it.
        """
        meeting.meet("stop_if")
        return any_rank(bool(flag), device=self.device)

    def at_boundary(self) -> None:
        """Do the work between two steps: read the results of the step before last, serve requests, switch, back up."""
        self.recorder.at_boundary(self.step)
        self.training_step.boundary()
        if self.step % EVERY == 0:
            self.sync.compare_settings()
            if self.sharded_model.data.apart == 1:
                self.training_step.compare_buffers()
        self.follow_plan()
        self.back_up()

    def back_up(self, *, now: bool = False) -> None:
        """Back up the state between these two steps if a backup is due, or `now`. Collective if one is taken."""
        if not self.backups.on:
            return
        if self.ledger.newest is not None:
            self.backups.measured(self.ledger.newest.backup, max(self.ledger.newest.seconds))
            self.ledger.newest = None
        if self.backups.due(self.step) or now:
            inner = self.optimizer.inner
            layouts, names = self.sharded_model.plan.layouts, self.builder.names
            place = TrainingProgress(self.precision.state_dict(), self.step, [], self.feed.position())
            point = settings_of(inner), place
            self.backups.take(self.sharded_model, inner, layouts, names, self.step, point)

    @contextmanager
    def late_weights(self) -> Iterator[None]:
        """Let updates inside finish late: wait for weights from other ranks only when they are read.

        The caller promises that before the next step no code reads weights through tensors that it has stored.
        """
        self._late = self.is_running
        try:
            yield
        finally:
            self._late = False

    def check_plan(self) -> None:
        """Check all planned switches, and raise now what they would raise later. Collective."""
        for old, new in itertools.pairwise([self.strategy, *self.plan.check(self.parsed, self.feed.fits)]):
            if str(old) != str(new):
                self.builder.template.check_moves(old, new)
                self.builder.agree_on(new)

    def follow_plan(self) -> None:
        """Switch if the plan has a switch for this step."""
        if (strategy := self.plan.due(self.step)) is None:
            return
        try:
            self.switch(strategy)
        except (SwitchError, StrategyError):
            self.plan.done(self.step)
            raise
        # Only now: a switch that another error interrupted, such as MemoryError on a rank, stays due on all ranks.
        self.plan.done(self.step)
        if (pending := self.switcher.pending) is not None:
            # No caller waits for this result. If the switch is taken back, training goes on under the old strategy.
            pending.add_done_callback(lambda pending: _warn_if_taken_back(pending.exception()))

    def seed_data(self, *, own: bool) -> tuple[int, int, int]:
        """Seed the random numbers drawn while reading the next batch, and return the seed.

        own: use a different seed for each part of the data; otherwise the seed is the same on every rank.
        """
        rank = self.world_size + 1 + self.sharded_model.axes.index("dp") if own else SHARED
        data_rng.seed(self.seed, self.step, rank)
        return self.seed, self.step, rank

    def bytes_per_element(self) -> dict[str, dict[str, int]]:
        """Return bytes per element of every parameter and of its optimizer state: see job_state.bytes_per_element."""
        builder, inner = self.builder, self.optimizer.inner
        return bytes_per_element(self.sharded_model, inner, builder.skeleton, builder.template.groups)

    def cost_model(self) -> CostModel:
        """Return the formulas that predict the cost of any strategy. From any thread."""
        seen, kinds = self._cost_model, self.bytes_per_element()
        if seen is None or not seen.holds(kinds, self.builder):
            seen = self._cost_model = CostModel(self.builder, kinds, self.feed.fits, before=seen)
        return seen

    def forget_estimates(self) -> None:
        """Drop the estimates. Call it when the cost of a step changes although the strategy does not."""
        self._cost_model = None

    def _update(self) -> None:
        with self.order():
            self.own_forward.sum_up()
            if not self.training_step.reduced:
                user_gradients.refuse_unsummed(self)
            self.training_step.update(late=self._late)
            if self.own_forward.active:
                self.own_forward.made()
                self.switcher.commit(step_made=True)
            self.recorder.after_step(
                self.step,
                self.model,
                self.optimizer.inner,
                held=self.sharded_model.held.values(),
                strategy=self.strategy,
                cost_model=self.cost_model,
                counts=self.training_step.counted,
            )

    def _fits(self, param: nn.Parameter, key: str, shape: tuple[int, ...]) -> bool:
        """Return True if state of shape `shape` may belong to `param`: see OptimizerHandle.

        State of another shape does not fit if it has the whole parameter's shape, or if the optimizer keeps it per
        element. Only the optimizer can judge other state, such as sums of rows.
        """
        held, layouts = self.sharded_model.held, self.sharded_model.layouts
        whole = next(layouts[name].shape for name, p in held.items() if p is param)
        return shape == tuple(param.shape) or not (shape == whole or key in self.builder.template.keys_per_element)

    def _forgotten(self, are_none: bool) -> None:
        own = self.own_forward
        own.perturbed |= own.possible and self.waits_for_update and not self.integrity.broken_off
        self.training_step.reduced = False
        own.forget()
        # Also clear gradients of parameters that are in no group: the next step would sum them once more.
        inside = set() if are_none else {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for p in self.sharded_model.data.leaves():
            if p.grad is not None and id(p) not in inside:
                p.grad = None


_READ = 1_000_003
"""Within a step, the seeds of two successive batches differ by this number."""


def _warn_if_taken_back(error: BaseException | None) -> None:
    if error is not None:
        warnings.warn(f"a planned switch was taken back: {error}", stacklevel=2)


def _parsed(text: str, world_size: int, link: WorldLinks | None) -> Strategy:
    return Strategy.parse(text, world_size, node=None if link is None else ranks_of_node(link.node_of))
