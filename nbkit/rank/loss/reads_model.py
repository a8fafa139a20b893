"""A loss that reads the model's parameters, such as a penalty, where a rank has a part of them: refused by name.

Under tp a norm would be that of a part of the weight, and under pp `model.parameters()` lists those of one stage. Ranks
of ddp and of ZeRO have each parameter when they compute the loss.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from nbkit.errors import StrategyError
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.parallel.proof.observe import MemoryUses, memory_of, tensors_in
from nbkit.strategy import Strategy


def reading_no_parameter(loss: Loss, strategy: Strategy, model: nn.Module) -> Loss:
    """Return `loss`; where `strategy` cuts `model`, one whose first call raises if it reads a parameter of `model`.

    model: as the user holds it. A parameter that the model gives as an output may be read.
    """
    return loss if strategy.mesh.size == strategy.dp else _Watched(loss, strategy, model)


class ReadsParameters(StrategyError):
    """The loss reads a parameter of the model, of which a rank has a part or nothing."""


class _Watched:
    def __init__(self, loss: Loss, strategy: Strategy, model: nn.Module) -> None:
        self._loss, self._strategy, self._model, self._seen = loss, strategy, model, False

    def __call__(self, output: Any, target: Any) -> Any:
        if self._seen:
            return self._loss(output, target)
        given = {memory_of(tensor) for tensor in tensors_in(output)}
        homes = {memory_of(p): name for name, p in self._model.named_parameters() if memory_of(p) not in given}
        with MemoryUses(homes, self._refuse):
            result = self._loss(output, target)
        self._seen = True
        return result

    def _refuse(self, name: str, tensor: Tensor, how: str, changed: bool) -> None:
        raise ReadsParameters(
            f"The loss reads the model's parameter {name!r}, of which a rank has a part or nothing.",
            numbers=f"under {self._strategy}, shape {tuple(tensor.shape)}, by {how}",
            hint="strategy='zero3', which has it where the loss is computed; so do ddp, zero1 and zero2",
        )
