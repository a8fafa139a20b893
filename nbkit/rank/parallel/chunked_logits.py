"""Compute the head of a model and its cross entropy in pieces, so that no rank ever holds all logits.

The logits (samples, positions, vocabulary) of a language model are often its largest tensor. With
`Compute(loss_chunks=n)` the head returns `ChunkedLogits`: the hidden states, and how logits are computed from them. The
usual steps of a loss (views, slices, casts, scaling, transposing) are recorded. `F.cross_entropy` then processes a part
of the positions at a time: it computes the logits of this part and their losses, and keeps only the hidden states. The
backward pass computes the logits of each part again. So at any time, logits and their gradients exist for one of n
parts. The head's matrix product is computed three times instead of two, as in the chunked losses of torchtitan.

Any other operation gets all logits. This is correct, but saves no memory, and a warning says so.

With tp, each part is split over the vocabulary as before (sharded_tensor.py), and sends its three numbers per position.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.errors import StrategyError, TrainingError
from nbkit.rank.parallel.module.forward_wrapper import Wrapper, forgetting, wrap
from nbkit.rank.parallel.tensor.layers import GatheredOutputs, Head
from nbkit.rank.parallel.tensor.plan.linear_types import is_linear, sizes
from nbkit.rank.parallel.tensor.sharded_tensor import ELEMENTWISE, SCALING, ShardedTensor, VocabShard, whole


def find_head(model: nn.Module, blocks: Collection[str], chunks: int) -> str:
    """Return the name of the map to the vocabulary: the linear map outside of `blocks` with the most outputs.

    Raises StrategyError if there is none.
    """
    inside = tuple(f"{name}." for name in blocks)
    found = {name: part for name, part in model.named_modules() if is_linear(part) and not name.startswith(inside)}
    if not found:
        raise StrategyError(
            "loss_chunks= needs a model whose last layer is linear, and this model has none.",
            numbers=f"loss_chunks={chunks}, and no linear module outside of its blocks",
            hint="compute=nbkit.Compute(loss_chunks=1); or nn.Linear for the head, with weight = that of the "
            "embedding if they are tied",
        )
    largest: str = max(found, key=lambda name: sizes(found[name])[1])
    return largest


def chunk_logits(head: nn.Module, whole_head: nn.Module, chunks: int) -> None:
    """Make `head` return ChunkedLogits of `chunks` parts. In place. whole_head: the same map, not split by tp."""
    wrap(head, _ChunkedHead(head, sizes(whole_head)[1], chunks))


class _ChunkedHead(Wrapper):
    def __init__(self, module: nn.Module, outputs: int, chunks: int) -> None:
        super().__init__(module.forward)
        self.module = module
        self._outputs, self._chunks, self._warned = outputs, chunks, False

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = self.plain
        if args or kwargs or x.ndim < 2:
            return plain(x, *args, **kwargs)
        if isinstance(plain, Head | GatheredOutputs):
            hidden, logits_of = plain.ready(x), plain.of_ready
        else:
            hidden, logits_of = whole(x), plain
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type) and dtype.is_floating_point and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(hidden.device.type)
        making = _Making(logits_of, tuple(self.module.parameters()), self._outputs, self._chunks, self._is_whole)
        return ChunkedLogits(hidden, making, dtype)

    def _is_whole(self, name: str) -> None:
        """Warn once that a training pass computes all logits."""
        if torch.is_grad_enabled() and not self._warned:
            self._warned = True
            warnings.warn(
                f"loss_chunks={self._chunks} has no effect: the loss computes {name} of all logits. "
                "F.cross_entropy(logits, target) takes them in pieces",
                stacklevel=2,
            )


@dataclass(frozen=True)
class _Making:
    """A way to compute logits from hidden states.

    logits_of: (N, width) -> (N, outputs), with `parameters`. steps: operations on the logits since then. is_whole:
    called with the name of an operation that needs all logits.
    """

    logits_of: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]
    outputs: int
    chunks: int
    is_whole: Callable[[str], None]
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states (..., width). With tp they are split over the vocabulary."""
        logits = self.logits_of(hidden)
        for step in self.steps:
            logits = step(logits)
        return logits


class ChunkedLogits(VocabShard):
    """Logits that are not computed yet. part: the hidden states, with their features in the dim `along` of the classes.

    It behaves like the logits. dtype: the dtype of the logits.
    """

    called = "logits"
    _making: _Making

    @staticmethod
    def __new__(cls, hidden: Tensor, making: _Making, dtype: torch.dtype, along: int = -1) -> ChunkedLogits:  # type: ignore[override]
        made = ShardedTensor.__new__(cls, hidden, None, making.outputs, along, dtype)  # type: ignore[arg-type]
        made._making, made.borrowed = making, making.parameters
        return made

    def like(self, part: Tensor, along: int | None = None) -> ChunkedLogits:  # type: ignore[override]
        """Return logits of `part`, computed in the same way."""
        return ChunkedLogits(part, self._making, self.dtype, self.along if along is None else along)

    def gathered(self) -> Tensor:
        """Return all logits."""
        return whole(self._making(self.part.movedim(self.along, -1))).movedim(-1, self.along)

    def _then(self, step: Callable[[Tensor], Tensor]) -> ChunkedLogits:
        """Return these logits after an elementwise `step`."""
        dtype = step(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        making = replace(self._making, steps=(*self._making.steps, step))
        return ChunkedLogits(self.part, making, dtype, self.along)

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a usual step of a loss, or compute the cross entropy in pieces."""
        found = NotImplemented
        if args and isinstance(first := args[0], ChunkedLogits):
            rest = args[1:]
            if func in ELEMENTWISE or (func in SCALING and _are_numbers(rest) and not kwargs):
                if not any(isinstance(each, Tensor) for each in (*rest, *kwargs.values())):
                    return first._then(lambda logits: func(logits, *rest, **kwargs))
            elif func is F.cross_entropy:
                found = _cross_entropy(first, *rest, **kwargs)
            else:
                found = VocabShard.answer(func, args, kwargs)
            if found is NotImplemented:
                first._making.is_whole(getattr(func, "__name__", str(func)))
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ChunkedLogits(shape={tuple(self.shape)}, dtype={self.dtype}, in {self._making.chunks} pieces)"

    @classmethod
    def _refuse(cls, name: str) -> NoReturn:
        raise TrainingError(
            "With loss_chunks=, logits are computed in pieces, so an operation cannot change all of them in place.",
            numbers=f"operation {name}, under loss_chunks=",
            hint="logits = f(logits) instead; or compute=nbkit.Compute(loss_chunks=1)",
        )

    @classmethod
    def _refuse_function(cls, name: str) -> NoReturn:
        raise TrainingError(
            "With loss_chunks=, logits are computed in pieces, and a torch.autograd.Function that takes them would "
            "lose their gradient.",
            numbers=f"{name}, under loss_chunks=",
            hint="logits = logits + 0 before it; or compute=nbkit.Compute(loss_chunks=1)",
        )


def _are_numbers(values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _cross_entropy(
    logits: ChunkedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return F.cross_entropy, computed for a part of the positions at a time, or NotImplemented for its rare forms."""
    of_classes = 0 if logits.ndim == 1 else 1
    if logits.along != of_classes or size_average is not None or reduce is not None:
        return NotImplemented
    if target.is_floating_point() or (weight is not None and label_smoothing):
        return NotImplemented
    hidden = logits.part.movedim(of_classes, -1)
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    if not targets.numel():
        return NotImplemented
    making = logits._making

    def losses_of(rows: Tensor, targets: Tensor) -> Tensor:
        how = "none" if reduction == "none" else "sum"
        return F.cross_entropy(
            making(rows), targets, weight, ignore_index=ignore_index, reduction=how, label_smoothing=label_smoothing
        )

    compute, size = forgetting(losses_of), -(-targets.numel() // making.chunks)
    found = [compute(*part) for part in zip(rows.split(size), targets.split(size), strict=True)]
    if reduction == "none":
        return torch.cat(found).view(target.shape)
    total = torch.stack(found).sum()
    if reduction == "sum":
        return total
    counts = targets != ignore_index
    return total / (counts.sum() if weight is None else weight[targets.where(counts, 0)].where(counts, 0).sum())
