"""Records the divisor of each mean cross entropy, which is the number of targets that count (are not ignored).

A mean over the targets that count is not a mean over rows, because rows have unequal numbers of such targets. If their
number is known too, the parts of a batch can be averaged correctly: add the sums of all parts, and divide by the number
of targets in all parts.

nn.CrossEntropyLoss, nn.NLLLoss and the losses of transformers all call `F.cross_entropy` or `F.nll_loss`.
loss_check.py runs the whole loss to find out whether the number of targets is its correct weight.

A loss of several cross entropies with unequal numbers of targets has no single weight. If each of them takes its
targets from a tensor of the batch, the targets are counted in that tensor before the model runs. Each cross entropy is
then divided by the number for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from types import FunctionType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nbkit.errors import TrainingError
from nbkit.rank.loss.output_tensors import leaves


@dataclass(frozen=True)
class Labels:
    """A tensor of the batch that holds targets. first: the first position with a target. ignored: the ignored class."""

    name: str
    first: int
    ignored: int

    def count(self, batch: Any) -> float:
        """Return the number of targets of `batch` that count."""
        return float(self.kept(leaves(batch)[self.name]).numel())

    def kept(self, labels: Tensor) -> Tensor:
        """Return the targets in `labels` that count, in order."""
        return _kept(labels[..., self.first :] if labels.ndim > 1 else labels, self.ignored)


@dataclass(frozen=True)
class Share:
    """Numbers of targets that count, for each cross entropy. own: in a part of a batch. whole: in the whole batch.

    rows: the fraction of the batch's rows that the part has.
    """

    own: tuple[float, ...]
    whole: tuple[float, ...]
    rows: float


def labels_of(targets: Iterable[tuple[Tensor, int] | None], batch: Any) -> tuple[Labels, ...] | None:
    """Return the tensor of `batch` from which each cross entropy takes its targets; None if one of them is unknown.

    targets: (targets, ignored class) of each cross entropy. An entry is None if classes have weights, or if targets are
    probabilities.
    """
    found = []
    for each in targets:
        source = None if each is None else _source(*each, batch)
        if source is None:
            return None
        found.append(source)
    return tuple(found) or None


def share_of(sources: Sequence[Labels], part: Any, whole: Sequence[float], rows: float) -> Share:
    """Return the Share of `part`. whole, rows: see Share."""
    return Share(tuple(source.count(part) for source in sources), tuple(whole), rows)


def _source(target: Tensor, ignored: int, batch: Any) -> Labels | None:
    kept = _kept(target, ignored)
    for name, labels in leaves(batch).items():
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool or not labels.ndim:
            continue
        # Causal models shift their labels.
        for first in range(min(labels.ndim, 2)):
            source = Labels(name, first, ignored)
            found = source.kept(labels)
            if found.shape == kept.shape and torch.equal(found.to(kept), kept):
                return source
    return None


def _kept(labels: Tensor, ignored: int) -> Tensor:
    return labels[labels != ignored]


_FUNCTIONS: tuple[Any, ...] = F.cross_entropy, F.nll_loss


@dataclass(frozen=True)
class Counted:
    """A loss that is proven to be a mean over the targets that count.

    where: "loss" if the loss function computes the cross entropy, "model" if the model does. per_row: the weight of a
    row in which all targets count. Gradients are scaled by it when they are made. If all rows have this weight, no
    further scaling is needed. labels: the labels of each cross entropy, to count targets beforehand. They are used if
    several cross entropies have unequal numbers of targets, or if the loss adds something else.
    """

    where: Literal["loss", "model"]
    per_row: float
    labels: tuple[Labels, ...] = ()


class CountedTargets(TorchFunctionMode):
    """A mode that records the divisor of each mean cross entropy in a loss function. For a model, use `inside`.

    A mean over no targets is 0 with gradients of 0; in torch it is NaN. share: the numbers of targets of a part of a
    batch. With it, each cross entropy is divided by its number of targets in the whole batch, so that the loss is a
    mean over rows.
    """

    def __init__(self, share: Share | None = None) -> None:
        super().__init__()
        self.weights: list[Tensor | float] = []
        self.targets: list[tuple[Tensor, int] | None] = []
        self._share = share

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FUNCTIONS:
            return self._mean(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Record inside a model. A mode would slow down every operation, so the two functions are replaced instead.

        This records calls of the form `F.cross_entropy(...)`, as in torch's modules and transformers.
        """
        token = _noting.set(self)
        _Replaced.begin()
        try:
            yield
        finally:
            _Replaced.end()
            _noting.reset(token)

    @property
    def weight(self) -> Tensor | float | None:
        """Return the weight of the loss: the number of targets that count, or the sum of their classes' weights.

        None if no mean cross entropy was computed. Raises TrainingError if there were several with unequal numbers.
        """
        if not self.weights or self._share is not None:
            return None
        first, *others = self.weights
        if any(bool(other != first) for other in others):
            raise TrainingError(
                "The loss has several cross entropies that do not count the same targets.",
                numbers=", ".join(f"{float(weight):g}" for weight in self.weights) + " targets in one forward pass",
                hint="compute the loss from the model's output, and return its sum and weight: (loss.sum(), count)",
            )
        return first

    def check(self) -> None:
        """Raise TrainingError if no cross entropy was computed, although the loss was proven to be weighted by one."""
        if self._share is not None and len(self.weights) != len(self._share.own):
            raise _other_labels(f"{len(self.weights)} cross entropies, and {len(self._share.own)} before")
        if not self.weights:
            raise TrainingError(
                "The loss has computed no mean cross entropy in this forward pass. Before, it computed one.",
                numbers="nbkit weights it by the targets that count",
                hint="use one form of the loss for all batches: return (loss.sum(), count)",
            )

    def _mean(
        self,
        func: Callable[..., Tensor],
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        **smoothing: float,
    ) -> Tensor:
        if reduction != "mean" or size_average is not None or reduce is not None:
            return func(input, target, weight, size_average, ignore_index, reduce, reduction, **smoothing)
        total: Tensor | float
        divisor: Tensor | float
        if target.is_floating_point():
            # Targets are class probabilities, and none is ignored. torch divides by their number and ignores weights.
            total = divisor = target.numel() / target.shape[0 if target.ndim == 1 else 1]
        else:
            counts = target != ignore_index
            ids = target if weight is None else target.where(counts, 0)
            total = counts.sum() if weight is None else weight[ids].where(counts, 0).sum()
            divisor = total.clamp(min=1) if weight is None else total.where(total != 0, 1)
        known = weight is None and not target.is_floating_point()
        self.targets.append((target.detach(), ignore_index) if known else None)
        if self._share is not None:
            divisor = self._whole(total if known else None)
        # The weight is in float64, because it must not be rounded and is no part of the model's arithmetic.
        self.weights.append(total.double() if isinstance(total, Tensor) else total)
        # A sum over the targets of a batch would overflow in float16.
        narrow = input.dtype == torch.float16
        losses = func(
            input, target, weight, None, ignore_index, None, reduction="none" if narrow else "sum", **smoothing
        )
        return (losses.float().sum() / divisor).to(losses.dtype) if narrow else losses / divisor

    def _whole(self, total: Tensor | float | None) -> float:
        """Return the divisor, in a part of a batch, of a cross entropy over `total` targets."""
        share, number = self._share, len(self.weights)
        assert share is not None
        if number >= len(share.own) or total is None or float(total) != share.own[number]:
            raise _other_labels(
                f"cross entropy {number + 1} counts {'weighted' if total is None else f'{float(total):g}'} targets, "
                f"the labels of the batch give {', '.join(f'{own:g}' for own in share.own)}"
            )
        return (share.whole[number] or 1.0) * share.rows


def _other_labels(numbers: str) -> TrainingError:
    return TrainingError(
        "The loss no longer takes its targets from the labels of the batch, as it did before.",
        numbers=numbers,
        hint="use one form of the loss for all batches",
    )


_noting: ContextVar[CountedTargets | None] = ContextVar("noting", default=None)


def _noted(func: FunctionType) -> Callable[..., Any]:
    """Return a replacement for `func`. On a thread that records, it calls the recorder; else it calls `func`."""
    # The code of `func` finds itself by its name in torch's module, when it calls modes and tensor subclasses.
    plain = FunctionType(func.__code__, func.__globals__ | {func.__name__: func}, func.__name__, func.__defaults__)
    plain.__kwdefaults__ = func.__kwdefaults__

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        targets = _noting.get()
        return plain(*args, **kwargs) if targets is None else targets._mean(plain, *args, **kwargs)

    return stand_in


class _Replaced:
    """Replaces the two functions in torch.nn.functional while any thread records inside a model."""

    _lock, _users = Lock(), 0
    _functions: ClassVar[dict[str, Any]] = {func.__name__: func for func in _FUNCTIONS}
    _stand_ins: ClassVar[dict[str, Any]] = {func.__name__: _noted(func) for func in _FUNCTIONS}

    @classmethod
    def begin(cls) -> None:
        cls._change(1, cls._stand_ins)

    @classmethod
    def end(cls) -> None:
        cls._change(-1, cls._functions)

    @classmethod
    def _change(cls, by: int, to: dict[str, Any]) -> None:
        with cls._lock:
            cls._users += by
            if cls._users == (by > 0):
                for name, func in to.items():
                    setattr(F, name, func)
