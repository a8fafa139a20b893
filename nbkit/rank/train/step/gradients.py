"""One step's gradients, whatever the strategy: equal to those of one process over the whole global batch.

A mean loss over equal batches would be a mean of means; here every row weighs the same wherever it lies. The divisor of
a mean is known beforehand, so its share is in the loss that is backpropagated.
The divisor of (sum, weight) is known when the last rank has done its last forward; it travels beside the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.data.batch import Shard, bounds, on_device, pair, shapes_of, take, tokens_of
from nbkit.rank.data.first_batches import FirstBatches
from nbkit.rank.loss.row_weights import weigh
from nbkit.rank.parallel.module.batch_norm import check_level
from nbkit.rank.parallel.module.buffers import check_buffers, watched
from nbkit.rank.parallel.sharded_model import Side
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from nbkit.rank.telemetry.phases import clock, phase
from nbkit.rank.train.config import Setup
from nbkit.rank.train.step.precision import Precision
from nbkit.rank.train.step.step_stats import StepReduction

__all__ = ["Gradients", "Micro"]


@dataclass(frozen=True)
class Micro:
    """A micro-batch: its data, how many rows, and which of the global batch the first one is."""

    data: Any
    rows: int
    first: int


@dataclass
class _Sums:
    """What a step's forwards add up to on this rank."""

    loss: Tensor
    weight: Tensor | float = 0.0
    tokens: int = 0
    weighted: bool = False


class Gradients:
    """Makes the gradients of a side. microbatch_size: rows per forward without a pipeline, None for all of them.

    first: looks at the first batches.
    """

    def __init__(
        self, side: Side, setup: Setup, precision: Precision, *, rank: int, first: FirstBatches | None = None
    ) -> None:
        self._first = first
        self.side, self.loss, self.inputs, self.microbatch_size = side, setup.loss, setup.inputs, setup.microbatch_size
        self.precision, self.rank = precision, rank
        self.world_size, self.device = precision.world_size, precision.device
        self._dropout = KeyedDropout(side.module, setup.seed)
        self._watched, self._drift_unknown = watched(side.module), True
        self._coupled = any(isinstance(module, nn.SyncBatchNorm) for module in side.module.modules())
        # Whether the loss function gives (sum, weight): only who calls it knows, until the first step is read.
        self._weighted: bool | None = None

    def reseed(self, seed: int) -> None:
        """Key dropout by `seed` from now on."""
        self._dropout.seed = seed

    def release(self) -> None:
        """Take what follows the modules out of the side, which may serve again later."""
        self._dropout.release()

    def begin_again(self) -> None:
        """What is done once, in the first step, is done again, on every rank alike."""
        self.side.begin_again()
        self.precision.level()
        self._drift_unknown = True

    def cut(self, shard: Shard) -> list[Micro]:
        """A shard in micro-batches: `strategy.microbatches` of them in a pipeline, else of `microbatch_size` rows."""
        first, _ = bounds(shard.total, self.side.axes.size("dp"), self.side.axes.index("dp"))
        rows = shard.rows
        if (count := self.side.strategy.microbatches) is not None:
            cuts = [bounds(rows, min(count, rows), i) for i in range(min(count, rows))]
        else:
            size = self.microbatch_size or max(rows, 1)
            cuts = [(start, min(start + size, rows)) for start in range(0, rows, size)]
        return [Micro(take(shard.data, start, stop, rows=rows), stop - start, first + start) for start, stop in cuts]

    def backward(
        self, shard: Shard, *, step: int, asked: Callable[[], int], seconds: Callable[[], float]
    ) -> StepReduction:
        """Fill every parameter's gradient; the numbers of the step are under way in what it returns.

        asked: how far this rank is with the request asked about (see boundary.Inbox); seconds: since the last step.
        Both are called at launch.
        """
        if self._first is not None:
            self._first.look(self.side, shard, step)
        side, micros = self.side, self.cut(shard)
        reduction = StepReduction(rank=self.rank, world_size=self.world_size, device=self.device)
        sums = _Sums(torch.zeros((), dtype=torch.float64, device=self.device))
        side.data.reset(passes=self._passes(shard))
        if self._coupled:
            check_level(shard.total, ranks=side.axes.size("dp"), microbatch_size=self.microbatch_size)

        def launch() -> None:
            counts = side.counts
            reduction.launch(
                sums.loss if counts else torch.zeros_like(sums.loss),
                sums.weight if counts else 0.0,
                weighted=sums.weighted,
                stage=asked(),
                tokens=sums.tokens if counts else 0,
                seconds=seconds(),
                fingerprint=shard.fingerprint,
            )

        def forward(stage: int, number: int, received: tuple[Tensor, ...]) -> tuple[Any, ...]:
            micro = micros[number]
            with self._computing(micro, step):
                value, target = pair(on_device(micro.data, self.device), self.inputs)
                output = side.stage(stage, value, received)
                if stage != side.last_stage:
                    return output  # type: ignore[no-any-return]
                part, weight, sums.weighted = weigh(self.loss(output, target), micro.rows)
            if not part.requires_grad:
                raise TrainingError(
                    "The loss does not depend on the model's parameters.",
                    numbers="requires_grad is False",
                    hint="compute it from the model's output, without .detach(), .item() or torch.no_grad()",
                )
            sums.loss = sums.loss + part.detach() * (1 if sums.weighted else micro.rows)
            sums.weight = sums.weight + weight
            sums.tokens += tokens_of(value, micro.rows)
            return (self.precision.scaled(part if sums.weighted else part * (micro.rows / shard.total)),)

        canary = side.backward(
            len(micros), forward, key=lambda i: shapes_of(micros[i].data), launch=launch, on_op=clock.on_op
        )
        reduction.finish(canary)
        self.precision.unscale(side.held.values())
        if micros and side.gives_output:
            self._weighted = sums.weighted
        elif self._weighted is None:
            # Waited for once: a loss function keeps to one form.
            self._weighted = reduction.read().weighted
        if self._weighted:
            grads = [p.grad for p in side.held.values() if p.grad is not None]
            # A 0-dimensional factor changes no gradient's dtype, and is rounded to none.
            torch._foreach_mul_(grads, reduction.inverse_weight)
        if self._drift_unknown:
            # Before the first update: later is too late for the weights.
            check_buffers(side.module, self._watched, axes=side.axes, device=self.device)
            self._drift_unknown = False
        return reduction

    @torch.no_grad()
    def evaluate(self, shard: Shard) -> Tensor:
        """(summed loss, weight) of this rank's rows, zeros where another rank's count. The module is in eval mode."""
        micros = self.cut(shard)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)

        def forward(stage: int, number: int, received: tuple[Tensor, ...]) -> tuple[Any, ...]:
            micro = micros[number]
            with self.precision.autocast():
                value, target = pair(on_device(micro.data, self.device), self.inputs)
                output = self.side.stage(stage, value, received)
                if stage != self.side.last_stage:
                    return output  # type: ignore[no-any-return]
                part, weight, weighted = weigh(self.loss(output, target), micro.rows)
            both = [part.double() * (1 if weighted else micro.rows), torch.as_tensor(weight, device=self.device)]
            return (torch.stack([number.double() for number in both]),)

        found = self.side.outputs(len(micros), forward, key=lambda i: shapes_of(micros[i].data))
        for _ in range(self._passes(shard) - len(micros)):
            self.side.data.absent()
        if self.side.counts:
            for both in found:
                sums += both
        return sums

    def _passes(self, shard: Shard) -> int:
        """Micro-batches of the rank that has most."""
        _, most = bounds(shard.total, self.side.axes.size("dp"), 0)
        if (count := self.side.strategy.microbatches) is not None:
            return min(count, most)
        return -(-most // (self.microbatch_size or max(most, 1)))

    @contextmanager
    def _computing(self, micro: Micro, step: int) -> Iterator[None]:
        rows = range(micro.first, micro.first + micro.rows)
        with phase("forward"), self.precision.autocast(), self._dropout.step(step, rows):
            yield
