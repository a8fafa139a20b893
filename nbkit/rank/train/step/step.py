"""Make a step under any strategy. A Trainer and a user's own loop call the same methods, in this order:

1. `rows`: take this rank's rows of the global batch;
2. `backward`: run forward and backward passes in the order of the strategy's schedule (ShardedModel.backward). Sum
   gradients (over the data axis) and the results of the step over the ranks. CPU ranks also check the results;
3. `grad_norm` and `clip`: over the gradients of all ranks;
4. `update`: make the optimizer's step, unless a scaled gradient is not finite on any rank;
5. `boundary`: read the results of an earlier step, and serve a request that all ranks hold.

The gradients equal those of one process over the whole global batch: every row has the same weight, on whatever rank it
is. A mean of the ranks' means would not have this property. The divisor of a mean is known in advance, so the loss for
backward contains it. The divisor of (sum, weight) is known only after the last forward pass of all ranks. It is summed
during the backward pass, and the gradients are divided afterwards. The same holds for a mean over the targets that
count (loss/counted_targets.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.rank.data.batch import Parts, Shard, pair, shapes_of, shard_of
from nbkit.rank.device import accelerator
from nbkit.rank.loss.mean_over_rows import row_losses
from nbkit.rank.loss.reads_model import reading_no_parameter
from nbkit.rank.parallel.grad_norm import clip, scale
from nbkit.rank.parallel.micro_batch import (
    ForwardPass,
    Micro,
    check_collectives,
    check_stages,
    micro_batches,
    most_passes,
    whole_of,
)
from nbkit.rank.parallel.module.batch_norm import check_buffers, check_level, takes_all_ranks, watched
from nbkit.rank.parallel.plan import parts_rows
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from nbkit.rank.rng.seeding import SHARED, seed_step
from nbkit.rank.telemetry.phases import clock, phase
from nbkit.rank.train import argument_checks
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.rank_sync import EVERY, Integrity
from nbkit.rank.train.replace.backup import Backups
from nbkit.rank.train.step.history import History
from nbkit.rank.train.step.precision import Precision
from nbkit.rank.train.step.step_stats import Pending, StepNumbers, StepReduction, StepResult, to_host_async
from nbkit.rank.train.step_count import Counts, StepCount


@dataclass
class _Sums:
    """Sums over the forward passes of a step on this rank."""

    loss: Tensor
    weight: Tensor | float = 0.0
    tokens: int = 0
    summed: bool = False


_AT_ONCE = 1 << 22  # elements whose norm is computed at once


class TrainingStep:
    """Makes the steps of one sharded model and its optimizer.

    reduced: the gradients are summed over all ranks. coupled: a forward pass waits for all ranks. dropout: makes
    dropout masks depend on the rows.
    """

    def __init__(
        self,
        sharded_model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        builder: Builder,
        *,
        precision: Precision,
        ledger: History,
        integrity: Integrity,
        backups: Backups,
        seed: int,
        before_count: Callable[[], None] = lambda: None,
    ) -> None:
        """before_count: called before a step whose memory is measured."""
        self.sharded_model, self.optimizer, self.builder = sharded_model, optimizer, builder
        self._strategy = str(sharded_model.strategy)
        self.precision, self.ledger, self.integrity, self.seed = precision, ledger, integrity, seed
        self.backups = backups
        self.microbatch_size = builder.config.compute.microbatch_size
        self.rank, self.world_size, self.device = builder.rank, builder.world_size, builder.device
        self.reduced = False
        self._made, self._before_count = 0, before_count
        self._count: StepCount | None = None  # measures the running step
        self.counted = Counts()  # the measurements of the second step
        loss = reading_no_parameter(builder.config.loss, sharded_model.strategy, builder.module)
        self._forward = ForwardPass(sharded_model, loss, builder.config.inputs)
        fused = builder.config.fuses_dropout(self.device)
        self.dropout = KeyedDropout(sharded_model.module, seed, builder.facts.draws, fused=fused)
        self._watched, self._drift_unknown = watched(sharded_model.module), True
        self.coupled = any(takes_all_ranks(module) for module in sharded_model.module.modules())
        # Parameters that are split over ranks, and their versions after the last step.
        self._parts, self._changes = sharded_model.data.parts(), list[int]()
        # The parameters that every rank holds whole, and all versions after the last step; [] if not known.
        replicas = (
            not self._parts
            and "mine" not in sharded_model.strategy.settings
            and sharded_model.strategy.mesh.size == sharded_model.strategy.dp > 1
        )
        replicas &= sharded_model.data.apart == 1 and sharded_model.strategy.ep == 1
        self._replicas = [p for p in sharded_model.module.parameters() if p.is_floating_point()] if replicas else []
        self._versions = list[int]()
        # True if the loss function returns (sum, weight). Ranks that do not call it know this after the first step.
        self._summed: bool | None = None

    def reseed(self, seed: int) -> None:
        """Use `seed` for random numbers from now on."""
        self.seed = self.dropout.seed = seed

    def count_again(self) -> None:
        """Measure memory and traffic again, in the step after the next one."""
        self._made, self.counted = 0, Counts()

    def compare_buffers(self) -> None:
        """Compare the buffers that forward passes update between the ranks, in the next step."""
        self._drift_unknown = True

    def release(self) -> None:
        """Remove the hooks from the modules, because another sharded model is in force."""
        self.dropout.release()

    def begin_again(self) -> None:
        """Make the next step repeat what a first step does once. Call it on all ranks."""
        self.sharded_model.begin_again()
        self.precision.level()
        self._drift_unknown, self._changes, self._versions = True, [], []

    def rows(self, batch: Any) -> Shard:
        """Return this rank's rows of a global batch. Seed so that ranks with the same rows draw the same numbers."""
        seed_step(self.seed, self.ledger.step, self.sharded_model.axes.index("dp"))
        return batch if isinstance(batch, Shard) else self.cut(batch)

    def cut(self, batch: Any) -> Shard:
        """Return this rank's rows of a global batch that every rank holds."""
        axes, speeds = self.sharded_model.axes, self.sharded_model.strategy.replica_speeds
        return shard_of(batch, ranks=axes.size("dp"), rank=axes.index("dp"), speeds=speeds)

    def backward(self, shard: Shard) -> StepResult:
        """Compute the gradient of every parameter. Return the results of the step, which may arrive later.

        Raises NotFinite on CPU ranks, before the weights change. On GPUs `boundary` raises it, one step later.
        """
        sharded_model, micros, ledger, step = self.sharded_model, self._cut(shard), self.ledger, self.ledger.step
        request = self.next_request
        self.builder.look_at_first(sharded_model, shard, step)
        facts = self.builder.facts
        self.dropout.plan = facts.draws
        # Returns the context for the forward pass of a micro-batch. It gets the numbers of the rows.
        drawing: Callable[[Sequence[int]], AbstractContextManager[None]]
        drawing = _undrawn if self.dropout.idle() else partial(self.dropout.step, step)
        parted = parts_rows(sharded_model.strategy, self.builder.options)
        changed_loss = self.builder.changed_loss
        changed = parted and changed_loss.begin()
        counted = facts.counted if parted else None
        whole = whole_of(shard, counted, sharded_model, self.device)
        # The known part of the divisor of a mean. If rows are counted, it is the whole divisor.
        expected = shard.total * (counted.per_row if counted is not None else 1)
        reduction = self.new_reduction()
        sums = _Sums(torch.zeros((), dtype=torch.float64, device=self.device))
        apart = sharded_model.data.apart
        sharded_model.data.reset(passes=most_passes(shard, sharded_model, self.microbatch_size))
        self.warn_if_changed()
        if self.coupled:
            dp, parts = sharded_model.axes.size("dp"), shard.parts
            check_level(shard.total, ranks=dp, microbatch_size=self.microbatch_size, parts=parts)

        # The result of the reduction means that all backups have arrived. If one is being sent, launch it at the end.
        late, laps = self.backups.under_way, list[float]()
        counts = sharded_model.counts
        carried = reduction.carried() if micros and sharded_model.sums_numbers and not late else None

        def last_loss() -> None:
            laps.append(ledger.clock.lap())
            if not late:
                launch()

        def launch() -> None:
            self.launch(
                reduction,
                request,
                sums.loss if counts else torch.zeros_like(sums.loss),
                sums.weight if counts else 0.0,
                weighted=sums.summed,
                tokens=sums.tokens if counts else 0,
                seconds=laps[0],
                fingerprint=shard.fingerprint,
                data_ends=shard.ends,
                refuses=changed and changed_loss.defect is not None,
            )

        def forward(stage: int, number: int, received: tuple[Tensor, ...]) -> tuple[Any, ...]:
            micro = micros[number]
            with phase("forward"), self.precision.autocast(), drawing(micro.numbers):
                output, part, tokens = self._forward.run(micro, stage, received, counted, whole)
                if part is not None and parted:
                    changed_loss.look(micro.data, output, micro.rows, counted)
                if part is not None and shard.hears is not None:
                    target = pair(micro.data, self._forward.inputs)[1]
                    each = row_losses(self._forward.loss, output, target, micro.rows, self.device)
                    if sharded_model.counts:
                        shard.hears([shard.indices[number] for number in micro.numbers], each)
            if part is None:
                return output  # type: ignore[no-any-return]
            if not part.value.requires_grad:
                raise TrainingError(
                    "The loss does not depend on the model's parameters.",
                    numbers="requires_grad is False",
                    hint="compute it from the model's output, without .detach(), .item() or torch.no_grad()",
                )
            sums.loss = sums.loss + part.detached().total
            sums.weight = sums.weight + part.weight
            sums.summed = part.summed
            sums.tokens += tokens
            value = part.value if part.summed else part.value * (part.weight / expected)
            return (self.precision.scaled(value if apart == 1 else value * apart),)

        if self._is_counted:
            self._before_count()
            compiled = self.builder.config.compute.compile
            self._count = StepCount(sharded_model, self.optimizer, self.device, memory=not compiled)
        with self._counting():
            canary = sharded_model.backward(
                len(micros),
                forward,
                key=lambda i: shapes_of(micros[i].data),
                launch=last_loss,
                on_op=clock.on_op,
                autocast=self.precision.dtype is not None,
                numbers=carried,
            )
        if late:
            launch()
        self._finish(reduction, canary)
        if micros and sharded_model.gives_output:
            self._summed = sums.summed
        elif self._summed is None and counted is None:
            # Wait only once: a loss function always returns the same form.
            self._summed = reduction.read().weighted
        if self._summed or counted is not None:
            grads = [p.grad for p in sharded_model.held.values() if p.grad is not None]
            factor = reduction.per_weight(1 if counted is None else expected)
            if accelerator().holds(self.device) or factor != 1:
                scale(grads, factor)
        check = (lambda numbers: changed_loss.end(numbers.refused)) if changed else None
        self._note(reduction, request, samples=shard.total, indices=shard.indices, parts=shard.parts, check=check)
        return StepResult(reduction)

    def new_reduction(self) -> StepReduction:
        """Return a reduction for the results of a step, before it is launched."""
        plan = self.sharded_model.plan
        layers = len(plan.facts.routed.layers) if plan.strategy.ep > 1 else 0
        return StepReduction(rank=self.rank, world_size=self.world_size, device=self.device, layers=layers)

    @property
    def next_request(self) -> int:
        """Return the number of the request that the next reduction asks about."""
        return step_boundary.inbox.acted + 1

    def launch(
        self,
        reduction: StepReduction,
        request: int,
        loss: Tensor,
        weight: Tensor | float,
        *,
        weighted: bool = False,
        tokens: int = 0,
        seconds: float | None = None,
        fingerprint: int,
        data_ends: bool = False,
        refuses: bool = False,
        compares: bool = False,
        edited: bool = False,
        targets: float = 0.0,
    ) -> None:
        """Start to sum the results of the step over the ranks: see StepReduction.launch.

        seconds: the seconds of the step; default: those until now.
        """
        self.backups.wait()  # a rank with the reduction's result knows that all ranks have their backups
        reduction.launch(
            loss,
            weight,
            weighted=weighted,
            stage=step_boundary.inbox.stage(request),
            tokens=tokens,
            seconds=self.ledger.clock.lap() if seconds is None else seconds,
            fingerprint=fingerprint,
            backup=self.backups.spent(),
            ends=step_boundary.told_to_end(),
            data_ends=data_ends,
            counted=(self.counted.peak, self.counted.sent),
            refuses=refuses,
            compares=compares,
            edited=edited,
            targets=targets,
            weights=self._weights(),
            # A learning rate on a device is compared only every 100 steps, because reading it waits.
            rates=sum(lr for group in self.optimizer.param_groups if isinstance(lr := group.get("lr"), int | float)),
            routed=[sum(tokens.values()) for tokens in self.sharded_model.data.routed],
        )

    def summed(
        self,
        reduction: StepReduction,
        canary: Tensor | None,
        request: int,
        *,
        samples: int,
        losses: int,
        check: Callable[[StepNumbers], None] | None,
    ) -> None:
        """Note that the gradients of the user's losses are summed over the ranks. Raises as `backward` does.

        check: called with the results before the weights change. It waits for the device.
        """
        self._finish(reduction, canary)
        self._note(reduction, request, samples=samples, indices=range(samples), losses=losses, check=check)

    def _finish(self, reduction: StepReduction, canary: Tensor | None) -> None:
        reduction.finish(canary)
        self.precision.unscale(self.sharded_model.held.values())

    def _note(
        self,
        reduction: StepReduction,
        request: int,
        *,
        samples: int,
        indices: Sequence[int],
        parts: Parts = None,
        losses: int = 0,
        check: Callable[[StepNumbers], None] | None = None,
    ) -> None:
        """Note a step whose gradients are summed. CPU ranks check it. check: see `summed`."""
        sharded_model, ledger = self.sharded_model, self.ledger
        if self._drift_unknown:
            # Check before the first update, because it would use the wrong buffers.
            check_buffers(sharded_model.module, self._watched, axes=sharded_model.axes, device=self.device)
            self._drift_unknown = False
        self.reduced = True
        clock.routed, clock.experts = sharded_model.data.routed, sharded_model.data.expert_times
        lr, mesh = to_host_async(self.optimizer.param_groups[0]["lr"]), sharded_model.strategy.mesh
        shape: Any = {"mesh": mesh, "strategy": self._strategy, "parts": parts, "losses": losses}
        shape["ep"] = sharded_model.strategy.ep
        pending = Pending(ledger.step + 1, reduction, request, samples, indices, lr, **shape)
        if check is not None:
            check(reduction.read())  # first, because it may know why a loss is not finite
        if not accelerator().holds(self.device):
            ledger.check(pending)
        ledger.pending.append(pending)

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of all gradients, as a tensor on the device. The history of this step records it.

        Raises NotFinite on CPU ranks, before the weights change. On GPUs reading the record raises it.
        """
        with phase("optimizer"):
            norm = self.sharded_model.grad_norm(self.device)
        if not accelerator().holds(self.device) and not self.precision.pending:
            argument_checks.check_gradients(float(norm), step=self.ledger.step + 1, steps_since=0)
        self.ledger.log({"grad_norm": norm})
        return norm

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`.

        Return the norm before scaling, as a tensor. The host does not wait for it.
        """
        norm = self.grad_norm()
        with phase("optimizer"):
            clip(self.sharded_model.held, max_norm, norm)
        return norm

    def update(self, *, late: bool = False) -> None:
        """Make the optimizer's step. With a scaled loss, skip it if a gradient is not finite on any rank.

        A skipped step counts as a step. With a scaled loss the record gets loss_scale, the scale of this step, and
        skipped, 1 if the step was skipped. late: wait for the weights that other ranks updated only when they are read,
        at the latest in the next step. This is only for callers that have stored no weight.
        """
        made = True
        if self.precision.pending:
            scale, made = self.precision.scale or 1.0, self.precision.may_step()
            self.ledger.log({"loss_scale": scale, "skipped": float(not made)})
        with self.integrity.changing() if made else nullcontext(), self._counting(update=True):
            if made:
                if self.builder.template.draws:
                    seed_step(self.seed, self.ledger.step, SHARED)  # replicas draw the same numbers
                self.optimizer.step()
            self.sharded_model.after_step()
            if not late:
                self.sharded_model.data.settle()
        if self._count is not None:
            self.counted, self._count = self._count.done(), None
        self._made += 1
        self.note_versions(late=late)
        self.ledger.made()

    def note_versions(self, *, late: bool = False) -> None:
        """Note the versions of weights, after nbkit has changed them: see `warn_if_changed` and `_weights`.

        late: some weights will still arrive.
        """
        if self._parts:
            self._changes = [p._version for p in self._parts]
        if self._replicas:
            self._versions = [] if late else [p._version for p in self.sharded_model.data.leaves()]

    @torch.no_grad()
    def _weights(self) -> Tensor | None:
        """Return the norm of the weights in the first 4 of every 100 steps, and after the user has changed them.

        Otherwise return None. The ranks compare it, because each may have changed its weights in another way. If only
        some ranks have a norm, all ranks compare in the next step.
        """
        data, known = self.sharded_model.data, self._versions
        changed = known and [p._version for p in data.leaves()] != known
        compares = self.ledger.step % EVERY < 4 or changed or self.ledger.compares_weights
        if not self._replicas or not compares:
            return None
        data.settle()
        # In pieces, because torch copies what it sums in float64.
        pieces = (piece for p in self._replicas for piece in p.detach().reshape(-1).split(_AT_ONCE))
        norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm.nan_to_num()  # other checks say that weights are not finite

    @property
    def _is_counted(self) -> bool:
        """Return True if this step is measured. It is the second one, because the first prepares things for later ones.

        Steps of a trial are measured only if the strategy was not measured before.
        """
        return self._made == 1 and not (self.ledger.is_silent and self._strategy in self.ledger.counts)

    def _counting(self, *, update: bool = False) -> AbstractContextManager[None]:
        return self._count.part(update=update) if self._count is not None else nullcontext()

    def warn_if_changed(self) -> None:
        """Warn, once, if the user has changed split weights since the last step."""
        if not self._changes or [p._version for p in self._parts] == self._changes:
            return
        self._parts, self._changes = [], []
        if self.rank == 0:
            warnings.warn(
                f"weights were changed between two steps, and a rank has only a part of each under {self._strategy}. "
                "This is right if each element is changed by itself, as p.mul_(0.9) does, and wrong if the change "
                "needs norms, means, rows or random numbers of the whole weight: then call "
                "trainer.switch('zero2') first, or 'ddp'",
                stacklevel=2,
            )

    def boundary(self) -> None:
        """Read the results of the step before last, and serve agreed requests. Call it between two steps.

        With `at_once` of the ledger, read the results of the last step, so that a callback sees the model of this step.
        """
        keep = 0 if self.ledger.at_once else 1
        self.ledger.settle(keep=keep)
        if self.ledger.acts:
            self.sharded_model.data.settle()  # a live cell may read weights
        self.ledger.settle(keep=keep, act=True)

    @torch.no_grad()
    def evaluate(self, shard: Shard) -> Tensor:
        """Return (summed loss, weight) of this rank's rows, in float64; zeros if another rank counts these rows.

        The module is in eval mode.
        """
        micros, counted = self._cut(shard), self.builder.facts.counted
        whole = whole_of(shard, counted, self.sharded_model, self.device)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)

        def forward(stage: int, number: int, received: tuple[Tensor, ...]) -> tuple[Any, ...]:
            micro = micros[number]
            with self.precision.autocast():
                output, part, _ = self._forward.run(micro, stage, received, counted, whole)
            if part is None:
                return output  # type: ignore[no-any-return]
            both = torch.zeros(2, dtype=torch.float64, device=self.device)
            both[0], both[1] = part.total, part.weight
            return (both,)

        found = self.sharded_model.outputs(len(micros), forward, key=lambda i: shapes_of(micros[i].data))
        for _ in range(most_passes(shard, self.sharded_model, self.microbatch_size) - len(micros)):
            self.sharded_model.data.absent()
        if self.sharded_model.counts:
            for both in found:
                sums += both
        return sums

    def _cut(self, shard: Shard) -> list[Micro]:
        if collective := self.builder.facts.collectives:
            check_collectives(shard, self.sharded_model, self.microbatch_size, collective)
        check_stages(shard, self.sharded_model)
        return micro_batches(shard, self.sharded_model, self.microbatch_size, self.device)


def _undrawn(rows: Sequence[int]) -> AbstractContextManager[None]:
    return nullcontext()
