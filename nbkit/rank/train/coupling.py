"""Losses that couple the rows of a batch: found by computing one on two rows together, and on each alone.

A strategy that gives rows to several ranks, or to several forwards, is right for losses that are means over rows and
for (sum, weight). A contrastive loss compares rows; a mean over the tokens that a mask leaves weighs rows by their
length. Both would train, and train something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any

import torch

from nbkit.rank.train.batch import pair, rows_of, take
from nbkit.rank.train.loss import Loss, weigh

__all__ = ["coupled"]

_RELATIVE = 2e-3  # what other kernels for another number of rows may change, in half precision too


@torch.no_grad()
def coupled(run: Callable[[Any], Any], loss: Loss, example: Any, inputs: Sequence[str] | None) -> str:
    """The numbers that show that `loss` is no mean over rows; "" when it is one, or when that cannot be told.

    run: model input -> output, without dropout. example: a batch of two rows or more.
    """

    def of(part: Any, rows: int) -> tuple[float, float]:
        value, target = pair(part, inputs)
        found, weight, weighted = weigh(loss(run(value), target), rows)
        return float(found) * (1 if weighted else rows), float(weight)

    # Whatever is wrong with the loss is said, in full, where it is trained with.
    with suppress(Exception):
        rows = rows_of(example)
        total, weight = of(example, rows)
        again, _ = of(example, rows)
        parts = [of(take(example, i, i + 1, rows=rows), 1) for i in range(rows)]
        sums, weights = (sum(each) for each in zip(*parts, strict=True))
        together, apart = total / weight, sums / weights
        if rows > 1 and again == total and isfinite(together - apart):
            if abs(together - apart) > _RELATIVE * max(abs(together), abs(apart)) + 1e-6:
                alone = ", ".join(f"{part / (each or 1):.6g}" for part, each in parts[:4])
                return f"{rows} rows together: {together:.6g}; each alone: {alone}, together {apart:.6g}"
    return ""
