"""The loss of each row of a batch by itself, beside that of all: how difficult each sample is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nbkit.rank.data.batch import take
from nbkit.rank.loss.output_tensors import with_leaves
from nbkit.rank.loss.row_weights import Loss, weigh
from nbkit.rank.rng.seeding import seeded


@torch.no_grad()
def row_losses(loss: Loss, output: Any, target: Any, rows: int, device: torch.device) -> Tensor:
    """Shape (rows,), on the device and not waited for: what `loss` gives for each row of `output` and `target`.

    NaN for a row that weighs nothing. A loss that the model computed for all rows is that of each. What the loss draws
    is drawn again afterwards. Collective where the loss is.
    """

    def of(row: int) -> Tensor:
        def cut(_: str, part: Tensor) -> Tensor:
            return part[row : row + 1] if part.shape[:1] == (rows,) else part

        weighed = weigh(loss(with_leaves(output, cut), take(target, row, row + 1, rows=rows)), 1)
        return (weighed.value / weighed.weight if weighed.summed else weighed.value).double()

    with seeded(device):
        return torch.stack([of(row) for row in range(rows)])
