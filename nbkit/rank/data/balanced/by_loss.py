"""The loss of each sample, as it was when the sample was seen last: so that all batches and shares are as difficult.

Losses of an epoch count from the next one on: its order follows from the seed, the epoch and what all ranks had agreed
on when it began. They are rounded, so that what strategies round otherwise seldom changes an order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.rank.data.balanced.difficulty import Difficulty, Gather

MOST = 1_400_000
"""Samples: a checkpoint holds two numbers of each."""
_KEPT = 4  # epochs to which a training may go back
_DIGITS = 3


class ByLoss(Difficulty):
    """sizes: of each sample, what is known of it in the first epoch. Raises TrainingError for more than MOST."""

    kind = "loss"

    def __init__(self, sizes: Sequence[float]) -> None:
        if len(sizes) > MOST:
            raise TrainingError(
                "A checkpoint does not hold the losses of so many samples.",
                numbers=f"{len(sizes):,} samples, at most {MOST:,}",
                hint="cost='seconds', which keeps a number for each size; or cost=lambda sample: ...",
            )
        self._costs: dict[int, list[float]] = {0: list(sizes)}
        self._told: list[tuple[int, Sequence[int], Tensor]] = []
        self._seen: dict[int, Tensor] = {}  # epoch -> of each sample, NaN where this rank has not seen it
        self._number = 0

    def of_order(self, epoch: int) -> Sequence[float]:
        if epoch < min(self._costs):
            raise TrainingError(
                "The losses by which the order of an earlier epoch was drawn are held no more.",
                numbers=f"epoch {epoch}, those of epochs {min(self._costs)} to {max(self._costs)} are held",
                hint="trainer.load(path) of a checkpoint of that epoch",
            )
        return self._costs[max(held for held in self._costs if held <= epoch)]

    def of_shares(self, epoch: int) -> Sequence[float]:
        return self.of_order(epoch)

    def due(self, epoch: int, batches: int) -> bool:
        return False

    def reads(
        self, epoch: int, indices: Sequence[int], *, replica: int, speed: float
    ) -> Callable[[Sequence[int], Tensor], None]:
        return partial(self._note, epoch)

    def _note(self, epoch: int, indices: Sequence[int], losses: Tensor) -> None:
        """Not read yet: they may be on a device that is not done with them."""
        self._told.append((epoch, indices, losses))

    def learn(self, epoch: int, gather: Gather) -> None:
        mean = self._everyones(epoch, gather)
        before = torch.tensor(self.of_order(epoch), dtype=torch.float32)
        seen = ~mean.isnan()
        self._number = int(seen.sum())
        if not self._number:
            return
        # One that was passed over is taken for like the others, unless its loss was known before.
        other = before if epoch and max(self._costs) else torch.full_like(before, float(mean[seen].mean()))
        self._costs = {held: costs for held, costs in self._costs.items() if epoch - _KEPT < held <= epoch}
        self._costs[epoch + 1] = torch.where(seen, mean, other).tolist()
        self._seen = {held: own for held, own in self._seen.items() if held >= epoch}

    def _own(self, epoch: int) -> Tensor:
        for at, indices, losses in self._told:
            if at not in self._seen:
                self._seen[at] = torch.full((len(self._costs[max(self._costs)]),), math.nan, dtype=torch.float32)
            self._seen[at][torch.tensor(indices)] = losses.float().cpu()
        self._told.clear()
        return self._seen.get(epoch, torch.empty(0, dtype=torch.float32))

    def _everyones(self, epoch: int, gather: Gather) -> Tensor:
        """Of each sample the loss in `epoch`, >= 0, as float32; NaN where nobody has seen it."""
        own = self._own(epoch)
        at = own.isfinite().nonzero().flatten()
        total, number = torch.zeros(2, len(self.of_order(epoch)), dtype=torch.float64)
        for where, values in gather((at, own[at])):
            # One that is made again, on another rank, counts with both.
            total[where] += values.double()
            number[where] += 1
        mean = (total / number).tolist()
        least = min((value for value in mean if not math.isnan(value)), default=0.0)
        return torch.tensor([float(f"{value - min(least, 0.0):.{_DIGITS}g}") for value in mean], dtype=torch.float32)

    def state(self, epoch: int, gather: Gather) -> dict[str, Any]:
        costs = torch.tensor(self.of_order(epoch), dtype=torch.float32)
        return {"kind": self.kind, "costs": costs, "seen": self._everyones(epoch, gather), "number": self._number}

    def restore(self, epoch: int, state: Mapping[str, Any] | None) -> str:
        fits = (
            state is not None
            and state["kind"] == self.kind
            and len(state["costs"]) == len(self._costs[min(self._costs)])
        )
        if state is None or not fits:
            return f"epoch {epoch} goes on in another order: the checkpoint has no losses of these samples" * bool(
                epoch
            )
        self._told.clear()
        self._costs = {epoch: state["costs"].tolist()}
        self._seen, self._number = {epoch: state["seen"]}, state["number"]
        return ""

    def agree(self, gather: Gather) -> None:
        self._costs, self._number = max(gather((self._costs, self._number)), key=lambda held: max(held[0]))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_told": [], "_seen": {}}  # which each rank has of its own

    @property
    def newest(self) -> int:
        return max(self._costs)

    @property
    def why(self) -> str:
        newest = self.newest
        costs = self._costs[newest]
        if not self._number:
            return f"the size of a sample, {min(costs):g} to {max(costs):g}, until an epoch has shown its losses"
        return (
            f"the loss of each sample when it was seen last ({self._number} of {len(costs)} seen in the epoch before), "
            f"{min(costs):g} to {max(costs):g}, from epoch {newest} on"
        )
