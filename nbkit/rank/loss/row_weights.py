"""The result of a loss function, as a value and a weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.rank.loss.counted_targets import CountedTargets

Loss = Callable[[Any, Any], Any]
"""(output, target) -> mean, or -> (sum, weight)."""


@dataclass(frozen=True)
class Weighed:
    """The value of a loss and its weight. value: a mean; or, if `summed`, the sum of (sum, weight)."""

    value: Tensor
    weight: Tensor | float
    summed: bool

    @property
    def total(self) -> Tensor:
        """Return the value that adds up over parts of a batch: the sum, or the mean times its weight."""
        return self.value if self.summed else self.value * self.weight

    def detached(self) -> Weighed:
        """Return the same value and weight without the graph."""
        return Weighed(self.value.detach(), self.weight, self.summed)


def weigh(result: Any, rows: int, targets: CountedTargets | None = None) -> Weighed:
    """Return the result of a loss function for `rows` rows as a Weighed. A mean has the weight `rows`.

    targets: the recorder that ran with the loss. If it has recorded targets, the weight of a mean is the number of
    targets that count. Raises TrainingError if value or weight is not a scalar.
    """
    summed = isinstance(result, tuple)
    if summed and len(result) != 2:
        raise TrainingError(
            "The loss function returned a tuple that is not (sum, weight).",
            numbers=f"{len(result)} parts",
            hint="return loss.sum(), count   or one mean",
        )
    value, weight = result if summed else (result, float(rows))
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TrainingError(
            "The loss is not a scalar.",
            numbers=f"{got}, for {rows} rows",
            hint="return loss.mean(), or (loss.sum(), loss.numel())",
        )
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise TrainingError(
                "The weight of the loss is not a scalar.",
                numbers=f"shape {tuple(weight.shape)}, for {rows} rows",
                hint="return (loss * mask).sum(), mask.sum()",
            )
        weight = weight.detach().reshape(())
    if not summed and targets is not None and (counted := targets.weight) is not None:
        weight = counted
    return Weighed(value if value.ndim == 0 else value.reshape(()), weight, summed)
