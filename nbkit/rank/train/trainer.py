"""The Trainer: a complete training loop, the same in a cell and in a script under torchrun."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import NotFinite, TrainingError
from nbkit.quoting import user_path
from nbkit.rank.data.balanced.balanced import check_packed
from nbkit.rank.data.batch import BatchSplit
from nbkit.rank.data.data_state import DataHooks
from nbkit.rank.data.sample_rows import sample_of, warn_of_collate
from nbkit.rank.data.stream import Stream, reading
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.models.generate import Prompt, Sampling, generate
from nbkit.rank.telemetry.clock_offset import clock_offset
from nbkit.rank.telemetry.collectives import mode
from nbkit.rank.telemetry.phases import phase
from nbkit.rank.telemetry.sinks import ProgressLine, Sink, check_sinks, say
from nbkit.rank.train import runs_dir
from nbkit.rank.train.argument_checks import check_clip_norm, check_counts, check_places, fit_call, trainer_call
from nbkit.rank.train.builder import Model, Optimizer
from nbkit.rank.train.checkpoint.autosave import Autosave
from nbkit.rank.train.config import LastCheckpoint, LoopSettings, TrainConfig, example_of, warn_without_effect
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.garbage_collection import automatic
from nbkit.rank.train.control.make_steps import make_steps
from nbkit.rank.train.control.rebalance import Rebalancing
from nbkit.rank.train.control.step_boundary import note
from nbkit.rank.train.control.switch_plan import SwitchSchedule
from nbkit.rank.train.job import Job
from nbkit.rank.train.replace.resume_fit import (
    FitRange,
    check_same_goal,
    repair_torn_update,
    resized,
    seat,
    span_of,
)
from nbkit.rank.train.resize.plan_resize import ResizeAtBoundary
from nbkit.rank.train.snapshots import Snapshots
from nbkit.rank.train.step.history import Records
from nbkit.rank.train.step.lr_schedule import LrSchedule
from nbkit.rank.train.step.weight_average import averaging
from nbkit.rank.train.switch.compare import compare, try_out
from nbkit.rank.world import meeting
from nbkit.records.events import Checkpointed, LrChanged, Switched
from nbkit.strategy import Strategy
from nbkit.trainer_options import Checkpoints, Compute, Loading, ModelHints, Recovery, check_options


class Trainer:
    """Trains `model` on `data`. Collective: every rank makes the same calls.

    model: an nn.Module, or a callable that builds one. loss: a function (output, target) that returns a mean. For
    masks, or rows of unequal length, it returns (sum, weight) (docs/reference/losses.md). optimizer: a function that
    gets the model and returns an optimizer. It may return a list or dict of several, such as Muon for the matrices and
    AdamW for the rest. Each trainable parameter must be in exactly one of them. lr_schedule, checkpoints and switches
    treat them as one optimizer. `trainer.optimizer.optimizers` is the list or dict. data: a map-style or iterable
    dataset with items (input, target) or dicts. batch_size: rows of the global batch, over all ranks. strategy: a text
    such as "dp=2 tp=2"; with "auto", nbkit chooses a strategy that fits, and prints it
    (docs/reference/planner.md). precision: "bf16" and "fp16" run forward and loss under autocast. "fp16" also scales
    the loss. None (the default): float32. clip_norm: the maximum norm of all gradients. Larger gradients are scaled
    down. None (the default): no clipping. lr_schedule: a function that gets the number of finished steps and returns a
    factor for the optimizer's lr. eval_data: data for evaluations. The mean loss is `eval_loss` in `history`.
    eval_every: steps between two evaluations. inputs: for dict batches, the names of the entries that the model takes;
    `loss` then gets (output, batch). seed: the seed of the weights, of the order of the data, and of dropout.
    callbacks: functions (trainer, record) to call after each step. Before the calls, each rank waits until its GPU has
    finished the step, so that the model and the record belong to the same step. `nbkit.WeightAverage` can be one of the
    callbacks. name: the name of the run. log_dir: the parent of the run's directory. %dashboard and TensorBoard read
    it. None: keep no records. sinks: objects with a method write(event). On rank 0, nbkit calls it for each step and
    event. progress: print a line that shows the progress.

    Less common settings are fields of option objects. Each option class has its own docstring. loading: how to make
    batches from samples, `nbkit.Loading(shuffle= drop_last= collate= workers=)`. checkpoints: when and where to save
    automatically, `nbkit.Checkpoints(every= path= keep= snapshot_every=)`. compute: how to compute a step,
    `nbkit.Compute(microbatch_size= recompute= loss_chunks= offload= fp8= compile= dropout= grad_norm_every=)`.
    recovery: what to do when ranks die, hang, slow down or run out of memory, `nbkit.Recovery(on_failure= hang_timeout=
    on_oom= balance= backup_every=)`. hints: facts about the model that nbkit cannot always find itself,
    `nbkit.ModelHints(stages= tp_plan= example=)`. switches: planned switches: a dict from numbers of finished steps to
    strategies, or a JSON file with such a dict. If it has step 0, the training begins with that strategy.

    Raises TrainingError or StrategyError, before anything trains, if it cannot train with these arguments.
    """

    _stream: Stream

    @trainer_call
    def __init__(
        self,
        *,
        model: Model,
        loss: Loss,
        optimizer: Optimizer,
        data: Any,
        batch_size: int,
        strategy: str = "ddp",
        precision: str | None = None,
        clip_norm: float | None = None,
        lr_schedule: Callable[[int], float] | None = None,
        eval_data: Any = None,
        eval_every: int | None = None,
        inputs: Sequence[str] | None = None,
        seed: int = 0,
        callbacks: Sequence[Callable[[Trainer, dict[str, Any]], None]] = (),
        name: str | None = None,
        log_dir: str | None = runs_dir.DEFAULT,
        sinks: Sequence[Sink] = (),
        progress: bool = True,
        loading: Loading = Loading(),
        checkpoints: Checkpoints = Checkpoints(),
        compute: Compute = Compute(),
        recovery: Recovery = Recovery(),
        hints: ModelHints = ModelHints(),
        switches: SwitchSchedule = None,
    ) -> None:
        check_options(loading=loading, checkpoints=checkpoints, compute=compute, recovery=recovery, hints=hints)
        check_counts(batch_size=batch_size, eval_every=eval_every)
        warn_without_effect(data, loading, checkpoints, eval_data, eval_every)
        check_clip_norm(clip_norm)
        check_sinks(sinks)
        check_places(log_dir, checkpoints, recovery)
        if checkpoints.path is not None:
            checkpoints = replace(checkpoints, path=user_path(checkpoints.path).absolute())
        name = None if name is None else str(name)
        optimizer, callbacks = averaging(callbacks, optimizer)
        loop = LoopSettings(
            data=data,
            batch_size=batch_size,
            clip_norm=clip_norm,
            lr_schedule=lr_schedule,
            eval_data=eval_data,
            eval_every=eval_every,
            saves_if_detached=checkpoints.every is None and (checkpoints.path is not None or log_dir is not None),
            name=name,
            callbacks=tuple(callbacks),
            progress=progress,
            grad_norm_every=compute.grad_norm_every,
            loading=loading,
            checkpoints=checkpoints,
            recovery=recovery,
        )
        warn_of_collate(data, loop.collate)
        hints = replace(hints, example=example_of(data, loop.collate, hints.example))
        rows = partial(sample_of, data, loop.collate)
        config = TrainConfig(loss, seed, inputs, precision, compute, hints, sample=rows, batch=batch_size)
        job = Job(model, optimizer, config, strategy=strategy, switches=switches)
        check_packed(data, job.model)
        self._begin(job, loop)
        self.job.record(log_dir, name=name, batch=batch_size)
        self.job.listen(sinks, name=name)
        self._listen()
        self.job.check_plan()

    @classmethod
    def joining(cls, job: Job, loop: LoopSettings, *, run_dir: Path | None, saved: LastCheckpoint) -> Trainer:
        """Return the Trainer of a process that joins a running training. Collective: other ranks call `reopen`."""
        self = cls.__new__(cls)
        self._begin(job, loop)
        self._stream.agree()
        job.record_on(run_dir)
        self._listen()
        self.saves.last = saved
        return self

    def reopen(self) -> None:
        """Open the data again at the current position, when ranks join. Collective: ranks compare their data."""
        stream = self.loop.stream(self.job.sharded_model.axes, self.strategy, self.job.seed, self.job.device)
        stream.follow(self._stream)
        stream.agree()
        self._stream = stream
        self.saves.collect(wait=True)
        self.job.checkpoint_writer.form_again()
        self.snapshots.clear()
        self._rebalancing.forget()
        if self.run_dir is not None and mode() != "off":
            clock_offset()  # collective: ranks that join measure it

    def _begin(self, job: Job, loop: LoopSettings) -> None:
        self.job, self.loop, self._callbacks = job, loop, loop.callbacks
        self.arithmetic = self._cut_for(self.strategy)
        self._stream = loop.stream(job.sharded_model.axes, job.strategy, job.seed, job.device)
        self._rebalancing = Rebalancing(job.device)
        if loop.lr_schedule is not None:
            job.builder.template.check_rate()
        self._rate = LrSchedule(job.optimizer, loop.lr_schedule)
        self.saves = Autosave(job, loop)
        self.snapshots = Snapshots(job, self.saves, every=loop.checkpoints.snapshot_every, say=self._say)
        self._joined: FitRange | None = None
        self.stops = False  # True if a callback ends the running `fit`: see stop_if

    def _listen(self) -> None:
        self.run_dir = self.job.run_dir
        if self.job.rank == 0 and self.loop.progress:
            self.job.ledger.bus.add(ProgressLine(step_boundary.progress))
        self.job.ledger.after_step = self._call_back
        stream, moves = self._stream, (self._position, self._go_to, self._cut_for, self._recut)
        self.job.read_from(DataHooks(*moves, stream.goes_back, stream.after, where=lambda: self._stream.where()))
        note(self)

    @property
    def model(self) -> nn.Module:
        """The model, with the parts that this rank holds."""
        return self.job.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer. It stays the same object through switches."""
        return self.job.optimizer

    @property
    def strategy(self) -> Strategy:
        """The current strategy."""
        return self.job.strategy

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self.job.step

    @property
    def history(self) -> list[dict[str, Any]]:
        """Return one dict per finished step, equal on every rank.

        Inside `fit`, the newest step is missing, except in callbacks. After more than 20,000 steps, the history keeps
        the newest 10,000 steps, and at most 10,000 of the earlier ones: first every 2nd, later every 4th, and so on.
        """
        return self.job.history

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group. You can set it at any step boundary, on every rank.

        If you set it, the rates of the other groups change by the same ratio. The factors of `lr_schedule` then apply
        to the new rate.
        """
        return self._rate.value

    @lr.setter
    def lr(self, value: float) -> None:
        old = self.lr
        self.job.builder.template.check_rate()
        self._rate.set(float(value))
        self.job.ledger.emit(LrChanged(self.step, old=old, new=float(value)))

    @fit_call
    def fit(self, steps: int | None = None, *, until: int | None = None, resume: str | None = None) -> Records:
        """Train for `steps` more steps, or until step `until` is finished. Return the records of these steps.

        Use `until` in a script that may be started again. After it has loaded a checkpoint, `fit` makes only the
        remaining steps. With resume="auto", `fit` first loads the newest complete checkpoint in the path of
        `checkpoints`, or in the runs with this `name`. Python's garbage collector runs only between two steps. All
        ranks run it after the same steps, so that no rank waits for another one's collection.

        Raises Stopped if the user stops the training, and NotFinite if the loss is not finite. All ranks raise the
        error at the same step boundary. You may call `fit` again.
        """
        joined, self._joined = self._joined, None
        if joined is None:
            meeting.meet("fit")
        if resume is not None and joined is None and not self.step:
            self.saves.resume(resume, self.load)
        if joined is None:
            repair_torn_update(self)
        span = joined or span_of(self, steps, until)
        if joined is None:
            check_same_goal(span.goal, self.job.device)
        if span.goal == self.step and joined is None:
            if until is not None:
                self._say(f"{self.step} steps are finished: until={until} leaves none to make")
            return Records()
        # A new process would lack the same state that a checkpoint lacks.
        wanted = self.loop.recovery.on_failure != "stop" and not self.job.builder.template.lost(self.strategy)
        with seat(self, sys._getframe(2), wanted=wanted) as replaceable:
            while True:
                try:
                    make = self._make_step, self._rebalancing, self._say
                    with reading(lambda: self._stream):
                        make_steps(self, span, *make, replaceable=replaceable, joins=joined is not None)
                    return Records(record for record in self.history if record["step"] > span.first)
                except ResizeAtBoundary as asked:
                    joined = span = resized(self, asked, FitRange(span.first, self.job.ledger.goal))

    def join(self, span: FitRange) -> None:
        """Make the next `fit` continue with the rest of `span`. Called on a rank that has joined a training."""
        self._joined = span

    def stop_if(self, flag: bool) -> bool:
        """End `fit` after this step on all ranks if `flag` is true on any rank. Call it in a callback. Collective.

        Returns True on every rank if `fit` ends.
        """
        stops = self.job.stop_if(flag)
        self.stops = self.stops or stops
        return stops

    def switch(self, strategy: str, *, beside: bool = False) -> Switched:
        """Continue under another strategy: see `switch` in docs/reference/prepare.md. Collective."""
        return self.job.switch(strategy, beside=beside)

    def undo(self, *, beside: bool = False) -> Switched:
        """Go back to the strategy before the last switch. The weights stay as they are now. Collective."""
        return self.job.undo(beside=beside)

    def try_out(self, strategy: str, steps: int = 10) -> dict[str, Any]:
        """Train `steps` steps under another strategy, measure them, and undo them. Collective.

        During these steps there is no evaluation, checkpoint, callback or record. Raises TrainingError for data that
        can be read only once.
        """
        meeting.meet("try_out")
        return try_out(self.job, strategy, steps, self._update, again=self._stream.goes_back)

    def compare(self, *strategies: str, steps: int = 20) -> dict[str, Any]:
        """Measure several strategies in turns, and undo the steps (docs/reference/switching.md). Collective."""
        meeting.meet("compare")
        return compare(self.job, strategies, steps, self._update, again=self._stream.goes_back)

    def evaluate(self, data: Any = None, *, batch_size: int | None = None) -> float:
        """Return the mean loss over one pass of `data` (default: eval_data). Every sample counts once."""
        data = self.loop.eval_data if data is None else data
        if data is None:
            raise TrainingError("There is no data to evaluate on.", hint="trainer.evaluate(dataset)")
        return self.job.evaluate(data, batch_size=batch_size or self.arithmetic.total, collate=self.loop.collate)

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        tokens: int = 100,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Any:
        """Generate `tokens` tokens after `prompt`, or after each of several prompts. All ranks return the same tokens.

        See docs/reference/generation.md.
        """
        check_counts(tokens=tokens)
        sampling, inputs, device = Sampling(temperature, top_k, seed), self.job.config.inputs, self.job.device
        with self.job.ledger.clock.stopped():
            meeting.meet("generate")
            self.job.sync.resync()
            return generate(self.job.sharded_model, prompt, tokens, inputs=inputs, sampling=sampling, device=device)

    def save(self, path: str | Path, *, beside: bool = False) -> None:
        """Write model, optimizer, step, position in the data, history and seed to the directory `path`. Collective.

        A training under any strategy, on any number of ranks, can load the checkpoint. If the process is killed during
        a save, an earlier checkpoint at `path` stays intact. beside: copy the state to host memory and continue. A
        thread writes the checkpoint and reports a failure. The end of `fit` and the next save wait for this thread.
        """
        meeting.meet("save")
        self.saves.save(user_path(path), beside=beside)

    def load(self, path: str | Path) -> None:
        """Load a checkpoint that `save`, plain FSDP2 or torchtitan wrote on any number of ranks. Collective."""
        path = user_path(path)
        meeting.meet("load")
        self.saves.collect(wait=True)
        self.job.ledger.settle()
        # Call everything that may raise before anything changes.
        saved, before = self.job.opened(path), self.step
        position = saved.about["position"]
        self._stream.resume(position["epoch"], position["offset"], saved.about.get("data"))
        self.job.load(saved)
        self._stream.seed = self.job.seed
        self._go_to(position)
        self.saves.loaded(path)
        self.job.ledger.emit(Checkpointed(self.step, path=saved.named, action="loaded", before=before))

    def rewind(self, step: int) -> int:
        """Go back to the newest snapshot at or before `step`, and return its step. Collective.

        The strategy stays. Everything else gets the values of that step, and the training repeats the following steps.
        Raises TrainingError if there is no such snapshot.
        """
        meeting.meet("rewind")
        return self.snapshots.back_to(step)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model, on the CPU, on every rank. Collective.

        Its keys are the names of the unsplit model.
        """
        return self.job.full_state_dict()

    def _make_step(self) -> None:
        self._update(late=not self._callbacks)
        job = self.job
        if self.loop.eval_every and self.loop.eval_data is not None and job.step % self.loop.eval_every == 0:
            with automatic():
                job.log(eval_loss=self.evaluate())
        self.saves.after_step()
        self.snapshots.take()

    def _say(self, text: str) -> None:
        if self.job.rank == 0 and self.loop.progress:
            say(text)

    def _update(self, *, late: bool = False) -> None:
        """Make one step. late: no callback stores weights; see Job.late_weights."""
        job, step, epoch, offset = self.job, self.job.step, self._stream.epoch, self._stream.offset
        try:
            taken_back = True
            while taken_back:
                with job.switcher.first_step() as first:
                    with phase("optimizer"):
                        self._rate.prepare(step)
                    with phase("data"):
                        if job.ledger.data_ends:
                            self._stream.shards_end()
                            job.ledger.data_ends = False
                        shard = self._stream.next(job.seed_data(own=self._stream.own))
                    job.backward(shard)
                    if self.loop.clip_norm is not None:
                        job.clip(self.loop.clip_norm)
                    elif (step + 1) % self.loop.grad_norm_every == 0:
                        job.grad_norm()
                    first.prove()
                    with job.late_weights() if late else nullcontext():
                        job.optimizer.step()
                    job.optimizer.zero_grad()
                taken_back = first.taken_back
        except BaseException as error:
            # A batch whose loss is not finite is skipped. Any other batch that made no step is read again.
            if job.step == step and not isinstance(error, NotFinite):
                with suppress(TrainingError):  # data that cannot go back
                    self._stream.seek(epoch, offset)
            raise

    def _cut_for(self, strategy: Strategy) -> BatchSplit:
        return BatchSplit.of(self.loop.batch_size, strategy, microbatch_size=self.job.config.compute.microbatch_size)

    def _recut(self) -> None:
        axes = self.job.sharded_model.axes
        self.arithmetic = self._cut_for(self.strategy)
        self._stream.recut(axes.index("dp"), axes.size("dp"), self.strategy.replica_speeds)

    def _position(self) -> dict[str, Any]:
        return {"epoch": self._stream.epoch, "offset": self._stream.offset, "base_lr": self._rate.base}

    def _go_to(self, position: dict[str, Any]) -> None:
        self._rate.restore(position["base_lr"], self.job.step)
        self._stream.seek(position["epoch"], position["offset"])

    def _call_back(self, record: dict[str, Any]) -> None:
        # After an error only this rank has the record: a callback that communicates would wait forever.
        if not self.job.integrity.broken_off:
            self.saves.trained(record["seconds"])
            for callback in self._callbacks:
                callback(self, record)

    def __repr__(self) -> str:
        kind = type(self.model).__name__
        return f"Trainer({kind}, strategy {self.strategy}, {self.arithmetic}, step {self.step}, lr {self.lr:g})"
