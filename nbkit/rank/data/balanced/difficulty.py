"""What a sample costs where nobody says it: its size at first, then what a training learns of it while it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Gather = Callable[[Any], list[Any]]
"""What every rank gives, by rank; collective over all ranks."""


class Difficulty(ABC):
    """Of the samples of one training. Every rank has the same; what it has measured itself waits until all agree."""

    kind: str

    @abstractmethod
    def of_order(self, epoch: int) -> Sequence[float]:
        """Costs by which the order of `epoch` is drawn. Raises TrainingError where they are held no more."""

    @abstractmethod
    def of_shares(self, epoch: int) -> Sequence[float]:
        """Costs by which the rows of a batch are divided."""

    @abstractmethod
    def due(self, epoch: int, batches: int) -> bool:
        """Whether ranks agree after so many batches of `epoch`, beside its end."""

    @abstractmethod
    def learn(self, epoch: int, gather: Gather) -> None:
        """Agree on what was measured up to here, the end of `epoch` or where it is `due`. Collective."""

    @abstractmethod
    def state(self, epoch: int, gather: Gather) -> dict[str, Any]:
        """What a checkpoint in `epoch` holds of it: plain values. Collective."""

    @abstractmethod
    def restore(self, epoch: int, state: Mapping[str, Any] | None) -> str:
        """Stand where `state` was taken; what is missing, in words, "" where nothing is."""

    @abstractmethod
    def agree(self, gather: Gather) -> None:
        """Have what all ranks had agreed on, on ranks that have just joined too. Collective."""

    @property
    def newest(self) -> int:
        """The epoch from which the newest costs count."""
        return 0

    @property
    @abstractmethod
    def why(self) -> str:
        """How costs were found, in a line."""

    def begin(self) -> None:  # noqa: B027
        """Steps are made now."""

    def recut(self) -> None:  # noqa: B027
        """Another strategy divides from the next step on."""

    def end(self) -> None:  # noqa: B027
        """No steps are made for now."""

    @abstractmethod
    def reads(
        self, epoch: int, indices: Sequence[int], *, replica: int, speed: float
    ) -> Callable[[Sequence[int], Tensor], None] | None:
        """The next step computes these samples on this rank; returns who is told their losses, None where nobody is.

        replica: of the model, which this rank has a part of; speed: of its ranks, in any unit.
        """
