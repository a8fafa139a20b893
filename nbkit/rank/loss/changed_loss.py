"""Examines the loss again during the training, when a value that it reads has changed.

The check before the first step (loss_check.py) sees only the terms that count at that time. A callback may raise the
weight of another term from 0 later, such as the KL term of a VAE, or add a contrastive term after a warmup. Such a term
may be a sum over rows, or compare rows. So this check repeats a comparison on the outputs of the present step: the loss
of some rows together, and the losses of the same rows alone. It runs no model, and sends only a flag in the step's
reduction.
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
from nbkit.rank.loss.mean_over_rows import Defect, LossAlone, loss_alone
from nbkit.rank.loss.output_tensors import leaves
from nbkit.rank.loss.row_trial import counting
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.parallel.proof.outside_state import OutsideState, outside_kept
from nbkit.rank.rng.seeding import seeded

_EVERY = 100
_ELEMENTS = 1 << 22  # maximum number of elements of one row's outputs: the rest of the step needs memory too


def no_longer_a_mean(numbers: str, hint: str = "") -> TrainingError:
    """Return the error for a loss that has changed. A rank that did not see the change itself raises it too."""
    return TrainingError(
        "The loss is no longer a mean over rows, because a value that it reads has changed. "
        "Each rank or micro-batch has only some of the rows.",
        numbers=numbers,
        hint=f"divide a term that is a sum by the number of rows: term.sum() / len(target){hint}",
    )


class ChangedLoss:
    """Watches the numbers, texts and tensors that `loss` reads from variables, attributes and containers.

    A step calls `begin`, `look` for its micro-batches, and `end`. defect: what `look` has found in this step. The ranks
    have different rows, so only one of them may find a defect. The reduction of the step tells the others.
    """

    def __init__(self, loss: Loss | None, inputs: Sequence[str] | None, device: torch.device) -> None:
        self._loss, self._inputs, self._device = loss, inputs, device
        self._read: Callable[[], dict[str, Any]] | None = None
        self._before: dict[str, Any] = {}
        self._now: dict[str, Any] = {}
        self._changes = 0
        self._reads = loss is not None  # False if there is nothing that could change
        self._known: bool | None = None  # False if the check cannot judge this loss, None if that was not tried
        self._due = False
        self.defect: Defect | None = None

    def begin(self) -> bool:
        """Return True if a value has changed, so that the loss is examined in this step. All ranks return the same.

        Only the 1st, 2nd, 4th, 8th, ... change counts, and every 100th.
        """
        self._due, self.defect = False, None
        if not self._reads:
            return False
        if first := self._read is None:
            self._read = OutsideState(nn.Module(), self._loss).readings()
        self._now = self._read()
        self._reads = bool(self._now) or not first
        if self._now == self._before:
            return False
        number = self._changes + 1
        self._due = not (number & (number - 1) and number % _EVERY)
        if not self._due:
            self._before, self._changes = self._now, number
        return self._due

    def look(self, batch: Any, output: Any, rows: int, counted: Counted | None) -> None:
        """Examine the loss of `rows` rows, if that is due. The first time, only find out whether it can be judged.

        batch: the rows. output: the model's output for them. counted: see ModelFacts.
        """
        if not self._reads or self._known is False or rows < 2 or not (self._due or self._known is None):
            return
        self._due = False
        found = self._alone(batch, output, rows, counted)
        if self._known is None:
            self._known = found is not None and found.defect is None
        elif found is not None:
            self.defect = found.defect

    def end(self, refused: Sequence[int]) -> None:
        """Raise TrainingError if the ranks `refused` have found that the loss no longer adds up over rows."""
        if not refused:
            self._before, self._changes = self._now, self._changes + 1
            return  # after a refusal, `_before` stays, so that the same step fails again
        before, now, defect = self._before, self._now, self.defect
        changed = [name for name in sorted(now) if before.get(name) != now[name]]
        shown = ", ".join(f"{name!r} {_change(before.get(name), now[name])}".strip() for name in changed[:3])
        seen = f"seen in the rows of rank {refused[0]}" if defect is None else defect.numbers
        raise no_longer_a_mean(f"{shown}; {seen}", "" if defect is None else f"; {LOSS_HINTS[defect.kind]}")

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
