"""A step whose numbers are still on their way to this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.mesh import Mesh
from nbkit.rank.data.batch import Parts
from nbkit.rank.train.step.async_copy import DeviceScalar, ready, to_host_async
from nbkit.rank.train.step.step_stats import StepNumbers, StepReduction

_OWN = ("step", "lr", "strategy", "seconds", "samples", "tokens")


@dataclass
class Pending:
    """A step whose numbers are under way.

    mesh, strategy, parts: those the step was made under; parts: see Shard. asked: the number of the request its
    reduction asked about. made: the optimizer took the step. remarks: words to add to the record.
    """

    step: int
    reduction: StepReduction
    asked: int
    samples: int
    indices: Sequence[int]
    lr: float | DeviceScalar
    mesh: Mesh
    strategy: str
    parts: Parts = None
    extra: dict[str, float | DeviceScalar] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    made: bool = False

    def add(self, numbers: Mapping[str, float | Tensor]) -> None:
        """Add numbers to the record.

        Raises TrainingError for names that the record has already, and unless they are numbers.
        """
        if taken := [name for name in _OWN if name in numbers]:
            raise TrainingError(
                "A name in log() is one of the record's own.",
                numbers=f"{', '.join(taken)}, of {', '.join(_OWN)}",
                hint=f"job.log(my_{taken[0]}=...)",
            )
        for name, value in numbers.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise TrainingError(
                    "log() takes single numbers.", numbers=f"{name}: shape {tuple(value.shape)}", hint=f"{name}.mean()"
                )
            try:
                self.extra[name] = to_host_async(value)
            except (TypeError, ValueError):
                raise TrainingError("log() takes numbers.", numbers=f"{name}: {value!r}") from None

    def record(self, numbers: StepNumbers) -> dict[str, Any]:
        """Return the entry of `history`. seconds: the slowest rank's, from the previous step's loss to this one's."""
        return {
            "step": self.step,
            "loss": numbers.loss,
            "lr": ready(self.lr),
            "strategy": self.strategy,
            "seconds": max(numbers.seconds),
            "samples": self.samples,
            "tokens": numbers.tokens,
            **{name: ready(value) for name, value in self.extra.items()},
            **self.remarks,
        }
