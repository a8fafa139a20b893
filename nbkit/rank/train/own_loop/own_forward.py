"""Support steps in which the user calls the model and computes the loss: `job.rows`, `job.model`, `job.backward(loss)`.

A rank computes the loss of its rows. `backward` multiplies it by the rank's share of the batch, so that the sum of the
gradients over the ranks equals the gradient of one process over the whole batch. Gradients stay on the rank until
`job.clip`, `job.grad_norm` or `job.optimizer.step` needs their sum (`sum_up`). So a step may have any number of losses.

One loss may depend on several jobs, such as the two networks of a GAN. A backward pass computes gradients for all of
them, as in plain torch. Each job sums its own gradients and updates its own parameters.

If ranks called the model or `backward` a different number of times, they would wait for ever or sum wrong numbers.
Before a call that communicates, the ranks meet and compare. For other calls the checksum of the step's data shows it.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import StrategyError, TrainingError
from nbkit.rank.data.batch import Shard, numbers_of, on_device
from nbkit.rank.device import accelerator
from nbkit.rank.loss.mean_over_rows import compares_rows
from nbkit.rank.parallel.module.forward_wrapper import in_backward
from nbkit.rank.parallel.proof.observe import nodes_behind, tensors_in
from nbkit.rank.rng.dropout_masks import key_of
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from nbkit.rank.telemetry.phases import phase
from nbkit.rank.train.argument_checks import check_edits
from nbkit.rank.train.control.rank_sync import EVERY
from nbkit.rank.train.step.step_stats import StepNumbers, StepReduction, StepResult
from nbkit.rank.world import meeting

Job = Any  # nbkit.rank.train.job's, which imports this file

_CALL = "_compiled_call_impl"  # if a module has it, torch calls it instead of the module's hooks and forward
_OUTPUT = "output of a job's model"  # a note on nodes of the autograd graph: number of the result -> its shape
_ROWS = "x, y = job.rows(batch)   before the forward"
_STEPS, _NODES = 4, 64  # the number of steps, and of nodes of the graph of a loss, that `_count_targets` looks at
_ALONE = 8  # cross entropies, at most, that show that there is one for each row: _NODES may hold no more
_ROUNDING = 1e-6  # of sums of class weights


@dataclass(frozen=True)
class OwnRows:
    """The rows of one call of `job.rows`, of any job.

    numbers: the indices of this rank's rows in the batch of `total` rows. shares: each data rank's fraction of the
    batch. cut: equal for jobs that split a batch in the same way. fingerprint: see Shard. drawn: the states of torch's
    generators after the call. trains: gradients were enabled.
    """

    numbers: Sequence[int]
    total: int
    shares: tuple[float, ...]
    cut: tuple[Any, ...]
    fingerprint: int
    drawn: list[Tensor]
    trains: bool

    @property
    def share(self) -> float:
        """Return this rank's share of the rows of the batch."""
        return len(self.numbers) / self.total


@dataclass
class _Process:
    """The state that all jobs of a process share.

    rows: the rows of the newest loss. given: the rows that `job.rows` has returned since then. inside: a job runs a
    backward pass now.
    """

    rows: OwnRows | None = None
    given: list[OwnRows] = field(default_factory=list)
    inside: bool = False
    loss: tuple[Tensor, int, int] | None = None  # (the rank's part of the newest loss, rows of the rank, of the batch)
    every: weakref.WeakSet[OwnForward] = field(default_factory=weakref.WeakSet)
    made: int = 0

    @property
    def newest(self) -> OwnRows | None:
        """Return the rows that `job.rows` returned last."""
        return self.given[-1] if self.given else self.rows

    def give(self, rows: OwnRows) -> None:
        """Note the rows of a call. Drop rows of an evaluation before it, because no loss uses them."""
        if rows.trains and not any(earlier.trains for earlier in self.given):
            self.given.clear()
        if not (rows.trains or not self.given or self.given[-1].trains) and self.given[-1].shares == rows.shares:
            self.given.pop()  # an evaluation has many batches
        self.given.append(rows)

    @property
    def jobs(self) -> list[OwnForward]:
        """Return the OwnForward of every job, in the same order on all ranks."""
        return sorted(self.every, key=lambda own: own.number)


_here = _Process()


def by_a_job() -> bool:
    """Return True inside a backward pass of `job.backward`."""
    return _here.inside


@contextmanager
def other_jobs_left_out() -> Iterator[None]:
    """Make existing jobs ignore calls of their models inside. nbkit calls a model to build a new job with it.

    Holds no reference to a job, so that a job which the user has deleted can be freed inside.
    """
    before, inside = [(weakref.ref(own), own._inside) for own in _here.jobs], _here.inside
    _set_left_out(((ref, True) for ref, _ in before), inside or bool(before))
    try:
        yield
    finally:
        _set_left_out(before, inside)


def _set_left_out(jobs: Iterable[tuple[weakref.ref[OwnForward], bool]], inside: bool) -> None:
    for ref, left_out in jobs:
        if (own := ref()) is not None:
            own._inside = left_out
    _here.inside = inside


class OwnForward:
    """The forward passes and losses that the user computes with one job.

    possible: the job belongs to a user's own loop. active: the loop has called `rows` of this job, or of another job
    that may share a loss with it. losses: the number of backward passes of this step whose gradients are not summed.
    number: the index of the job in this process. perturbed: True if summed gradients were dropped without a step.
    The user may have changed weights with these gradients, as SAM does. Each rank then changed only the weights that it
    updates.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.possible = self.active = self._inside = False
        _here.made = self.number = _here.made + 1
        _here.every.add(self)
        self.end()

    def end(self) -> None:
        """Reset the state of a step, because it is finished or is made in another way."""
        self.losses = self._calls = self._draws = self._mark = self._rows_of_losses = 0
        self._begun = self._called = self._started = self.perturbed = False
        self._newest: tuple[Tensor | float, int, int] = 0.0, 0, 0
        self._means, self._targets = 0, 0.0
        self._uneven = self._compares = self._edited = False
        self._trains: list[bool] = []
        self._versions: list[int] = []  # of the weights after the newest loss, if ranks have different rows
        self._grads: list[tuple[Tensor, int]] = []  # the gradients after the newest loss, and their versions
        self._logged: dict[str, Any] = {}
        self._reduction: StepReduction | None = None

    def begin_again(self) -> None:
        """Reset the state of a step and its rows, because the step was interrupted or the strategy has changed."""
        self.end()
        _here.given.clear()
        _here.rows = None

    def made(self) -> None:
        """Note that the optimizer has stepped."""
        self.end()
        if self._job.builder.template.draws and (rows := _here.rows) is not None:
            _here.rows = replace(rows, drawn=accelerator().generator_states(self._job.device))

    @property
    def waits(self) -> bool:
        """Return True if there may be gradients that were not summed over the ranks."""
        return bool(self.losses) or self._called

    # What the user calls --------------------------------------------------------------------------------------------

    def rows(self, batch: Any) -> Any:
        """Return this rank's rows of a global batch, on its device: see Job.rows."""
        job = self._job
        for own in _here.jobs:
            own._activate()
        if job.strategy.pp > 1:
            job.builder.plan(job.strategy)  # raises
        shard = job.training_step.cut(batch)
        trains, (index, ranks, _) = torch.is_grad_enabled(), self._cut
        everyone = [numbers_of(shard.parts, shard.total, ranks, rank) for rank in range(ranks)]
        self._refuse_empty(shard.total, [len(numbers) for numbers in everyone])
        if trains:
            self._begin()
        shares = tuple(len(numbers) / shard.total for numbers in everyone)
        drawn = accelerator().generator_states(job.device)
        _here.give(OwnRows(everyone[index], shard.total, shares, self._cut, shard.fingerprint, drawn, trains))
        return on_device(shard.data, job.device)

    def draw(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return random numbers for this rank's rows from a random function of torch: see Job.draw."""
        job, rows = self._job, self._rows("job.draw")
        self._draws += 1
        names = zlib.crc32(" ".join(job.builder.names).encode())  # jobs with the same seed draw different numbers
        keyed = KeyedDropout(nn.Identity(), key_of(job.seed, names, self._draws))
        with accelerator().generators_kept([job.device]), keyed.step(job.step, rows.numbers):
            made = function(*args, **kwargs)
        if not keyed.has_drawn or not isinstance(made, Tensor) or made.shape[:1] != (len(rows.numbers),):
            got = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
            raise TrainingError(
                f"job.draw draws one random tensor, whose dim 0 is the row; {_name(function)} does not.",
                numbers=f"{got}, for {len(rows.numbers)} rows",
                hint="job.draw(torch.randn_like, x), rand, randint, normal, bernoulli; "
                "or draw for the whole batch, and then job.rows",
            )
        return made

    def backward(
        self, loss: Tensor, *, weight: float | Tensor | None, reduction: str, retain_graph: bool, last: bool
    ) -> StepResult:
        """Run the backward pass of this rank's loss: see Job.backward."""
        job = self._job
        self._activate()
        self._check_loss(loss, weight, reduction)
        rows = self._rows("job.backward(loss)")
        self._refuse_draws(rows)
        self._refuse_changed()
        self._look_at_gradients()
        self._begin()
        given = list(_here.given)
        if weight is None and reduction == "mean" and len({one.shares for one in given}) > 1:
            raise TrainingError(
                "nbkit cannot tell to which batch the loss belongs, and this rank has different shares of the batches.",
                numbers=f"{', '.join(str(one.total) for one in given)} rows, given by job.rows since the last loss",
                hint="job.backward(loss, weight=len(x))   where x are the rows that the loss is the mean of",
            )
        if (name := self._outside(loss)) is not None:
            raise StrategyError(
                f"The loss reads a parameter of which each rank has only a part: {name}.",
                numbers=f"under {job.strategy}; the loss reads it without a call of job.model(...), as a gradient "
                "penalty does",
                hint="a forward that gives what the loss needs, called as job.model(...); or strategy='zero2'",
            )
        if weight is None and reduction == "mean" and rows.share < 1:
            self._count_targets(loss, len(rows.numbers))
            # ZeRO 3 would gather parameters, because a gradient reaches the model's output.
            if job.step % EVERY == 0 and job.strategy.zero < 3 and job.strategy.mesh.size == job.strategy.dp:
                self._compares |= compares_rows(loss, _output_shape, len(rows.numbers))
        job.ledger.begun = True
        number, named = self.losses + 1, f"job.backward, loss {self.losses + 1} of step {job.step + 1}"
        named += ", retain_graph=True" * retain_graph + ", last=True" * last + ", with a weight" * (weight is not None)
        try:
            with job.order(), phase("backward"):
                if self._talks or weight is not None:
                    meeting.meet(named)
                share = self._share(rows, weight, reduction)
                # The mean of nothing is NaN, and so is its product with 0.
                empty = weight is not None and float(weight) == 0 and not bool(torch.isfinite(loss))
                self._pass(None if empty else loss * share, retain_graph=retain_graph, last=last)
        except BaseException as error:
            job.broken(error)
            raise
        part = torch.zeros((), dtype=torch.float64, device=job.device) if empty else loss.detach().double() * share
        _here.loss = part, len(rows.numbers), rows.total
        self.losses, self._started, self._newest = number, last, (self._newest[0] + part, *_here.loss[1:])
        self._rows_of_losses += rows.total if given or not self._rows_of_losses else 0
        self._mark = zlib.crc32(f"{self._mark} {reduction} {[one.fingerprint for one in given]}".encode())
        _here.rows = rows
        _here.given.clear()
        self._versions = [p._version for p in job.sharded_model.data.leaves()] if rows.share < 1 else []
        for own in _here.jobs:  # the loss may have added to the gradients of other jobs
            own._note_gradients()
        assert self._reduction is not None
        return StepResult(self._reduction)

    def mean(self, value: Tensor | float, weight: float | Tensor | None) -> Tensor:
        """Return the mean of `value` over the rows of all ranks: see Job.mean."""
        job = self._job
        own = len(self._rows("job.mean").numbers) if weight is None else weight
        pair = [torch.as_tensor(each, dtype=torch.float64, device=job.device).detach() for each in (value, own)]
        summed = torch.where(pair[1] > 0, pair[0] * pair[1], 0.0)  # the mean of nothing is NaN
        sums = torch.stack([summed, pair[1]]) * job.sharded_model.counts
        with job.order():
            meeting.meet("job.mean")
            if job.world_size > 1:
                dist.all_reduce(sums)
        mean: Tensor = sums[0] / sums[1]
        return mean

    def log(self, numbers: dict[str, Any]) -> bool:
        """Keep `numbers` for the record of this step, if the step is not summed yet. Return True if they were kept."""
        if self.losses:
            self._logged.update(numbers)
        return bool(self.losses)

    # The model ------------------------------------------------------------------------------------------------------

    def _activate(self) -> None:
        if self.possible and not self.active:
            self.active = True
            self._job.builder.choose(own_forward=True)
            self.install()

    def install(self) -> None:
        """Make a call of the model run `call`. Call `install` again when the model shows another module."""
        if self.active:
            model = self._job.model
            before = vars(model).get(_CALL)
            vars(model)[_CALL] = _Call(self, model, before.compiled if isinstance(before, _Call) else before)

    def call(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the user's call of the model."""
        job = self._job
        if self._inside or job.sharded_model.inside or in_backward():
            return plain(*args, **kwargs)
        trains = torch.is_grad_enabled()
        self._inside = True
        try:
            if trains:
                if _here.newest is not None:
                    self._rows("job.model")
                self._begin()
            self._calls += 1
            with job.order(), phase("forward"), job.precision.autocast():
                if self._talks:
                    without = "" if trains else ", without gradients"
                    meeting.meet(f"job.model, call {self._calls} of step {job.step + 1}{without}")
                if trains and self._calls == 1 and not self.waits:
                    self._look(args, kwargs)
                with self._drawing(args, kwargs), job.sharded_model.data.calling(autocast=self._autocast):
                    output = plain(*args, **kwargs)
        except BaseException as error:
            if self._talks:  # other ranks may wait for messages of this rank
                job.broken(error)
            raise
        finally:
            self._inside = False
        if trains:
            self._called = True
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    _notes(tensor.grad_fn).setdefault(_OUTPUT, {})[tensor.output_nr] = tuple(tensor.shape)
        return output

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Ignore calls of the model and backward passes inside, because nbkit makes them."""
        before = self._inside, _here.inside
        self._inside = _here.inside = True
        try:
            yield
        finally:
            self._inside, _here.inside = before

    # The step -------------------------------------------------------------------------------------------------------

    def sum_up(self) -> None:
        """Sum the gradients over the ranks, if some are not summed yet. Collective.

        Raises NotFinite on CPU ranks, before the weights change.
        """
        job, step = self._job, self._job.training_step
        if not self.waits or job.waits_for_update:
            return
        self._refuse_summed()
        self._refuse_changed()
        self._look_at_gradients()
        self._begin()
        reduction, request = self._reduction, step.next_request
        assert reduction is not None
        value, own, total = self._newest
        if not self.losses and _here.loss is not None:
            value, own, total = _here.loss  # another job's loss, which depends on this model
        samples = self._rows_of_losses or total
        counts = job.sharded_model.counts
        try:
            with job.order(), phase("backward"):
                # Before some steps the ranks compare settings. A rank that has skipped this update waits there.
                if self._talks or job.step % EVERY == 0:
                    meeting.meet(f"the update of step {job.step + 1}")
                step.launch(
                    reduction,
                    request,
                    torch.as_tensor(value, dtype=torch.float64, device=job.device) * total * counts,
                    float(own * counts),
                    fingerprint=self._mark,
                    refuses=self._uneven,
                    compares=self._compares,
                    edited=self._edited,
                    targets=self._targets,
                )
                canary = job.sharded_model.sum_up(started=self._started)
                check = self._refuse if self._edited or job.step % EVERY < _STEPS else None
                step.summed(reduction, canary, request, samples=samples, losses=max(self.losses, 1), check=check)
        except BaseException as error:
            job.broken(error)
            raise
        logged, self.losses, self._called, self._started = self._logged, 0, False, False
        self._logged = {}
        if logged:
            job.ledger.log(logged)

    def close(self) -> None:
        """Drop forward passes without a backward pass. Raises TrainingError if losses are not summed yet."""
        data = self._job.sharded_model.data
        if not data.is_open:
            return
        if self.losses:
            raise TrainingError(
                f"Under {self._job.strategy} the weights are gathered within this step, and cannot be read.",
                numbers=f"step {self._job.step + 1}, after {self.losses} losses",
                hint="after job.optimizer.step(); or job.optimizer.zero_grad(), which drops the gradients",
            )
        data.reset(passes=0)

    def forget(self) -> None:
        """Drop the gradients that are not summed yet. Forward passes keep waiting for their backward pass.

        Collective if the sum has begun. Raises TrainingError if the user has changed weights with them.
        """
        self._refuse_changed()
        if self._started:
            self._job.sharded_model.data.finish()  # the sum has begun already
        if self._begun:
            self._job.sharded_model.data.drop()
        if self._reduction is not None:
            self._reduction = self._job.training_step.new_reduction()
        self.losses = self._mark = self._rows_of_losses = 0
        self._means, self._targets = 0, 0.0
        self._uneven = self._compares = self._edited = False
        self._newest, self._started, self._logged, self._grads = (0.0, 0, 0), False, {}, []

    def _begin(self) -> None:
        """Begin a step, unless it has begun."""
        job = self._job
        data = job.sharded_model.data
        self.share_weights()
        if self._begun and self._trains == [p.requires_grad for p in data.leaves()]:
            return
        if job.waits_for_update:  # a forward pass between job.clip and the optimizer's step
            return
        if self._begun and self.losses:
            raise TrainingError(
                "requires_grad of parameters was changed within a step.",
                numbers=f"after {self.losses} losses of step {job.step + 1}",
                hint="after job.optimizer.step(), or before the first job.backward(loss)",
            )
        job.model_handle.check()
        if not job.is_running:
            job.ledger.settle(keep=1)
        data.reset(passes=0)
        self._begun, self._reduction = True, job.training_step.new_reduction()
        self._trains = [p.requires_grad for p in data.leaves()]
        job.training_step.warn_if_changed()

    def share_weights(self) -> None:
        """Send the weights that this rank updates to the other ranks, if the user may have changed them.

        Collective in that case.
        """
        job, sharded_model, changed = self._job, self._job.sharded_model, self.perturbed
        if changed and (job.strategy.zero in (1, 2) or sharded_model.owned is not None):
            try:
                with job.order():
                    meeting.meet(f"the forward after gradients of step {job.step + 1} were dropped")
                    sharded_model.after_step()
                    sharded_model.data.settle()
            except BaseException as error:
                job.broken(error)
                raise
        self.perturbed = False

    def _pass(self, value: Tensor | None, *, retain_graph: bool, last: bool) -> None:
        """Run the backward pass of a loss. value: None if no row of this rank counts, so that there is no gradient."""
        job, data = self._job, self._job.sharded_model.data
        if value is None and job.training_step.coupled:
            raise TrainingError(
                "No target of this rank counts in the loss, but BatchNorm waits for its backward pass.",
                numbers="weight 0, and a loss that is not finite",
                hint="loss = (each * mask).sum() / mask.sum().clamp(min=1)",
            )
        if retain_graph:
            data.keep_open()
        if last:
            data.start()
        before, _here.inside = _here.inside, True
        try:
            if value is not None:
                value = job.precision.scaled(value if data.apart == 1 else value * data.apart)
                value.backward(retain_graph=retain_graph)
        finally:
            _here.inside = before
        data.hold()
        for other in _here.jobs:
            if other is not self and other._called:
                other._job.sharded_model.data.pass_over()

    def _share(self, rows: OwnRows, weight: float | Tensor | None, reduction: str) -> float | Tensor:
        """Return the factor for the rank's loss. Collective along dp if a weight is given."""
        if reduction == "sum":
            return 1.0
        if weight is None:
            return rows.share
        job = self._job
        own = torch.as_tensor(weight, dtype=torch.float64, device=job.device).detach().reshape(())
        total = own.clone()
        if (group := job.sharded_model.axes.group("dp")) is not None:
            dist.all_reduce(total, group=group)
        return torch.where(total > 0, own / total, 0.0)

    # Checks ---------------------------------------------------------------------------------------------------------

    @property
    def _cut(self) -> tuple[Any, ...]:
        axes, speeds = self._job.sharded_model.axes, self._job.strategy.replica_speeds
        return axes.index("dp"), axes.size("dp"), speeds

    @property
    def _autocast(self) -> bool:
        return self._job.precision.dtype is not None

    @property
    def _talks(self) -> bool:
        """Return True if a call of the model, or its backward pass, waits for other ranks."""
        job = self._job
        strategy = job.strategy
        splits = strategy.tp > 1 or strategy.cp > 1 or strategy.ep > 1 or (strategy.zero == 3 and strategy.shard > 1)
        return bool(splits or job.training_step.coupled or job.builder.facts.collectives)

    def _rows(self, what: str) -> OwnRows:
        """Return the newest rows. Raises TrainingError if there are none, or if this job splits batches in another way.

        what: the call that needs the rows, for the error.
        """
        if (rows := _here.newest) is None:
            raise TrainingError(
                f"{what} was called before job.rows, so nbkit does not know which rows of a batch this rank has.",
                hint=_ROWS,
            )
        if rows.cut != self._cut:
            (_, theirs, _), (_, ours, _) = rows.cut, self._cut
            raise TrainingError(
                "The newest rows were cut for another job, whose strategy gives the ranks other rows.",
                numbers=f"{what} under {self._job.strategy}, {ours} parts; the rows are one of {theirs}",
                hint="one strategy for all jobs of a loop: other.switch(str(job.strategy)); "
                "or job.batches(loader, others=[other])",
            )
        return rows

    def _refuse_empty(self, total: int, counts: Sequence[int]) -> None:
        if not min(counts):
            raise TrainingError(
                "The batch has too few rows: a rank would have none for its forward pass.",
                numbers=f"{total} rows over {len(counts)} data ranks",
                hint="DataLoader(..., drop_last=True), and at least a row for each; or job.backward(batch)",
            )

    def _check_loss(self, loss: Tensor, weight: Any, reduction: str) -> None:
        job = self._job
        self._refuse_summed()
        if self._started:
            raise TrainingError(
                "There is another loss after the one with last=True, in the same step.",
                numbers=f"step {job.step + 1}, loss {self.losses + 1}",
                hint="last=True for the last job.backward(loss) before job.optimizer.step()",
            )
        if not loss.requires_grad:
            raise TrainingError(
                "The loss does not depend on parameters that train.",
                numbers="requires_grad is False",
                hint="compute it from the model's output, without .detach(), .item() or torch.no_grad()",
            )
        if reduction not in ("mean", "sum") or (reduction == "sum" and weight is not None):
            raise TrainingError(
                "reduction= is 'mean' or 'sum', and only a mean has a weight.",
                numbers=f"reduction={reduction!r}, weight={weight!r}",
                hint="job.backward(loss, reduction='sum')   or   job.backward(loss, weight=mask.sum())",
            )

    def _refuse_summed(self) -> None:
        job = self._job
        if job.training_step.reduced:
            raise TrainingError(
                "The gradients already hold sums over all ranks, so those of one rank cannot be added.",
                numbers=f"step {job.step + 1}",
                hint="job.optimizer.zero_grad() after each job.optimizer.step(), and job.clip or job.grad_norm after "
                "the last job.backward(loss) of a step",
            )

    def _refuse_changed(self) -> None:
        """Raise TrainingError if the user has changed weights while the gradients are those of this rank's rows."""
        job, versions, losses = self._job, self._versions, self.losses
        self._versions = []
        leaves = job.sharded_model.data.leaves() if losses and versions else []
        changed = sum(p._version != was for p, was in zip(leaves, versions, strict=False))
        if not changed:
            return
        job.optimizer.zero_grad()
        raise TrainingError(
            "Weights were changed after job.backward(loss), when p.grad is the gradient of this rank's rows only.",
            numbers=f"step {job.step + 1}, under {job.strategy}: {changed} of {len(versions)} weights",
            hint="job.grad_norm() before the change: it sums the gradients over the ranks; then use each p and p.grad "
            "of job.optimizer.param_groups",
        )

    def _note_gradients(self) -> None:
        job, waits = self._job, self.losses and not self._started
        grads = [p.grad for p in job.sharded_model.data.leaves()] if waits and job.strategy.mesh.size > 1 else []
        self._grads = [(grad, grad._version) for grad in grads if grad is not None]

    def _look_at_gradients(self) -> None:
        """Note if the user changed gradients before the ranks sum them. `p.grad = None` is allowed.

        Only some ranks may have changed gradients, so the reduction of the step tells all ranks.
        """
        known = {id(grad): version for grad, version in self._grads}
        grads = [p.grad for p in self._job.sharded_model.data.leaves()] if known else []
        self._edited |= any(grad is not None and known.get(id(grad)) != grad._version for grad in grads)
        self._grads = []

    def _refuse_draws(self, rows: OwnRows) -> None:
        """Raise TrainingError if random numbers were drawn since `job.rows`: all ranks would draw the same numbers."""
        now = accelerator().generator_states(self._job.device)
        if all(torch.equal(old, new) for old, new in zip(rows.drawn, now, strict=True)):
            return
        raise TrainingError(
            "Random numbers were drawn between job.rows and job.backward: each rank draws the same for its rows.",
            numbers=f"step {self._job.step + 1}, under {self._job.strategy}",
            hint="noise = job.draw(torch.randn_like, x), by row; or draw for the whole batch, and "
            "x, noise = job.rows([x, noise])",
        )

    def _count_targets(self, loss: Tensor, rows: int) -> None:
        """Count the targets of each mean cross entropy of the loss, for `_refuse`.

        Looks at the first 4 of every 100 steps, because reading the counts waits for the device.
        """
        if self._job.step % EVERY >= _STEPS:
            return
        found = [_weights_of_targets(node) for node in islice(nodes_behind([loss]), _NODES)]
        each = [weights for weights in found if weights is not None]
        if len(each) >= min(rows, _ALONE) and any(weights.numel() % rows for weights in each):
            return  # a cross entropy for each row, whose mean is a mean over rows; several of all rows divide evenly
        for weights in each:
            self._means += 1
            self._targets += self._means * float(weights.sum()) / rows  # a plain sum may be the same on all ranks
            if weights.numel() % rows == 0:
                of_rows = weights.reshape(rows, -1).sum(1)
                self._uneven |= bool((of_rows != of_rows[0]).any())

    def _refuse(self, numbers: StepNumbers) -> None:
        """Raise TrainingError for changed gradients, a loss that compares rows, or one that gives rows other weights.

        The last is so if rows have different numbers of targets in a mean cross entropy.
        """
        job, uneven, each = self._job, numbers.refused, numbers.targets
        check_edits(numbers, step=job.step + 1, strategy=str(job.strategy))
        if job.step % EVERY >= _STEPS:
            return
        if numbers.compared:
            raise TrainingError(
                "The loss of a row depends on other rows, and each rank has only some of the rows.",
                numbers=f"step {job.step + 1}, under {job.strategy}, in the rows of rank {numbers.compared[0]}",
                hint="strategy='tp', where each rank has all rows: for a contrastive loss, the root of a mean, or a "
                "ratio of sums; or job.backward(loss, weight=len(x)), to train with the mean over the ranks",
            )
        if not each or (not uneven and max(each) - min(each) <= _ROUNDING * max(each)):
            return
        shown = ", ".join(f"{one:g}" for one in each[:4]) + ", ..." * (len(each) > 4)
        within = f"; the rows of rank {uneven[0]} have different numbers" if uneven else ""
        raise TrainingError(
            "The loss is a mean over the targets that count, and job.backward treats it as a mean over rows.",
            numbers=f"step {job.step + 1}, under {job.strategy}: {shown} targets for each row of ranks 0, 1, ..."
            + within,
            hint="job.backward(loss, weight=(target != -100).sum())   with the ignore_index of the loss; "
            "with class weights w, weight=w[target].sum(); for a mean over rows, weight=len(x)",
        )

    def _outside(self, loss: Tensor) -> str | None:
        """Return the name of a split parameter that the loss reads outside of a call of the model, or None."""
        job = self._job
        if not job.sharded_model.data.parts() and job.strategy.tp == job.strategy.cp == 1:
            return None
        names = dict.fromkeys(map(id, job.sharded_model.data.leaves()), "of a part that was called by itself")
        names |= {id(p): repr(name) for name, p in job.sharded_model.data.held.items()}
        for node in nodes_behind([loss], lambda node: _OUTPUT in _notes(node)):
            if (name := names.get(id(getattr(node, "variable", None)))) is not None:
                return name
        return None

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Examine in the first steps if rows depend on each other, unless an example has shown it. Collective.

        Raises StrategyError, on every rank, if they do and the strategy in force splits the rows of a batch.
        """
        job = self._job
        if not job.config.own_loss or job.builder.facts.looked is not None or (args and kwargs):
            return
        # Use the same rows on every rank: the results decide how often a rank runs the model.
        given: list[Any] = [on_device(kwargs or list(args), torch.device("cpu")) if job.rank == 0 else None]
        if job.world_size > 1 and (
            job.strategy.mesh.size > job.strategy.dp or job.strategy.zero == 3 or job.strategy.ep > 1
        ):
            dist.broadcast_object_list(given, src=0, device=job.device)
        tensors = [tensor for tensor in tensors_in(given) if tensor.ndim]
        rows = len(tensors[0]) if tensors else 0
        batch = [given[0], tensors[0].detach() if tensors else None]
        shard = Shard(batch, rows, rows, range(rows), everything=lambda: (batch,) if rows else ())
        with self.left_out():
            job.builder.look_at_first(job.sharded_model, shard, job.step)
        job.sharded_model.data.reset(passes=0)

    def _drawing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Return the context in which the model draws random numbers that depend on the row."""
        dropout = self._job.training_step.dropout
        first = next((tensor for tensor in tensors_in((args, kwargs)) if tensor.ndim), None)
        return nullcontext() if dropout.idle() or first is None else self._keyed(dropout, len(first))

    @contextmanager
    def _keyed(self, dropout: KeyedDropout, count: int) -> Iterator[None]:
        job, rows = self._job, _here.newest
        fits = rows is not None and rows.cut == self._cut and count == len(rows.numbers)
        numbers = rows.numbers if fits and rows is not None else range(count)
        with accelerator().generators_kept([job.device]), dropout.step(job.step, numbers, self._calls - 1):
            yield
        if not fits and rows is not None and dropout.has_drawn and job.model.training and torch.is_grad_enabled():
            raise TrainingError(
                "The model draws random numbers, but was called with rows that are not from job.rows.",
                numbers=f"{count} rows; job.rows gave {len(rows.numbers)}",
                hint="a call for each: real = job.model(x); fake = job.model(y)",
            )


class _Call:
    """Replaces the call of `model`. compiled: the earlier value of _CALL, which this calls."""

    def __init__(self, own: OwnForward, model: nn.Module, compiled: Callable[..., Any] | None) -> None:
        self._own, self._model, self.compiled = weakref.ref(own), weakref.ref(model), compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own, model = self._own(), self._model()
        assert model is not None
        plain = self.compiled or model._call_impl
        return plain(*args, **kwargs) if own is None else own.call(plain, args, kwargs)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _notes(node: Any) -> dict[str, Any]:
    """Return the metadata dict of a node of the autograd graph."""
    notes: dict[str, Any] = node.metadata
    return notes


def _output_shape(node: Any, number: int) -> tuple[int, ...] | None:
    """Return the shape of a job's output that a node of the autograd graph has made as result `number`, or None."""
    found: tuple[int, ...] | None = _notes(node).get(_OUTPUT, {}).get(number)
    return found


def _weights_of_targets(node: Any) -> Tensor | None:
    """Return the weight of each target in a mean cross entropy, 0 for ignored ones; None for another node."""
    if not node.name().startswith("NllLoss") or getattr(node, "_saved_reduction", None) != 1:
        return None
    try:
        target, weight = node._saved_target, node._saved_weight
    except RuntimeError:  # the user has freed this part of the graph
        return None
    counts = target != node._saved_ignore_index
    weighed: Tensor = counts if weight is None else weight[torch.where(counts, target, 0)] * counts
    return weighed.double()
