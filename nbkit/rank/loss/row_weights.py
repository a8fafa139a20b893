"""The result of a loss function: its value, and what it weighs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nbkit.errors import TrainingError

Loss = Callable[[Any, Any], Any]
"""(output, target) -> mean, or -> (sum, weight)."""


def weigh(result: Any, rows: int) -> tuple[Tensor, Tensor | float, bool]:
    """(value, weight, weighted) of what a loss function returned for `rows` rows.

    A mean weighs its rows and weighted is False; (sum, weight) is passed on and weighted is True.
    Raises TrainingError when the value is no scalar.
    """
    weighted = isinstance(result, tuple)
    if weighted and len(result) != 2:
        raise TrainingError(
            "The loss function returned a tuple that is not (sum, weight).",
            numbers=f"{len(result)} parts",
            hint="return loss.sum(), count   or one mean",
        )
    value, weight = result if weighted else (result, float(rows))
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
    return value.reshape(()), weight, weighted
