"""Examines the loss again during the training, when a value that it reads has changed.

The check before the first step (loss_check.py) sees only the terms that count at that time. A callback may raise the
weight of another term from 0 later, such as the KL term of a VAE, or add a contrastive term after a warmup. Such a term
may be a sum over rows, or compare rows. So this check repeats the comparison of the loss of some rows together and
alone, on the outputs of the present step. It runs no model and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.data.sample_rows import undrawn
from nbkit.rank.loss.counted_targets import Counted
from nbkit.rank.loss.loss_check import LOSS_HINTS
from nbkit.rank.loss.mean_over_rows import LossAlone, loss_alone
from nbkit.rank.loss.output_tensors import leaves
from nbkit.rank.loss.row_trial import counting
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.parallel.proof.outside_state import OutsideState, outside_kept
from nbkit.rank.rng.seeding import seeded

_EVERY = 100
_ELEMENTS = 1 << 22  # maximum number of elements of one row's outputs: the rest of the step needs memory too


class ChangedLoss:
    """Watches the numbers, texts and tensors that `loss` reads from variables, attributes and containers."""

    def __init__(self, loss: Loss | None, inputs: Sequence[str] | None, device: torch.device) -> None:
        self._loss, self._inputs, self._device = loss, inputs, device
        self._read: Callable[[], dict[str, Any]] | None = None
        self._before: dict[str, Any] = {}
        self._changes = 0
        self._known = loss is not None  # False if the check cannot judge this loss, or if there is none

    def look(self, batch: Any, output: Any, rows: int, counted: Counted | None) -> None:
        """Raise TrainingError if a value has changed, and the loss of `rows` rows no longer adds up over rows.

        batch: the rows. output: the model's output for them. counted: see ModelFacts. The first call only finds out
        whether the check can judge this loss. After the first changes, it looks at every 2nd, 4th, 8th, ... change, and
        at every 100th.
        """
        if not self._known or rows < 2:
            return
        if first := self._read is None:
            self._read = OutsideState(nn.Module(), self._loss).readings()
        now = self._read()
        if first and not now:
            self._known = False  # it reads nothing that could change
        if now == self._before:
            return
        before, self._before, self._changes = self._before, now, self._changes + 1
        if self._changes & (self._changes - 1) and self._changes % _EVERY:
            return
        found = self._alone(batch, output, rows, counted)
        if first:
            self._known = found is not None and found.defect is None
        elif found is not None and found.defect is not None:
            self._before, self._changes = before, self._changes - 1  # a step that is made again must fail again
            changed = [name for name in sorted(now) if before.get(name) != now[name]]
            shown = ", ".join(f"{name!r} {_change(before.get(name), now[name])}".strip() for name in changed[:3])
            raise TrainingError(
                "The loss is no longer a mean over rows, because a value that it reads has changed. "
                "Each rank or micro-batch has only some of the rows.",
                numbers=f"{shown}; {found.defect.numbers}",
                hint="a term that is a sum, divided by the rows: term.sum() / len(target); "
                + LOSS_HINTS[found.defect.kind],
            )

    def _alone(self, batch: Any, output: Any, rows: int, counted: Counted | None) -> LossAlone | None:
        found = leaves(output)
        # A subclass may be split over ranks, and computing with it may need all of them.
        if any(type(tensor) is not Tensor for tensor in found.values()):
            return None
        lengths = {
            name: len(tensor) // rows for name, tensor in found.items() if tensor.ndim and not len(tensor) % rows
        }
        if sum(found[name].numel() // rows for name in lengths) > _ELEMENTS or self._loss is None:
            return None
        notes = partial(counting, "no" if counted is None else "each" if counted.labels else "one", counted)
        with undrawn(), seeded(self._device), outside_kept(nn.Module(), self._loss):
            return loss_alone(self._loss, output, lengths, batch, rows, self._inputs, notes)


def _change(before: Any, now: Any) -> str:
    numbers = isinstance(before, int | float) and isinstance(now, int | float)
    return f"{before:g} -> {now:g}" if numbers else ""
