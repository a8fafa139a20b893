"""One training job on this rank: forward, backward and what a step boundary does. The Trainer is built on it.

job = nbkit.prepare(model, optimizer, loss=loss_fn)
for batch in job.batches(loader):       # global batches, the same on every rank; this rank takes its rows
    result = job.backward(batch)
    job.clip(1.0); job.optimizer.step(); job.optimizer.zero_grad()
    job.log(loss=result.loss)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nbkit.errors import NotFinite, Stopped, TrainingError
from nbkit.rank.data import data_rng
from nbkit.rank.data.batch import Shard, shard_of
from nbkit.rank.data.data_position import Feed
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.parallel.grad_norm import clip
from nbkit.rank.parallel.sharded_model import Side
from nbkit.rank.rng.seeding import SHARED, seed_step
from nbkit.rank.telemetry.phases import phase
from nbkit.rank.train import validation
from nbkit.rank.train.builder import Blueprint, Model, Optimizer
from nbkit.rank.train.config import Setup
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.active_job import note
from nbkit.rank.train.control.recovery import become_one
from nbkit.rank.train.loop import Loop
from nbkit.rank.train.recorder import Recorder, record_run
from nbkit.rank.train.step.async_copy import sent
from nbkit.rank.train.step.gradients import Gradients
from nbkit.rank.train.step.history import History
from nbkit.rank.train.step.optimizer import OptimizerHandle
from nbkit.rank.train.step.pending_step import Pending
from nbkit.rank.train.step.precision import Precision, begin_update
from nbkit.rank.train.step.step_stats import Result
from nbkit.rank.train.switch.fallback import Fallback, first_step
from nbkit.rank.train.switch.switch import Switchable
from nbkit.rank.train.switch.verify import Proof, give_up, settled
from nbkit.rank.world.world import World
from nbkit.records.events import RunStarted, RunStopped, Switched
from nbkit.strategy import Strategy

__all__ = ["Job", "Result", "prepare"]


def prepare(
    model: Model,
    optimizer: Optimizer,
    *,
    loss: Loss,
    strategy: str = "ddp",
    seed: int = 0,
    inputs: Sequence[str] | None = None,
    precision: str | None = None,
    microbatch_size: int | None = None,
    example: Any = None,
    stages: Sequence[str] | None = None,
    tp_plan: Mapping[str, str] | None = None,
    recompute: bool = False,
    offload: str | None = None,
    compile: bool | str = False,
    log_dir: str | None = "runs",
    name: str | None = None,
) -> Job:
    """A job for people who have a loop; collective: every rank calls it.

    model: an nn.Module, or a callable that builds one. optimizer: a callable given the model, or, for a model that is a
    module, an optimizer of its parameters. loss: (output, target) -> mean or (sum, weight); with `inputs`, the names of
    what the model takes of a dict batch, loss gets (output, batch). precision: None, "bf16" or "fp16". microbatch_size:
    rows per rank and forward, None for all at once. example: a small batch to run the model on: pipelines and context
    parallelism need it, and tensor parallelism for all but well-known classes. All else: see Trainer.
    Raises TrainingError or StrategyError when it could not train as asked.
    """
    setup = Setup(loss, seed, inputs, precision, microbatch_size, example, stages, tp_plan, recompute, offload, compile)
    job = Job(model, optimizer, setup, strategy=strategy)
    record_run(job, log_dir, name=name)
    return job


class Job(Switchable):
    """A model, its optimizer and where they stand. `model` and `optimizer` stay the same objects for life."""

    def __init__(self, model: Model, optimizer: Optimizer, setup: Setup, *, strategy: str) -> None:
        place = World.join_from_env().place
        self.rank, self.world_size = place.rank, place.world_size
        chosen = Strategy.parse(strategy, self.world_size)
        cuda = place.device == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.recorder = Recorder(self.device)  # before there is a model: memory counts from here
        self.setup, self.seed = setup, setup.seed
        self.blueprint = Blueprint(
            model, optimizer, setup, rank=self.rank, world_size=self.world_size, device=self.device
        )
        self.precision = Precision(setup.precision, device=self.device, world_size=self.world_size)
        self.precision.check(self.blueprint.skeleton)
        side, inner = self.blueprint.first(chosen)
        self.model = self.blueprint.module
        self.optimizer = OptimizerHandle(
            inner, before_step=lambda: begin_update(self), after_step=self._after_step, after_zero=self._after_zero
        )
        self._take(side, inner)
        self.ledger = History(world_size=self.world_size)
        # Where this rank stands after an interrupt: a step was begun and not finished; the weights are half updated.
        self.broken_off = self.half_way = False
        self.feed, self._loop = Feed(), Loop()
        self.switches: list[Switched] = []
        self.proof: Proof | None = None  # of the last switch, until a step has been made under it
        self.fallback: Fallback | None = None  # likewise
        self._reduced = self._running = False
        self.run_dir: Path | None = None
        note(self)

    def adopt(self, side: Side, inner: torch.optim.Optimizer) -> None:
        """Compute with `side` and update with `inner` from now on."""
        self.gradients.release()
        self._take(side, inner)

    def _take(self, side: Side, inner: torch.optim.Optimizer) -> None:
        self.side = side
        self.optimizer.inner = inner
        self.model.__dict__ = side.module.__dict__
        self._known = {id(p) for p in self.model.parameters()}
        self.blueprint.took(side)
        self.gradients = Gradients(side, self.setup, self.precision, rank=self.rank, first=self.blueprint.first_batches)
        self.gradients.reseed(self.seed)

    @property
    def strategy(self) -> Strategy:
        """The strategy in force."""
        return self.side.strategy

    @property
    def previous(self) -> str | None:
        """The strategy before the last switch, proven or not. From any thread."""
        if (proof := self.proof) is not None:
            return proof.event.old
        return self.switches[-1].old if self.switches else None

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.ledger.step

    @step.setter
    def step(self, value: int) -> None:
        self.ledger.step = value

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dict per finished step, the same on every rank; within a run it is one step behind."""
        if not self._running:
            self.ledger.settle()
        return self.ledger.records

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, with a step boundary after each.

        The loader gives *global* batches, in the same order on every rank; `backward` takes this rank's rows. What a
        DataLoader shuffles or a dataset draws is seeded here, so that the ranks agree. A loop that was left by an
        error ends when the next one begins.
        """
        validation.check_loader(loader)
        return self._loop.over(self, loader)

    def backward(self, batch: Any) -> Result:
        """Forward and backward of one global batch (or of this rank's Shard of it), in micro-batches.

        Afterwards every rank holds the same gradients, those of the loss over the whole global batch.
        Raises NotFinite on CPU ranks before the weights are touched; on GPUs `at_boundary` does, one step later.
        """
        if self._reduced:
            raise TrainingError(
                "backward() twice in one step: the gradients hold the sum over all ranks already.",
                numbers=f"step {self.step + 1}",
                hint="job.optimizer.step(); job.optimizer.zero_grad()   (to accumulate: microbatch_size=)",
            )
        if not self._running:
            self.ledger.settle(keep=1)
        try:
            # What is around it too: rows, seeds, whether the loss is finite.
            with first_step(self) as first, phase("backward"):
                result = self._backward(batch)
        except BaseException as error:
            self.broken_off = not isinstance(error, NotFinite)
            self.optimizer.zero_grad()
            # The body of a loop over `batches` was left, and its generator is not told.
            self._loop.leave(self.ledger.ended_by, error)
            raise
        return self.backward(first.again(batch)) if first.taken_back else result

    def _backward(self, batch: Any) -> Result:
        axes = self.side.axes
        rows = {"ranks": axes.size("dp"), "rank": axes.index("dp")}
        shard = batch if isinstance(batch, Shard) else shard_of(batch, **rows)
        # Ranks that work on the same rows draw the same.
        seed_step(self.seed, self.step, axes.index("dp"))
        asked = step_boundary.inbox.acted + 1
        reduction = self.gradients.backward(
            shard, step=self.step, asked=lambda: step_boundary.inbox.stage(asked), seconds=self.ledger.clock.lap
        )
        self._reduced = True
        strategy = self.strategy
        lr = sent(self.optimizer.param_groups[0]["lr"])
        pending = Pending(self.step + 1, reduction, asked, shard.total, shard.indices, lr, strategy.mesh, str(strategy))
        if self.device.type == "cpu":
            self.ledger.check(pending)
        self.ledger.pending.append(pending)
        return Result(reduction)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`; the norm before, not waited for."""
        norm = self.grad_norm()
        with phase("optimizer"):
            clip(self.side.held, max_norm, norm)
        return norm

    def grad_norm(self) -> Tensor:
        """The 2-norm of all gradients, on the device; recorded in this step's history."""
        with phase("optimizer"):
            norm = self.side.grad_norm(self.device)
        self.log(grad_norm=norm)
        return norm

    def log(self, **numbers: float | Tensor) -> None:
        """Add numbers (0-dimensional tensors are not waited for) to the record of the step just made.

        Give the same on every rank: `history` is meant to be equal on all of them. `loss` is there already.
        """
        if not self.ledger.pending:
            raise TrainingError("log() before the first backward().", hint="job.backward(batch), then job.log(...)")
        numbers.pop("loss", None)
        self.ledger.pending[-1].add(numbers)

    @contextmanager
    def running(self, *, total: int = 0, owner: Any = None, arithmetic: str = "") -> Iterator[None]:
        """Steps are made inside: requests are served at boundaries, and the history is complete after it."""
        if isinstance(other := step_boundary.training(), Job):
            other._loop.leave()
        if step_boundary.training() is not None:
            raise TrainingError(
                "A training runs already.",
                numbers=f"it has made {step_boundary.training().step} steps",
                hint="wait, or stop it",
            )
        become_one(self)  # a step of zero 3 that was broken off shows whole parameters until then
        validation.check_parameters(self.optimizer, self.model, known=self._known, held=self.side.held.values())
        reason = "error"
        try:
            # Inside: an interrupt from here on must leave again, or every later training is refused.
            step_boundary.enter(owner or self, self.device)
            self._running = True
            self.ledger.emit(RunStarted(self.step, strategy=str(self.strategy), arithmetic=arithmetic, total=total))
            self.ledger.begin(total)
            with data_rng.own_draws():
                yield
            self.ledger.settle(act=True)
            settled(self)
            reason = "done"
        except BaseException as error:
            self.broken_off |= not isinstance(error, Stopped | GeneratorExit | NotFinite)
            reason = self.ledger.ended_by(error)
            self.half_way |= self.ledger.torn()
            give_up(self)
            with suppress(NotFinite):
                self.ledger.settle()
            self.ledger.pending.clear()
            self.optimizer.zero_grad()
            raise
        finally:
            self._running = False
            step_boundary.leave()
            self.ledger.emit(RunStopped(self.step, reason=reason))

    def at_boundary(self) -> None:
        """Between two steps: read the numbers of the step before last, and serve what all ranks agreed on."""
        self.recorder.at_boundary(self.step)
        self.ledger.settle(keep=1, act=True)

    def whole_again(self) -> None:
        """The ranks stand at the same place with the same weights, whatever was broken off before. Collective."""
        self.broken_off = self.half_way = False
        self.gradients.begin_again()

    def seed_data(self, *, own: bool) -> None:
        """Seed what reading the next batch draws: on this rank alone, or the same on every rank."""
        data_rng.seed(self.seed, self.step, self.world_size + 1 + self.side.axes.index("dp") if own else SHARED)

    def _after_step(self) -> None:
        self.side.data.after_step()
        self.half_way = False
        self.ledger.made()
        self.recorder.after_step(self)

    def _after_zero(self) -> None:
        self._reduced = False
