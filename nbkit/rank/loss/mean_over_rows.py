"""Proves that a loss function is a mean or a sum over rows. It uses outputs of a model, but does not run the model.

It compares value and gradient, in float64 if the loss allows it. So the model's kernels add no rounding, and even a
term of small weight is noticed. The outputs of two rows are used for all rows, so that only the targets differ.

`row_losses` computes the loss of each row of a batch by itself, as a measure of how difficult each sample is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import isclose, isfinite, prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from nbkit.rank.data.batch import pair, pick, take
from nbkit.rank.loss.counted_targets import CountedTargets
from nbkit.rank.loss.output_tensors import leaves, with_leaves
from nbkit.rank.loss.row_weights import Loss, weigh
from nbkit.rank.parallel.proof.observe import gradients
from nbkit.rank.rng.seeding import seeded

_GRADIENT, _VALUE = 2e-5, 1e-5  # tolerance for float32 arithmetic, relative to the largest value
_ELEMENTS = 1 << 23  # maximum number of elements of all outputs together
_NODES = 10_000  # maximum number of nodes of the graph of a loss


def compares_rows(loss: Tensor, shape_of: Callable[[Any, int], Sequence[int] | None], rows: int) -> bool:
    """Return True if the loss of a row depends on the outputs of other rows, as in a contrastive loss.

    Then the gradient of some rows changes with the outputs of others: see `_mixes`. shape_of: (a node of the graph, the
    number of one of its results) -> the shape of the result if it is an output of a model, else None. The function runs
    no model. It returns False if the graph has the user's own autograd functions, because they may communicate. It also
    returns False if it cannot find the answer.
    """
    ends: dict[tuple[Any, int], Sequence[int]] = {}
    seen, waiting = set[Any](), [(loss.grad_fn, 0)]
    for node, number in waiting:
        if node is None or node in seen:
            continue
        if (shape := shape_of(node, number)) is not None:
            ends[node, number] = shape
            continue
        if isinstance(node, BackwardCFunction) or node.name().startswith("CppNode") or len(seen) > _NODES:
            return False
        seen.add(node)
        waiting += node.next_functions
    # If dim 0 has several entries for each row, as flattened logits have, another dim is equal to `rows` by chance.
    fitting = {
        GradientEdge(*end): shape
        for end, shape in ends.items()
        if rows in shape and (shape[0] == rows or shape[0] % rows) and prod(shape) <= _ELEMENTS
    }
    if not fitting or rows < 2:
        return False
    try:
        with torch.enable_grad():
            grads = torch.autograd.grad(loss, list(fitting), create_graph=True, allow_unused=True)
            # The rows may lie along another dim than 0. If the entries along a dim do not mix, they may be the rows.
            return any(
                all(_mixes(grad, end, dim, rows) for dim, size in enumerate(shape) if size == rows)
                for (end, shape), grad in zip(fitting.items(), grads, strict=True)
                if grad is not None and grad.requires_grad
            )
    except Exception:  # a function without a second derivative
        return False


def _mixes(grad: Tensor, end: GradientEdge, dim: int, rows: int) -> bool:
    """Return True if `grad` of the first half of the rows along `dim` depends on the output of the second half."""
    half = rows // 2
    part = grad.narrow(dim, 0, half)
    signs = torch.arange(part.numel(), device=part.device).reshape(part.shape).cos().to(part)
    (found,) = torch.autograd.grad((part * signs).sum(), [end], retain_graph=True, allow_unused=True)
    if found is None or not bool(found.isfinite().all()):
        return False
    return bool(found.narrow(dim, half, rows - half).abs().max() > _GRADIENT * found.abs().max())


@dataclass(frozen=True)
class Defect:
    """A defect of a loss. numbers: the figures that show it.

    kind: "sum" if the loss grows with the number of rows; "weights" if a row's weight depends on other rows; "rows" if
    the loss compares rows; "pairs" if (sum, weight) do not add up.
    """

    kind: str
    numbers: str


@dataclass(frozen=True)
class LossAlone:
    """The result for a loss by itself. defect: None if there is none. used: names of the outputs that it depends on."""

    defect: Defect | None
    used: frozenset[str]


@dataclass(frozen=True)
class _Run:
    """A run of the loss. value: the loss times its rows, or the sum of (sum, weight). grads: output -> its gradient."""

    value: float
    weight: float
    summed: bool
    grads: dict[str, Tensor]


class coarsest(TorchFunctionMode):
    """A mode that records the coarsest floating dtype in use: `.eps` is 2^-23 for float32, 2^-7 for bfloat16."""

    eps = torch.finfo(torch.float64).eps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
        return result


def loss_alone(
    loss: Loss,
    output: Any,
    lengths: Mapping[str, int],
    batch: Any,
    rows: int,
    inputs: Sequence[str] | None,
    counting: Callable[[Any, int, tuple[Any, int] | None], CountedTargets | None],
) -> LossAlone | None:
    """Return how `loss` of a row depends on other rows; None if that cannot be determined.

    output: the model's output for a few rows. lengths: name -> number of entries of one row along dim 0, for the
    tensors of `output` that hold rows. batch: a batch of `rows` rows. counting: (part of a batch, its rows, the batch
    and its rows) -> a recorder of targets that count; None if the loss is weighted by rows.
    """
    elements = sum(t.numel() // t.shape[0] * lengths[name] for name, t in leaves(output).items() if name in lengths)
    places = range(min(rows, max(2, _ELEMENTS // max(elements, 1))))
    for dtype in (torch.float64, torch.float32):
        trial = _Trial(loss, output, lengths, batch, rows, inputs, counting, dtype)
        try:
            with coarsest() as seen:
                whole = trial.run(places)
            again = trial.run(places)
        except Exception:
            continue
        if not isfinite(whole.value + whole.weight) or again.value != whole.value:
            return None
        parts = trial.alone(len(places))
        used = frozenset(whole.grads)
        return LossAlone(_defect(whole, parts, lengths, len(places), seen.eps) if parts else None, used)
    return None


@dataclass(frozen=True)
class _Trial:
    loss: Loss
    output: Any
    lengths: Mapping[str, int]
    batch: Any
    rows: int
    inputs: Sequence[str] | None
    counting: Callable[[Any, int, tuple[Any, int] | None], CountedTargets | None]
    dtype: torch.dtype

    def run(self, places: Sequence[int], among: Sequence[int] | None = None) -> _Run:
        """Run the loss on the rows at `places`. among: the places of all rows, if `places` are a part of them."""
        floats: dict[str, Tensor] = {}

        def of(name: str, tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if (length := self.lengths.get(name)) is not None:
                held = tensor.shape[0] // length
                tensor = torch.cat([tensor[place % held * length :][:length] for place in places])
            if tensor.is_floating_point():
                wider = torch.promote_types(tensor.dtype, torch.float32)
                tensor = floats[name] = tensor.to(torch.promote_types(wider, self.dtype), copy=True).requires_grad_()
            return tensor

        output = with_leaves(self.output, of)
        part = pick(self.batch, places, rows=self.rows)
        _, target = pair(part, self.inputs)
        whole = None if among is None else (pick(self.batch, among, rows=self.rows), len(among))
        targets = self.counting(part, len(places), whole)
        with torch.enable_grad():
            with targets or nullcontext():
                result = self.loss(output, target)
            weighed = weigh(result, len(places), targets)
            value = weighed.total
            found = gradients([value], list(floats.values()))
        grads = {name: grad for name, grad in zip(floats, found, strict=True) if grad is not None}
        return _Run(float(value.detach()), float(weighed.weight), weighed.summed, grads)

    def alone(self, rows: int) -> list[_Run]:
        """Run the loss on each row, or on each half if single rows raise an error; return [] if halves do too."""
        single = [range(place, place + 1) for place in range(rows)]
        for cut in (single, [range(rows // 2), range(rows // 2, rows)]):
            try:
                return [self.run(part, range(rows)) for part in cut]
            except Exception:
                continue
        return []


def _defect(whole: _Run, parts: Sequence[_Run], lengths: Mapping[str, int], chosen: int, eps: float) -> Defect | None:
    numbers = f"{chosen} rows " + shown(whole.value, whole.weight, [(part.value, part.weight) for part in parts])
    finite = [isfinite(part.value) for part in parts]
    if not all(finite):
        return Defect("weights" if any(finite) else "rows", numbers)
    ratios, straight, equal = [], True, True
    for name in whole.grads.keys() & lengths.keys():
        grad = whole.grads[name]
        per_row = [part.grads.get(name) for part in parts]
        apart = torch.cat([torch.zeros_like(grad[:0]) if part is None else part for part in per_row])
        if apart.shape != grad.shape:
            continue
        largest = float(torch.maximum(grad.abs().max(), apart.abs().max()))
        tolerance = max(_GRADIENT, 16 * eps) * largest
        equal &= float((grad - apart).abs().max()) <= tolerance
        for one, other in zip(grad.chunk(len(parts)), apart.chunk(len(parts)), strict=True):
            ratio = float((one * other).sum() / other.square().sum().clamp(min=1e-300))
            ratios.append(ratio)
            straight &= float((one - ratio * other).abs().max()) <= 4 * tolerance
    scale = abs(whole.value) + sum(abs(part.value) for part in parts)
    equal &= abs(whole.value - sum(part.value for part in parts)) <= max(_VALUE, 8 * eps) * scale
    equal &= isclose(whole.weight, sum(part.weight for part in parts), rel_tol=max(1e-6, 8 * eps), abs_tol=1e-12)
    if equal:
        return None
    if whole.summed:
        return Defect("pairs", numbers)
    if ratios and all(isclose(ratio, len(parts), rel_tol=1e-3) for ratio in ratios):
        return Defect("sum", numbers)
    return Defect("weights" if straight and ratios else "rows", numbers)


def shown(together: float, weight: float, parts: Sequence[tuple[float, float]]) -> str:
    """Return a text with the loss of all rows together, of each part, and of the parts combined.

    parts: (loss sum, weight) of each part.
    """
    alone = ", ".join(f"{value / (each or 1):.6g}" for value, each in parts[:4]) + ", ..." * (len(parts) > 4)
    apart = sum(value for value, _ in parts) / (sum(each for _, each in parts) or 1)
    return f"{together / (weight or 1):.6g} together; each alone: {alone}, together {apart:.6g}"


@torch.no_grad()
def row_losses(loss: Loss, output: Any, target: Any, rows: int, device: torch.device) -> Tensor:
    """Return the loss of each row of `output` and `target`, of shape (rows,), without waiting for the device.

    A row of weight 0 has the loss NaN. If the model computed one loss for all rows, each row gets that loss. The random
    generators are restored afterwards. Collective if the loss is collective.
    """

    def of(row: int) -> Tensor:
        def cut(_: str, part: Tensor) -> Tensor:
            return part[row : row + 1] if part.shape[:1] == (rows,) else part

        weighed = weigh(loss(with_leaves(output, cut), take(target, row, row + 1, rows=rows)), 1)
        return (weighed.value / weighed.weight if weighed.summed else weighed.value).double()

    with seeded(device):
        return torch.stack([of(row) for row in range(rows)])
