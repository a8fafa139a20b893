"""The seconds that samples take, by their size: least squares over the shares that ranks have computed.

A rank's seconds of a step are the sum over its rows of size x rate, with a rate for each of a dozen classes of sizes.
Ranks that compute another part of the model (stages of a pipeline) count in the proportion of their mean, those of
unequal speed in that of their `speeds=`. Rates stay as near to what they were as what is measured is noisy (ridge
regression, Hoerl and Kennard 1970: a rate is off by itself, a share by what the fit leaves of it), and old steps count
less.

Seconds never change which samples a batch has, only who computes which: a loss does not depend on a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nbkit.rank.data.balanced.difficulty import Difficulty, Gather
from nbkit.rank.telemetry.phases import Step, clock

_CLASSES = 12
_COMPUTING = ("forward", "backward")
_FIRST = 8  # batches, after which the first epoch is looked at; then after twice as many
_LEAST = 1e-3  # of the mean: a rate, and what holds a rate that no share tells
_OLD = 0.5  # what earlier steps count at the next look


@dataclass(frozen=True)
class Shares:
    """What a rank has computed: sums over steps, of which `number` are new and older ones count less.

    squares: sizes x sizes, by class; products: sizes x seconds; sizes; seconds, and squared; weight: what steps count.
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
        """Of no step."""
        zeros = torch.zeros(classes, dtype=torch.float64)
        return cls(torch.zeros(classes, classes, dtype=torch.float64), zeros, zeros)

    def and_one(self, sizes: Tensor, seconds: float) -> Shares:
        """With one step more."""
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
        """The same, which counts less than what comes."""
        return Shares(
            _OLD * self.squares,
            _OLD * self.products,
            _OLD * self.sizes,
            _OLD * self.seconds,
            _OLD * self.squared,
            _OLD * self.weight,
        )


def rates_of(everyone: Sequence[tuple[int, Shares]], before: Tensor) -> Tensor:
    """Of each class, by what all ranks have computed; before: rates, which what is not told stays near.

    everyone: of each rank its place along dp, and its shares. Which replica a rank is of says nothing of its part of
    the model; the first ranks of all replicas have the same part, and so have the second.
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
        """What is left of a share on average, squared."""
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
    """sizes: of each sample, which are its costs until shares have been measured."""

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
        self._made: list[tuple[Tensor, float, Step]] = []
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
        self._passed = True  # a first step makes buffers and proofs

    def end(self) -> None:
        if self._step in clock.listeners:
            clock.listeners.remove(self._step)

    def reads(self, epoch: int, indices: Sequence[int], *, replica: int, speed: float) -> None:
        self._replica, self._speed = replica, speed
        sizes = torch.zeros_like(self._rates)
        for index in indices:
            sizes[self._class[index]] += self._sizes[index]
        self._current = sizes

    def _step(self, step: Step) -> None:
        """One is made: see StepClock.listeners. A device may not be done with it."""
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
        # Solved on one rank: another processor may round otherwise, and ranks divide alike.
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
        return ""  # shares alone depend on it

    def agree(self, gather: Gather) -> None:
        rates, self._number = max(gather((self._rates, self._number)), key=lambda held: held[1])
        self._set(rates)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_made": [], "_current": None}  # which hold events of a device

    @property
    def why(self) -> str:
        least, most = min(self._sizes), max(self._sizes)
        if not self._number:
            return f"the size of a sample, {least:g} to {most:g} elements, until the seconds of some steps are measured"
        small, large = self._costs[self._sizes.index(least)], self._costs[self._sizes.index(most)]
        return (
            f"learned from the seconds of {self._number} shares: a sample of {most:g} elements costs "
            f"{large / small:.3g} times one of {least:g}, by its size {most / least:.3g}"
        )
