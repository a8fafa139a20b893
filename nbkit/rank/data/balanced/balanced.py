"""Data that says what its samples cost, so that a Trainer gives every rank the same at every step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from nbkit.errors import TrainingError
from nbkit.rank.data.balanced.by_loss import ByLoss
from nbkit.rank.data.balanced.by_seconds import BySeconds
from nbkit.rank.data.balanced.difficulty import Difficulty
from nbkit.rank.data.balanced.packing import Packed
from nbkit.rank.data.data_rng import alike
from nbkit.unfit_calls import says_what_it_takes

Cost = Callable[[Any], float] | Sequence[float]
LEARNED: dict[str, Callable[[Sequence[float]], Difficulty]] = {"seconds": BySeconds, "loss": ByLoss}
"""What `cost=` may name."""
Group = Callable[[Any], Hashable] | Sequence[Hashable]


class Balanced(Dataset[Any]):
    """`data` for a Trainer that divides every batch so that all ranks have the same cost, and the same of each group.

    data: map-style. cost: of a sample, as a function of it or a number for each; or what is learned of it while the
    training runs: "seconds", by the size of a sample, which is the number of elements of its largest tensor (the
    default), or "loss", that of each sample when it was seen last. group: a label of a sample, as a function of it or
    one for each. Functions and sizes read all of the data once, the ranks together, when the training is made.

    pack: documents become blocks of so many positions, each by itself (see packing.Packed). cost is then that of a
    piece of a document, called with its token ids (its length without one), and group a label of a document.

    Each sample comes once an epoch, shuffled by the Trainer's seed, in batches that differ by one sample at most, of
    like cost and groups; which they are does not depend on the strategy. Raises TrainingError for data that cannot be
    read by index.
    """

    @says_what_it_takes(hint="nbkit.Balanced(data, cost=lambda sample: len(sample))")
    def __init__(
        self, data: Any, cost: Cost | str | None = None, group: Group | None = None, pack: int | None = None
    ) -> None:
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise TrainingError(
                "What is balanced can be read by index.",
                numbers=f"{type(data).__name__}: __len__ {hasattr(data, '__len__')}, "
                f"__getitem__ {hasattr(data, '__getitem__')}",
                hint="nbkit.Balanced(list(data)), or a map-style dataset",
            )
        if isinstance(cost, str) and cost not in LEARNED:
            raise TrainingError(
                f"{'cost=' + repr(cost)} is nothing that is measured of a sample.",
                numbers=" ".join(LEARNED),
                hint="cost='seconds', cost='loss', or cost=lambda sample: ...",
            )
        self._values: tuple[list[float], list[Hashable] | None] | None = None
        self._learned = "seconds" if cost is None and pack is None else cost if isinstance(cost, str) else None
        self.difficulty: Difficulty | None = None
        cost = None if isinstance(cost, str) else cost
        if pack is not None:
            if cost is not None and not callable(cost):
                raise TrainingError(
                    "Of packed documents, the cost is a function of a piece's ids.",
                    numbers=f"{len(cost)} costs of whole documents",
                    hint="cost=lambda ids: len(ids) ** 2",
                )
            labels = [group(data[i]) for i in range(len(data))] if callable(group) else group
            data = Packed(data, pack, _checked("group", labels, len(data)))
            self._values = _numbers(data.costs(cost), len(data)), data.groups
        self.data, self.pack = data, pack
        self._cost, self._group = cost, group
        if hasattr(data, "__getitems__"):
            self.__getitems__ = data.__getitems__
        if hasattr(data, "set_epoch"):
            self.set_epoch = data.set_epoch

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    @property
    def costs(self) -> Sequence[float]:
        """Of each sample: as given, or as the newest training that reads this has learned them."""
        newest = self.difficulty
        return self.measured()[0] if newest is None else newest.of_shares(newest.newest)

    @property
    def why(self) -> str:
        """How the costs were found, in a line."""
        if self.difficulty is not None:
            return f"cost: {self.difficulty.why}"
        costs = self.measured()[0]
        if self._learned is not None:
            return (
                f"cost: the size of a sample, {min(costs):g} to {max(costs):g}; a training learns its {self._learned}"
            )
        return f"cost: as given, {min(costs):g} to {max(costs):g}"

    def begin(self) -> Difficulty | None:
        """What a training that begins now is to learn of the samples; None where their costs are given."""
        self.difficulty = None if self._learned is None else LEARNED[self._learned](self.measured()[0])
        return self.difficulty

    @property
    def groups(self) -> Sequence[Hashable] | None:
        """Of each sample, None where none were asked for."""
        return self.measured()[1]

    @property
    def waste(self) -> float:
        """Share of all positions that hold no document; 0 where nothing is packed."""
        return self.data.waste if isinstance(self.data, Packed) else 0.0

    def measured(self, *, together: bool = False) -> tuple[Sequence[float], Sequence[Hashable] | None]:
        """(costs, groups). together: each rank reads a part of the data; collective, and the same on every rank.

        Raises TrainingError for a cost that is none, or lists of another length than the data.
        """
        if self._values is None:
            number = len(self.data)
            costs, groups = self._cost, self._group
            if costs is None or callable(costs) or callable(groups):
                found = self._read(together)
                costs = [cost for cost, _ in found] if costs is None or callable(costs) else costs
                groups = [group for _, group in found] if callable(groups) else groups
            self._values = _numbers(costs, number), _checked("group", groups, number)
            alike = number > 1 and groups is None and min(self._values[0]) == max(self._values[0])
            if alike and self._learned != "loss":
                warnings.warn(
                    f"every sample costs the same, {self._values[0][0]:g}: nothing is balanced. "
                    "cost=lambda sample: ... is called with a sample as the dataset gives it",
                    stacklevel=3,
                )
        return self._values

    def _read(self, together: bool) -> list[tuple[float, Hashable]]:
        ranks = dist.get_world_size() if together and dist.is_initialized() else 1
        rank = dist.get_rank() if ranks > 1 else 0
        own, failed = list[tuple[float, Hashable]](), None
        try:
            with alike():
                own = [self._of(self.data[i]) for i in range(rank, len(self.data), ranks)]
        except Exception as error:  # raised when all have come to it: the others wait for this rank
            failed = error
        parts: list[Any] = [None if failed else own]
        if ranks > 1:
            parts = [None] * ranks
            dist.all_gather_object(parts, None if failed else own)
        if failed:
            raise failed
        if None in parts:
            raise TrainingError(
                "Another rank could not read the costs of its part of the data.",
                numbers=f"rank {parts.index(None)} of {ranks}",
                hint="its error says why",
            )
        return [parts[i % ranks][i // ranks] for i in range(len(self.data))]

    def _of(self, sample: Any) -> tuple[float, Hashable]:
        cost = self._cost(sample) if callable(self._cost) else _size(sample) if self._cost is None else 0.0
        return cost, self._group(sample) if callable(self._group) else None


def check_packed(data: Any, model: nn.Module) -> None:
    """Raises TrainingError for a model of transformers that would look from one packed document into another."""
    if isinstance(data, Balanced) and data.pack and getattr(getattr(model, "config", None), "use_cache", False):
        raise TrainingError(
            "With a cache the model does not see where packed documents begin, and attends across them.",
            numbers=f"{type(model).__name__}: config.use_cache is True, pack={data.pack}",
            hint="use_cache=False: from_pretrained(..., use_cache=False), or model.config.use_cache = False",
        )


def _size(sample: Any) -> float:
    """Elements of the largest tensor, array, list or text in a sample."""
    if isinstance(sample, Tensor):
        return float(sample.numel())
    if isinstance(sample, Mapping | tuple):
        parts = sample.values() if isinstance(sample, Mapping) else sample
        return max(map(_size, parts), default=1.0)
    if isinstance(size := getattr(sample, "size", None), int):  # of numpy
        return float(size)
    return float(len(sample)) if hasattr(sample, "__len__") else 1.0


def _checked(name: str, given: Any, number: int) -> Any:
    if given is not None and len(given) != number:
        raise TrainingError(
            f"{name}= has another length than the data.",
            numbers=f"{len(given)} of {name}, {number} samples",
            hint=f"{name}=[...] with one for each sample, or a function of a sample",
        )
    return given


def _numbers(costs: Sequence[float], number: int) -> list[float]:
    found = [float(cost) for cost in _checked("cost", costs, number)]
    wrong = [i for i, cost in enumerate(found) if not (math.isfinite(cost) and cost >= 0)]
    if wrong:
        raise TrainingError(
            "The cost of a sample is a number >= 0.",
            numbers=f"{found[wrong[0]]} of sample {wrong[0]}",
            hint="cost=lambda sample: ...",
        )
    return found
