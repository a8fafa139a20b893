"""Set the learning rate of each group: its base rate times a factor that depends on the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nbkit.errors import TrainingError


class LrSchedule:
    """Sets the rate of group g after `step` finished steps to base[g] * schedule(step). Without a schedule it stays.

    A function of the step has no state, so there is nothing to resume.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Callable[[int], float] | None) -> None:
        self.optimizer, self.schedule = optimizer, schedule
        self.base = [float(group["lr"]) for group in optimizer.param_groups]
        self._factor = 1.0
        if schedule is not None:
            self._check(schedule)

    def _check(self, schedule: Callable[[int], float]) -> None:
        try:
            factor: Any = schedule(0)
            float(factor)
        except Exception as error:
            raise TrainingError(
                "lr_schedule is not a function of the step.",
                numbers=f"lr_schedule(0) raised {type(error).__name__}: {error}",
                hint="lr_schedule=lambda step: min(1.0, (step + 1) / 100)   (a factor of the optimizer's lr)",
            ) from error

    def prepare(self, step: int) -> None:
        """Set the rate for the next step, after `step` finished steps."""
        if self.schedule is not None:
            self._factor = float(self.schedule(step))
            # Groups that were added later begin with their own rate.
            self.base += [float(group["lr"]) for group in self.optimizer.param_groups[len(self.base) :]]
            self._apply([base * self._factor for base in self.base])

    def restore(self, base: list[float], step: int) -> None:
        """Restore the schedule after `step` finished steps. The optimizer's own state is restored separately."""
        self.base = list(base)
        if self.schedule is not None:
            self._factor = float(self.schedule(max(step - 1, 0)))

    @property
    def value(self) -> float:
        """Return the first group's rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def set(self, value: float) -> None:
        """Set the first group's rate from now on. Other groups keep their ratio to it, and a schedule keeps its shape.

        Raises TrainingError if `value` is negative, or if other groups have a rate and the first group's is 0, because
        then there is no ratio.
        """
        if not value >= 0:
            raise TrainingError(
                "The learning rate must be at least 0.", numbers=f"lr={value}", hint="trainer.lr = 1e-4"
            )
        value = float(value)
        now = [float(group["lr"]) for group in self.optimizer.param_groups]
        # If the schedule's factor is 0 now, only the base rates show the ratio.
        kept = now if now[0] else [*self.base, *now[len(self.base) :]]
        if not kept[0] and any(kept):
            raise TrainingError(
                "The learning rate of the first group is 0, so the other groups cannot keep their ratio to it.",
                numbers=f"lr by group: {', '.join(f'{rate:g}' for rate in kept)}",
                hint="trainer.optimizer.param_groups[1]['lr'] = 1e-4",
            )
        rates = [value * rate / kept[0] if kept[0] else value for rate in kept]
        rates[0] = value
        self._apply(rates)
        self.base = [rate / self._factor if self._factor else rate for rate in rates]

    def _apply(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
