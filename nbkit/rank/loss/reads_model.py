"""Refuses a loss that reads the model's parameters, such as a penalty, if a rank has only a part of them.

Under tp, a norm would be the norm of a part of the weight. Under pp, `model.parameters()` yields the parameters of only
one stage. Under ddp and ZeRO, a rank has every parameter when it computes the loss.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from nbkit.errors import StrategyError
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.parallel.proof.observe import MemoryUses, memory_of, tensors_in
from nbkit.rank.parallel.tensor.sharded_tensor import ShardedTensor
from nbkit.strategy import Strategy


def reading_no_parameter(loss: Loss, strategy: Strategy, model: nn.Module) -> Loss:
    """Return `loss`. If `strategy` cuts `model`, its first call raises if it reads a parameter of `model`.

    model: the user's model object. The loss may read a parameter that the model returns as an output.
    """
    return loss if strategy.mesh.size == strategy.dp else _Watched(loss, strategy, model)


class ReadsParameters(StrategyError):
    """The loss reads a model parameter of which this rank has only a part, or nothing."""


class _Watched:
    def __init__(self, loss: Loss, strategy: Strategy, model: nn.Module) -> None:
        self._loss, self._strategy, self._model, self._seen = loss, strategy, model, False

    def __call__(self, output: Any, target: Any) -> Any:
        if self._seen:
            return self._loss(output, target)
        given = set()
        for tensor in tensors_in(output):
            parts = (tensor.part, *tensor.borrowed) if isinstance(tensor, ShardedTensor) else (tensor,)
            given |= {memory_of(part) for part in parts}
        homes = {memory_of(p): name for name, p in self._model.named_parameters() if memory_of(p) not in given}
        with MemoryUses(homes, self._refuse):
            result = self._loss(output, target)
        self._seen = True
        return result

    def _refuse(self, name: str, tensor: Tensor, how: str, changed: bool) -> None:
        raise ReadsParameters(
            f"The loss reads the model's parameter {name!r}, but a rank has only a part of it, or nothing.",
            numbers=f"under {self._strategy}, shape {tuple(tensor.shape)}, by {how}",
            hint="strategy='zero3', under which the loss can read it; also ddp, zero1 and zero2",
        )
