"""Data with a cost for each sample, so that a Trainer gives every rank the same cost at every step.

If the user gives no costs, the cost of a sample is first its size. Then the training learns costs (`Difficulty`).

`ByLoss`: the cost of a sample is its loss when it was last seen, so that all batches and shares are equally difficult.
The losses of an epoch are used from the next epoch on. The order of an epoch depends on the seed, the epoch, and the
losses on which all ranks had agreed when it began. Losses are rounded, so that the different rounding of strategies
seldom changes an order.

`BySeconds`: the cost of a sample is the seconds that samples of its size take. They come from a least-squares fit over
the shares that ranks have computed. In the model of the fit, a rank's seconds of a step are the sum over its rows of
size x rate, with a rate for each of a dozen classes of sizes. Ranks that compute different parts of the model (pipeline
stages) are scaled by their mean, and ranks of unequal speed by their `speeds=`. With noisier measurements, rates stay
closer to their old values. This is ridge regression (Hoerl and Kennard 1970), where the deviation of a rate is the rate
itself, and the deviation of a share is the residual of the fit. Old steps count less. Seconds change only which rank
computes a sample, never which samples a batch has. So a loss does not depend on a clock.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from nbkit.errors import TrainingError
from nbkit.rank.data.balanced.packing import Packed
from nbkit.rank.data.data_rng import alike
from nbkit.rank.telemetry.phases import StepPhases, clock
from nbkit.unfit_calls import says_what_it_takes

Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks, by rank; collective over all ranks."""


class Difficulty(ABC):
    """The learned costs of one training's samples, equal on every rank.

    A rank's own measurements are kept separately until all ranks agree on them.
    """

    kind: str

    @abstractmethod
    def of_order(self, epoch: int) -> Sequence[float]:
        """Return the costs that determine the order of `epoch`. Raises TrainingError if they are no longer held."""

    @abstractmethod
    def of_shares(self, epoch: int) -> Sequence[float]:
        """Return the costs by which the rows of a batch are divided over ranks."""

    @abstractmethod
    def due(self, epoch: int, batches: int) -> bool:
        """Return True if ranks agree after this many batches of `epoch`. They always agree at its end."""

    @abstractmethod
    def learn(self, epoch: int, gather: Gather) -> None:
        """Agree on the measurements so far, at the end of `epoch` or when `due` returns True. Collective."""

    @abstractmethod
    def state(self, epoch: int, gather: Gather) -> dict[str, Any]:
        """Return the state that a checkpoint in `epoch` holds, as plain values. Collective."""

    @abstractmethod
    def restore(self, epoch: int, state: Mapping[str, Any] | None) -> str:
        """Restore `state`. Returns a text that says what is missing; "" if nothing is."""

    @abstractmethod
    def agree(self, gather: Gather) -> None:
        """Share the agreed costs with ranks that have just joined. Collective."""

    @property
    def newest(self) -> int:
        """Return the first epoch that uses the newest costs."""
        return 0

    @property
    @abstractmethod
    def why(self) -> str:
        """Return one line that says how the costs were found."""

    def begin(self) -> None:  # noqa: B027
        """Begin a run of steps."""

    def recut(self) -> None:  # noqa: B027
        """Note that another strategy divides the batches from the next step on."""

    def end(self) -> None:  # noqa: B027
        """End a run of steps."""

    @abstractmethod
    def reads(
        self, epoch: int, indices: Sequence[int], *, replica: int, speed: float
    ) -> Callable[[Sequence[int], Tensor], None] | None:
        """Note that the next step computes these samples on this rank. Returns a callback for their losses, or None.

        replica: the replica of the model to which this rank belongs. speed: the speed of the replica, in any unit.
        """


MOST = 1_400_000
"""Maximum number of samples: a checkpoint holds two numbers for each."""
_KEPT = 4  # costs of this many epochs are kept; a training may go back to these
_DIGITS = 3


class ByLoss(Difficulty):
    """Costs learned from losses. sizes: the size of each sample, used as its cost in the first epoch.

    Raises TrainingError for more than MOST samples.
    """

    kind = "loss"

    def __init__(self, sizes: Sequence[float]) -> None:
        if len(sizes) > MOST:
            raise TrainingError(
                "A checkpoint cannot hold the losses of so many samples.",
                numbers=f"{len(sizes):,} samples, at most {MOST:,}",
                hint="cost='seconds', which keeps a number for each size; or cost=lambda sample: ...",
            )
        self._costs: dict[int, list[float]] = {0: list(sizes)}
        self._told: list[tuple[int, Sequence[int], Tensor]] = []
        self._seen: dict[int, Tensor] = {}  # epoch -> loss of each sample, NaN if this rank has not seen it
        self._number = 0

    def of_order(self, epoch: int) -> Sequence[float]:
        if epoch < min(self._costs):
            raise TrainingError(
                "The losses that decided the order of an earlier epoch are no longer stored.",
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
        """Keep the losses without reading them, because a device may still compute them."""
        self._told.append((epoch, indices, losses))

    def learn(self, epoch: int, gather: Gather) -> None:
        mean = self._everyones(epoch, gather)
        before = torch.tensor(self.of_order(epoch), dtype=torch.float32)
        seen = ~mean.isnan()
        self._number = int(seen.sum())
        if not self._number:
            return
        # A sample that was skipped gets the mean of the others, unless its loss was known before.
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
        """Return the loss of each sample in `epoch`, >= 0, as float32; NaN if no rank has seen it. Collective."""
        own = self._own(epoch)
        at = own.isfinite().nonzero().flatten()
        total, number = torch.zeros(2, len(self.of_order(epoch)), dtype=torch.float64)
        for where, values in gather((at, own[at])):
            # If a step was repeated and another rank computed the sample, both losses count.
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
            return (
                f"epoch {epoch} continues in a different order, because the checkpoint has no losses of these samples"
            ) * bool(epoch)
        self._told.clear()
        self._costs = {epoch: state["costs"].tolist()}
        self._seen, self._number = {epoch: state["seen"]}, state["number"]
        return ""

    def agree(self, gather: Gather) -> None:
        self._costs, self._number = max(gather((self._costs, self._number)), key=lambda held: max(held[0]))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_told": [], "_seen": {}}  # these differ between ranks

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
            f"the last loss of each sample ({self._number} of {len(costs)} seen in the epoch before), {min(costs):g} "
            f"to {max(costs):g}, from epoch {newest} on"
        )


_CLASSES = 12
_COMPUTING = ("forward", "backward")
_FIRST = 8  # number of batches before the first agreement in the first epoch; it doubles each time
_LEAST = 1e-3  # smallest rate and smallest ridge, relative to the mean; the ridge fixes rates that no share measures
_OLD = 0.5  # factor for the weight of earlier steps at each agreement


@dataclass(frozen=True)
class Shares:
    """Weighted sums over the steps that a rank has computed. Older steps have a smaller weight.

    squares: sizes x sizes, (classes, classes). products: sizes x seconds, (classes,). sizes: (classes,). squared:
    the squares of seconds. weight: the steps' weights. number: the number of new steps.
    """

    squares: Tensor
    products: Tensor
    sizes: Tensor
    seconds: float = 0.0
    squared: float = 0.0
    weight: float = 0.0
    number: int = 0

    @classmethod
    def none(cls, classes: int) -> Shares:
        """Return sums over no steps."""
        zeros = torch.zeros(classes, dtype=torch.float64)
        return cls(torch.zeros(classes, classes, dtype=torch.float64), zeros, zeros)

    def and_one(self, sizes: Tensor, seconds: float) -> Shares:
        """Return the sums with one more step."""
        return Shares(
            self.squares + torch.outer(sizes, sizes),
            self.products + seconds * sizes,
            self.sizes + sizes,
            self.seconds + seconds,
            self.squared + seconds**2,
            self.weight + 1,
            self.number + 1,
        )

    def older(self) -> Shares:
        """Return the same sums with a smaller weight, because later steps count more."""
        return Shares(
            _OLD * self.squares,
            _OLD * self.products,
            _OLD * self.sizes,
            _OLD * self.seconds,
            _OLD * self.squared,
            _OLD * self.weight,
        )


def rates_of(everyone: Sequence[tuple[int, Shares]], before: Tensor) -> Tensor:
    """Return the rate of each class, fitted to the shares of all ranks.

    before: the old rates. A rate that was not measured stays near its old value. everyone: for each rank, (its place
    along dp, its shares). The k-th rank of every replica has the same part of the model.
    """
    alike: dict[int, list[Shares]] = {}
    met = Counter[int]()
    for replica, own in everyone:
        alike.setdefault(met[replica], []).append(own)
        met[replica] += 1
    squares, products, squared, weight = torch.zeros_like(everyone[0][1].squares), torch.zeros_like(before), 0.0, 0.0
    for group in alike.values():
        seconds = sum(own.seconds for own in group)
        if seconds <= 0:
            continue
        factor = sum(float(own.sizes @ before) for own in group) / seconds
        for own in group:
            squares += own.squares
            products += own.products * factor
            squared += own.squared * factor**2
            weight += own.weight
    if not weight:
        return before

    def noise(rates: Tensor, known: float) -> float:
        """Return the mean squared residual of a share."""
        return max(squared - float(2 * rates @ products - rates @ squares @ rates), 0.0) / known

    def near(ridge: Tensor) -> Tensor:
        found: Tensor = torch.linalg.solve(squares + ridge.diag(), products + ridge * before)
        return found

    least = _LEAST * float(squares.diagonal().mean())
    variance = noise(before, weight)
    if (known := weight - len(before)) > len(before):
        variance = min(variance, noise(near(torch.full_like(before, least)), known))
    found = near(variance / before**2 + least)
    return found.clamp(min=_LEAST * float(found.mean()))


class BySeconds(Difficulty):
    """Costs learned from seconds. sizes: the size of each sample, used as its cost until shares are measured."""

    kind = "seconds"

    def __init__(self, sizes: Sequence[float]) -> None:
        self._sizes = [max(size, 1.0) for size in sizes]
        distinct = sorted(set(self._sizes))
        if len(distinct) > _CLASSES:
            ordered = sorted(self._sizes)
            distinct = sorted({ordered[len(ordered) * (i + 1) // _CLASSES - 1] for i in range(_CLASSES)})
        self._class = [bisect_left(distinct, size) for size in self._sizes]
        self._largest = distinct
        self._rates = torch.ones(len(distinct), dtype=torch.float64)
        self._costs = list(self._sizes)
        self._shares, self._number = Shares.none(len(distinct)), 0
        self._current: Tensor | None = None
        self._replica, self._speed = 0, 1.0
        self._made: list[tuple[Tensor, float, StepPhases]] = []
        self._passed = True

    def of_order(self, epoch: int) -> Sequence[float]:
        return self._sizes

    def of_shares(self, epoch: int) -> Sequence[float]:
        return self._costs

    def due(self, epoch: int, batches: int) -> bool:
        return not epoch and batches >= _FIRST and batches & (batches - 1) == 0

    def begin(self) -> None:
        self.recut()
        clock.listeners.append(self._step)

    def recut(self) -> None:
        self._passed = True  # the first step is not counted, because it also makes buffers and proofs

    def end(self) -> None:
        if self._step in clock.listeners:
            clock.listeners.remove(self._step)

    def reads(self, epoch: int, indices: Sequence[int], *, replica: int, speed: float) -> None:
        self._replica, self._speed = replica, speed
        sizes = torch.zeros_like(self._rates)
        for index in indices:
            sizes[self._class[index]] += self._sizes[index]
        self._current = sizes

    def _step(self, step: StepPhases) -> None:
        """Note a finished step, as a listener of StepClock. A device may still compute the step."""
        if self._current is not None and float(self._current.sum()) and not self._passed:
            self._made.append((self._current, self._speed, step))
        self._passed, self._current = False, None
        self._take()

    def _take(self) -> None:
        while self._made and self._made[0][2].over():
            sizes, speed, step = self._made.pop(0)
            took = sum(stop - start for state, start, stop in step.intervals() if state in _COMPUTING) / 1e9
            self._shares = self._shares.and_one(sizes, took * speed)

    def learn(self, epoch: int, gather: Gather) -> None:
        self._take()
        everyone = gather((self._replica, self._shares))
        # All ranks use rank 0's solution, because they must divide rows equally, and processors may round differently.
        self._set(gather(rates_of(everyone, self._rates))[0])
        self._number += sum(own.number for _, own in everyone)
        self._shares = self._shares.older()

    def _set(self, rates: Tensor) -> None:
        self._rates, each = rates, rates.tolist()
        self._costs = [size * each[kind] for size, kind in zip(self._sizes, self._class, strict=True)]

    def state(self, epoch: int, gather: Gather) -> dict[str, Any]:
        return {"kind": self.kind, "largest": self._largest, "rates": self._rates, "number": self._number}

    def restore(self, epoch: int, state: Mapping[str, Any] | None) -> str:
        if state is not None and state["kind"] == self.kind and state["largest"] == self._largest:
            self._set(state["rates"])
            self._number = state["number"]
        return ""  # only the shares depend on it

    def agree(self, gather: Gather) -> None:
        rates, self._number = max(gather((self._rates, self._number)), key=lambda held: held[1])
        self._set(rates)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_made": [], "_current": None}  # these hold events of a device

    @property
    def why(self) -> str:
        least, most = min(self._sizes), max(self._sizes)
        if not self._number:
            return f"the size of a sample, {least:g} to {most:g} elements, until the seconds of some steps are measured"
        small, large = self._costs[self._sizes.index(least)], self._costs[self._sizes.index(most)]
        return (
            f"learned from the seconds of {self._number} shares: a sample of {most:g} elements costs "
            f"{large / small:.3g} times as much as one of {least:g}, and is {most / least:.3g} times as large"
        )


Cost = Callable[[Any], float] | Sequence[float]
LEARNED: dict[str, Callable[[Sequence[float]], Difficulty]] = {"seconds": BySeconds, "loss": ByLoss}
"""The names that `cost=` accepts."""
Group = Callable[[Any], Hashable] | Sequence[Hashable]


class Balanced(Dataset[Any]):
    """Data for a Trainer. In each batch, all ranks get the same cost and the same share of each group.

    data: a map-style dataset. cost: a function of a sample that returns its cost, or a list with a number for each
    sample, or the name of a cost that is learned during the training. "seconds" (the default): the seconds of a sample,
    learned for each size. The size is the number of elements of the largest tensor. "loss": the newest loss of each
    sample. group: a function of a sample that returns a label, or a list of labels.

    If `cost` or `group` is a function, or the cost is learned, the ranks together read all data once, when the Trainer
    is created.

    pack: pack documents into samples of this many positions. Attention stays inside a document. `cost` then gets the
    token ids of a piece of a document; the default cost is the number of tokens. `group` gets a whole document.

    Each sample comes once in an epoch, shuffled by the Trainer's seed. Batch sizes differ by at most one sample. All
    batches have about the same cost and mix of groups. The batches do not depend on the strategy. Raises TrainingError
    for data that cannot be read by index.
    """

    @says_what_it_takes(hint="nbkit.Balanced(data, cost=lambda sample: len(sample))")
    def __init__(
        self, data: Any, cost: Cost | str | None = None, group: Group | None = None, pack: int | None = None
    ) -> None:
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise TrainingError(
                "nbkit.Balanced needs data that can be read by index.",
                numbers=f"{type(data).__name__}: __len__ {hasattr(data, '__len__')}, "
                f"__getitem__ {hasattr(data, '__getitem__')}",
                hint="nbkit.Balanced(list(data)), or a map-style dataset",
            )
        if isinstance(cost, str) and cost not in LEARNED:
            raise TrainingError(
                f"{'cost=' + repr(cost)} is not a cost that nbkit measures.",
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
                    "With packed documents, cost= must be a function of the ids of one piece.",
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
        """Return the cost of each sample, as given or as learned by the newest training that reads this data."""
        newest = self.difficulty
        return self.measured()[0] if newest is None else newest.of_shares(newest.newest)

    @property
    def why(self) -> str:
        """Return one line that says how the costs were found."""
        if self.difficulty is not None:
            return f"cost: {self.difficulty.why}"
        costs = self.measured()[0]
        if self._learned is not None:
            return (
                f"cost: the size of a sample, {min(costs):g} to {max(costs):g}; a training learns its {self._learned}"
            )
        return f"cost: as given, {min(costs):g} to {max(costs):g}"

    def begin(self) -> Difficulty | None:
        """Return a Difficulty for a training that begins now; None if the costs are given."""
        self.difficulty = None if self._learned is None else LEARNED[self._learned](self.measured()[0])
        return self.difficulty

    @property
    def groups(self) -> Sequence[Hashable] | None:
        """Return the group of each sample; None without groups."""
        return self.measured()[1]

    @property
    def waste(self) -> float:
        """Return the fraction of positions that hold no document; 0 if nothing is packed."""
        return self.data.waste if isinstance(self.data, Packed) else 0.0

    def measured(self, *, together: bool = False) -> tuple[Sequence[float], Sequence[Hashable] | None]:
        """Return (costs, groups), the same on every rank.

        together: each rank reads a part of the data, which makes this collective. Raises TrainingError for an invalid
        cost, or for lists of another length than the data.
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
                    f"every sample costs the same, {self._values[0][0]:g}, so nbkit cannot balance anything. "
                    "cost=lambda sample: ... gets a sample as the dataset returns it",
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
        except Exception as error:  # raised after the gather, because the other ranks wait there for this rank
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
                hint="the error of that rank says why",
            )
        return [parts[i % ranks][i // ranks] for i in range(len(self.data))]

    def _of(self, sample: Any) -> tuple[float, Hashable]:
        cost = self._cost(sample) if callable(self._cost) else _size(sample) if self._cost is None else 0.0
        return cost, self._group(sample) if callable(self._group) else None


def check_packed(data: Any, model: nn.Module) -> None:
    """Raise TrainingError if packed data is given to a model of transformers that would attend across documents."""
    if isinstance(data, Balanced) and data.pack and getattr(getattr(model, "config", None), "use_cache", False):
        raise TrainingError(
            "With a cache, the model does not see where packed documents begin, so tokens attend to other documents.",
            numbers=f"{type(model).__name__}: config.use_cache is True, pack={data.pack}",
            hint="use_cache=False: from_pretrained(..., use_cache=False), or model.config.use_cache = False",
        )


def _size(sample: Any) -> float:
    """Return the number of elements of the largest tensor, array, list or text in a sample."""
    if isinstance(sample, Tensor):
        return float(sample.numel())
    if isinstance(sample, Mapping | tuple):
        parts = sample.values() if isinstance(sample, Mapping) else sample
        return max(map(_size, parts), default=1.0)
    if isinstance(size := getattr(sample, "size", None), int):  # a numpy array
        return float(size)
    return float(len(sample)) if hasattr(sample, "__len__") else 1.0


def _checked(name: str, given: Any, number: int) -> Any:
    if given is not None and len(given) != number:
        raise TrainingError(
            f"The length of {name}= differs from the length of the data.",
            numbers=f"{len(given)} of {name}, {number} samples",
            hint=f"{name}=[...] with one value for each sample, or a function of a sample",
        )
    return given


def _numbers(costs: Sequence[float], number: int) -> list[float]:
    found = [float(cost) for cost in _checked("cost", costs, number)]
    wrong = [i for i, cost in enumerate(found) if not (math.isfinite(cost) and cost >= 0)]
    if wrong:
        raise TrainingError(
            "The cost of a sample must be a number >= 0.",
            numbers=f"{found[wrong[0]]} of sample {wrong[0]}",
            hint="cost=lambda sample: ...",
        )
    return found
