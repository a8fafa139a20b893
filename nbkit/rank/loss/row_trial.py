"""Runs a model and its loss on some rows, and measures value, gradients of a few parameters, and outputs.

It also finds rows of a batch that may have different weights, by ignored labels, masks, padding, classes or lengths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nbkit.rank.data.batch import pair
from nbkit.rank.loss.counted_targets import Counted, CountedTargets, labels_of, share_of
from nbkit.rank.loss.mean_over_rows import coarsest
from nbkit.rank.loss.output_tensors import leaves, with_leaves
from nbkit.rank.loss.row_weights import Loss, weigh
from nbkit.rank.parallel.module.copies import window
from nbkit.rank.parallel.proof.observe import gradients as gradients_of
from nbkit.rank.rng.draw_plan import DrawPlan
from nbkit.rank.rng.host_generators import seed_others
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from nbkit.rank.rng.seeding import set_seed
from nbkit.rank.torch_private import BatchNorm

_AUXILIARY = re.compile(r"aux|balanc", re.IGNORECASE)
_WIDE = 1 << 24  # maximum number of elements of a model that is run in float64
_ELEMENTS = 1 << 20  # maximum number of elements of the parameters whose gradients are compared

Counting = Literal["no", "one", "each"]
Auxiliary = dict[str, tuple[float, float, tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Measured:
    """The result of a run. value: the loss times its rows, or the sum of (sum, weight).

    grads: gradients of the trial's parameters, () if not requested. output: the model's output. tensors: the detached
    tensors in the output. slopes: name -> sum of the absolute gradient with respect to this tensor. auxiliary: name ->
    (value, slope of the loss in it, gradients), for scalars whose names say that they are auxiliary terms. eps: eps of
    the coarsest dtype in use.
    """

    rows: int
    value: float
    weight: float
    output: Any
    tensors: dict[str, Tensor]
    slopes: dict[str, float]
    grads: tuple[Tensor, ...] = ()
    auxiliary: Auxiliary = field(default_factory=dict)
    eps: float = 0.0

    def without_auxiliary(self) -> tuple[float, tuple[Tensor, ...]]:
        """Return (value, grads) of the loss after subtracting its linear dependence on the auxiliary terms."""
        value, grads = self.value, self.grads
        for term, slope, of_term in self.auxiliary.values():
            value -= slope * term
            grads = tuple(grad - slope * other for grad, other in zip(grads, of_term, strict=True))
        return value, grads


@dataclass
class RowTrial:
    """A model and a loss to run on rows. Random draws are keyed by row. Use it inside `kept`.

    run: model input -> output of `module`. training: run in training mode, else in evaluation mode. backward: compare
    gradients of the smallest parameters too. counting: with "one", a mean cross entropy is weighted by the targets that
    count; with "each", each cross entropy is divided by its number of targets in the whole batch, known from its
    labels. counted: the result of counting, after a run; None if the loss has no cross entropy. draws: the model's
    random draws, if known.
    """

    module: nn.Module
    run: Callable[[Any], Any]
    loss: Loss
    inputs: Sequence[str] | None
    training: bool
    backward: bool
    counting: Counting
    draws: DrawPlan | None = None
    counted: Counted | None = None

    def __post_init__(self) -> None:
        self.params: list[nn.Parameter] = []
        for param in sorted((p for p in self.module.parameters() if p.requires_grad), key=lambda p: p.numel()):
            if self.backward and (not self.params or sum(p.numel() for p in self.params) < _ELEMENTS):
                self.params.append(param)
        # All runs share this object. It hooks every module, and knows after the first run whether the model draws.
        self._dropout = KeyedDropout(self.module, 0, self.draws)

    @contextmanager
    def _keyed(self, rows: Sequence[int]) -> Iterator[None]:
        try:
            with self._dropout.step(0, rows):
                yield
        finally:
            self._dropout.release()

    def measure(
        self,
        part: Any,
        rows: Sequence[int],
        *,
        of: tuple[Any, int] | None = None,
        loss: Loss | None = None,
        seed: int = 1,
        backward: bool = True,
    ) -> Measured:
        """Run model and loss on `part`. rows: the numbers of its rows, which key the random draws.

        of: the whole batch and its number of rows; None if `part` is the whole batch. loss: replaces the trial's loss.
        """
        value, target = pair(part, self.inputs)
        set_seed(seed)
        seed_others(seed)
        targets = counting(self.counting, self.counted, part, len(rows), of)
        with coarsest() as seen, self._keyed(rows), torch.enable_grad():
            with targets.inside() if targets is not None else nullcontext():
                output = self.run(value)
            inside = targets is not None and bool(targets.weights)
            with targets or nullcontext():
                result = (loss or self.loss)(output, target)
            weighed = weigh(result, len(rows), None if self.counting == "each" else targets)
            if targets is not None and targets.weights and loss is None and self.counting == "each":
                self.counted = self.counted or each_of(targets, "model" if inside else "loss", part)
            elif targets is not None and targets.weights and loss is None and not weighed.summed:
                most = self.counted.per_row if self.counted is not None else 1.0
                self.counted = Counted("model" if inside else "loss", max(most, float(weighed.weight) / len(rows)))
            total, eps = weighed.total, seen.eps
            tensors = leaves(output)
            auxiliary: Auxiliary = {}
            grads: tuple[Tensor, ...] = ()
            slopes: dict[str, float] = {}
            if total.requires_grad:
                terms = {name: t for name, t in tensors.items() if _is_auxiliary(name, t)}
                auxiliary = {name: _auxiliary(total, term, self.params) for name, term in terms.items()}
                grads = _grads(total, self.params) if backward else ()
                slopes = _slopes(total, tensors) if backward else {}
        return Measured(
            rows=len(rows),
            value=float(total.detach()),
            weight=float(weighed.weight),
            output=_detached(output),
            tensors={name: tensor.detach() for name, tensor in tensors.items()},
            slopes=slopes,
            grads=grads,
            auxiliary=auxiliary,
            eps=eps,
        )


def _auxiliary(total: Tensor, term: Tensor, params: Sequence[nn.Parameter]) -> tuple[float, float, tuple[Tensor, ...]]:
    (slope,) = gradients_of([total], [term])
    return float(term.detach()), 0.0 if slope is None else float(slope), _grads(term.sum(), params)


def _grads(of: Tensor, params: Sequence[nn.Parameter]) -> tuple[Tensor, ...]:
    found = zip(params, gradients_of([of], params), strict=True)
    return tuple(torch.zeros_like(p) if grad is None else grad.detach() for p, grad in found)


def counting(
    how: Counting, counted: Counted | None, part: Any, rows: int, of: tuple[Any, int] | None
) -> CountedTargets | None:
    """Return a recorder for the targets of `part`; see RowTrial. of: the whole batch and its number of rows."""
    if how == "no" or how == "one" or counted is None:
        return None if how == "no" else CountedTargets()
    batch, total = of or (part, rows)
    whole = [labels.count(batch) for labels in counted.labels]
    return CountedTargets(share_of(counted.labels, part, whole, rows / total))


def each_of(targets: CountedTargets, where: Literal["loss", "model"], batch: Any) -> Counted:
    """Return a Counted with the labels of `batch` from which the recorded cross entropies take their targets.

    Raises ValueError if the labels are unknown.
    """
    labels = labels_of(targets.targets, batch)
    if labels is None:
        raise ValueError("the targets of a cross entropy are not in the batch")
    return Counted(where, 1.0, labels)


def _detached(output: Any) -> Any:
    """Return the output without its graph, which takes much memory; None for an output that cannot be copied."""
    with suppress(Exception):
        return with_leaves(output, lambda _, tensor: tensor.detach())
    return None


def _slopes(total: Tensor, tensors: dict[str, Tensor]) -> dict[str, float]:
    tracked = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    found = gradients_of([total], list(tracked.values()))
    return {name: float(grad.abs().sum()) for name, grad in zip(tracked, found, strict=True) if grad is not None}


def _is_auxiliary(name: str, tensor: Tensor) -> bool:
    last = name.rpartition(".")[2]
    return bool(_AUXILIARY.search(last)) and tensor.numel() == 1 and tensor.requires_grad


@contextmanager
def kept(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Put the modules in training mode or evaluation mode inside this context, and restore their attributes afterwards.

    BatchNorm is always in evaluation mode, because another check covers it. The restored attributes include counters of
    calls.
    """
    before = [(part, dict(vars(part))) for part in module.modules()]
    try:
        for part in module.modules():
            # Frozen parts of a model may stay in evaluation mode.
            part.training &= training and not isinstance(part, BatchNorm)
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


@contextmanager
def disturbed(module: nn.Module) -> Iterator[None]:
    """Replace all-zero parameters by other values inside this context, without using memory.

    A zero parameter would hide errors in the modules whose results it multiplies.
    """
    zeros = [(p, p.data) for p in module.parameters() if p.is_floating_point() and _is_zero(p.data)]
    try:
        for param, data in zeros:
            param.data = window(data.shape, data.dtype, data.device)
        yield
    finally:
        for param, data in zeros:
            param.data = data


@contextmanager
def in_double(module: nn.Module) -> Iterator[None]:
    """Convert parameters and buffers to float64 inside this context. Raises ValueError if the model is too large."""
    held = [x for x in (*module.parameters(), *module.buffers()) if x.is_floating_point()]
    if sum(x.numel() for x in held) > _WIDE:
        raise ValueError("a model of this size is not run in float64")
    before = [(x, x.data) for x in held]
    try:
        for x, data in before:
            x.data = data.double()
        yield
    finally:
        for x, data in before:
            x.data = data


def _is_zero(data: Tensor) -> bool:
    # For most tensors, a few elements are enough to decide.
    return data.numel() > 0 and not data[(0,) * max(data.ndim - 1, 0)].any() and not data.any()


_IGNORED = -100  # the class that torch's cross_entropy and transformers ignore


def differing_pairs(batch: Any, rows: int) -> list[tuple[int, int]]:
    """Return pairs of rows whose weights may differ, likely differences first; [(0, 1)] if there are none."""
    found: dict[frozenset[int], tuple[int, int]] = {}
    for _, column in sorted(_columns(batch, rows), key=lambda each: each[0]):
        if column.max() > column.min():
            pair = int(column.argmin()), int(column.argmax())
            found.setdefault(frozenset(pair), pair)
    return list(found.values()) or [(0, 1)]


def varying(batch: Any, rows: int) -> frozenset[int]:
    """Return the indices of the numbers that may be weights of rows and are not equal for all rows."""
    return frozenset(i for i, (_, column) in enumerate(_columns(batch, rows)) if column.max() > column.min())


def spread_rows(batch: Any, rows: int, most: int) -> list[int]:
    """Return at most `most` rows: the rows of `differing_pairs`, one row of each class, then rows spread over all."""
    chosen = [row for pair in differing_pairs(batch, rows) for row in pair]
    for rank, column in _columns(batch, rows):
        if rank == 0:
            first: dict[float, int] = {}
            for row, value in enumerate(column.tolist()):
                first.setdefault(value, row)
            chosen += first.values()
    chosen += range(0, rows, max(rows // most, 1))
    return list(dict.fromkeys([*chosen, *range(rows)]))[:most]


def _columns(part: Any, rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (priority, a number for each row). Ignored labels, classes and lengths have priority 0, the highest."""
    if isinstance(part, Tensor) and part.ndim and part.shape[0] == rows and part.numel():
        yield from _of_tensor(part.detach().reshape(rows, -1).cpu())
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from _columns(value, rows)
    elif isinstance(part, tuple | list):
        if len(part) == rows and not any(isinstance(value, Tensor) and value.shape[:1] == (rows,) for value in part):
            yield 0, torch.tensor([_length(value) for value in part], dtype=torch.float64)
        for value in part:
            yield from _columns(value, rows)


def _of_tensor(flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    def count(mask: Tensor) -> Tensor:
        return mask.sum(1).double()

    if flat.is_floating_point():
        yield 0, count(flat.isnan())
        yield 1, count(flat == 0)
        yield 3, flat.double().nan_to_num().mean(1)
    elif not flat.is_complex():
        if flat.shape[1] == 1:
            yield 0, flat[:, 0].double()
            return
        if flat.dtype != torch.bool:
            yield 0, count(flat == _IGNORED)
            yield 1, count(flat < 0)
        yield 1, count(flat == 0)
        # The padding value is unknown, so count the value at the end, and the value at the beginning.
        yield 2, count(flat == flat[:, -1:])
        yield 2, count(flat == flat[:, :1])


def _length(value: Any) -> float:
    return float(value.numel() if isinstance(value, Tensor) else len(value) if hasattr(value, "__len__") else 0)
