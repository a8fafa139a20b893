"""Forward and backward of one global batch: micro-batches, the loss's weights, the sum over the ranks.

What comes out is the gradient of sum(loss) / sum(weight) over all micro-batches and ranks, however unevenly they are
filled. A mean weighs its rows, which are known beforehand, so its share is in the loss that is backpropagated.
The divisor of (sum, weight) is known when the last rank has done its last forward; it travels beside the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.buffers import check_buffers, watched
from nbkit.rank.parallel.norms import check_level
from nbkit.rank.parallel.replicate import Replicas
from nbkit.rank.train.batch import Shard, call, cut, on_device, pair, tokens_of
from nbkit.rank.train.loss import Loss, weigh
from nbkit.rank.train.reduction import StepReduction

__all__ = ["Gradients"]


class Gradients:
    """Makes the gradients of `model`. microbatch: rows per forward, None for all of them."""

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss,
        inputs: Sequence[str] | None,
        bf16: bool,
        microbatch: int | None,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.model, self.loss, self.inputs, self.microbatch = model, loss, inputs, microbatch
        self.rank, self.world_size, self.device = rank, world_size, device
        self._bf16 = bf16
        self._params = list(model.parameters())
        self._replicas = Replicas(model, world_size=world_size)
        self._watched, self._drift_unknown = watched(model), True
        self._coupled = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())

    def begin_again(self) -> None:
        """What is done once, in the first step, is done again, on every rank alike."""
        self._replicas.begin_again()
        self._drift_unknown = True

    def forward(self, batch: Any, rows: int) -> tuple[Tensor, Tensor | float, bool, int]:
        """(value, weight, weighted, tokens) of rows on any device: see `weigh`."""
        value, target = pair(on_device(batch, self.device), self.inputs)
        # enabled=False would switch off an autocast of the caller's own.
        with torch.autocast(self.device.type, dtype=torch.bfloat16) if self._bf16 else nullcontext():
            result = self.loss(call(self.model, value), target)
        return (*weigh(result, rows), tokens_of(value, rows))

    def cut(self, shard: Shard) -> Any:
        """(micro-batch, rows, whether it is the last) of a shard."""
        return cut(shard.data, shard.rows, self.microbatch or max(shard.rows, 1))

    def backward(self, shard: Shard, *, asked: Callable[[], int], seconds: Callable[[], float]) -> StepReduction:
        """Fill every parameter's gradient; the numbers of the step are under way in what it returns.

        asked: 1 when this rank holds the request asked about; seconds: since the last step. Both are called at launch.
        """
        reduction = StepReduction(rank=self.rank, world_size=self.world_size, device=self.device)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        weight: Tensor | float = 0.0
        tokens, weighted = 0, False
        self._replicas.reset()
        if self._coupled:
            check_level(shard.total, ranks=self.world_size, microbatch=self.microbatch)

        def launch() -> None:
            reduction.launch(
                loss_sum,
                weight,
                weighted=weighted,
                requests=asked(),
                tokens=tokens,
                seconds=seconds(),
                fingerprint=shard.fingerprint,
            )
            self._replicas.start()

        for micro, rows, last in self.cut(shard):
            part, part_weight, weighted, part_tokens = self.forward(micro, rows)
            if not part.requires_grad:
                raise TrainingError(
                    "The loss does not depend on the model's parameters.",
                    numbers="requires_grad is False",
                    hint="compute it from the model's output, without .detach(), .item() or torch.no_grad()",
                )
            loss_sum += part.detach() * (1 if weighted else rows)
            weight, tokens = weight + part_weight, tokens + part_tokens
            if last:
                # Before the backward pass, which hides it.
                launch()
            (part if weighted else part * (rows / shard.total)).backward()
            if not last:
                self._replicas.hold()
        if not shard.rows:
            launch()
        reduction.finish(self._replicas.finish())
        # A rank without rows has not seen what the loss function returns; only there is anything waited for.
        if weighted if shard.rows else reduction.read().weighted:
            grads = [p.grad for p in self._params if p.grad is not None]
            # A 0-dimensional factor changes no gradient's dtype, and is rounded to none.
            torch._foreach_mul_(grads, reduction.inverse_weight)
        if self._drift_unknown:
            # Before the first update: later is too late for the weights.
            check_buffers(self.model, self._watched, world_size=self.world_size, device=self.device)
            self._drift_unknown = False
        return reduction
