"""The result of a loss function: its value, and what it weighs."""

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
    """value: a mean that weighs `weight`, or, if `summed`, the sum of (sum, weight)."""

    value: Tensor
    weight: Tensor | float
    summed: bool

    @property
    def total(self) -> Tensor:
        """Return what parts of a batch add up to the whole's."""
        return self.value if self.summed else self.value * self.weight

    def detached(self) -> Weighed:
        """Return the same without its graph."""
        return Weighed(self.value.detach(), self.weight, self.summed)


def weigh(result: Any, rows: int, targets: CountedTargets | None = None) -> Weighed:
    """Return what a loss function returned for `rows` rows, which a mean weighs.

    targets: that were noted meanwhile; where some were, a mean weighs those that count instead.
    Raises TrainingError when the value is no scalar.
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
