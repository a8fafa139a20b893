"""Proves that a loss function is a mean over rows, or gives sums over them, on outputs of a model and without it.

In float64 where the loss allows it, value and gradient, so that nothing of what a model's kernels round is in the
numbers, and a term of small weight shows. The outputs of two rows stand for those of all: what differs is the target.

The loss of each row of a batch by itself, beside that of all: how difficult each sample is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import isclose, isfinite
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nbkit.rank.data.batch import pair, pick, take
from nbkit.rank.loss.counted_targets import CountedTargets
from nbkit.rank.loss.output_tensors import leaves, with_leaves
from nbkit.rank.loss.row_weights import Loss, weigh
from nbkit.rank.parallel.proof.observe import gradients
from nbkit.rank.rng.seeding import seeded

_GRADIENT, _VALUE = 2e-5, 1e-5  # what the arithmetic of float32 may change, relative to the largest
_ELEMENTS = 1 << 23  # of all outputs together


@dataclass(frozen=True)
class Defect:
    """kind: "sum" where the loss grows with the number of rows; "weights" where a row's weight depends on the others;
    "rows" where rows are compared; "pairs" where (sum, weight) do not add up. numbers: that show it."""

    kind: str
    numbers: str


@dataclass(frozen=True)
class LossAlone:
    """defect: None where none was found. used: names of the tensors of the output that the loss depends on."""

    defect: Defect | None
    used: frozenset[str]


@dataclass(frozen=True)
class _Run:
    """value: the loss times its rows, or the sum of (sum, weight). grads: name -> gradient of it."""

    value: float
    weight: float
    summed: bool
    grads: dict[str, Tensor]


class coarsest(TorchFunctionMode):
    """Sees the coarsest floating dtype that is computed with: `.eps` is 2^-23 for float32, 2^-7 for bfloat16."""

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
    """Return what of `loss` depends on which rows come together; None where that cannot be told.

    counting: (part of a batch, its rows, the batch and its rows) -> what notes the targets that count; None where rows
    weigh.

    output: of the model, for a few rows. lengths: name -> how many entries along dim 0 a row has, of those of its
    tensors that hold rows. batch: of `rows` rows.
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
        """Of the rows at `places`, a part of those at `among` if it is one."""
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
        """Of each row, or of each half where the loss takes no single rows; nothing where it takes neither."""
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
    """The loss of all rows beside that of each part, and what the parts give together; (loss sum, weight) of each."""
    alone = ", ".join(f"{value / (each or 1):.6g}" for value, each in parts[:4]) + ", ..." * (len(parts) > 4)
    apart = sum(value for value, _ in parts) / (sum(each for _, each in parts) or 1)
    return f"{together / (weight or 1):.6g} together; each alone: {alone}, together {apart:.6g}"


@torch.no_grad()
def row_losses(loss: Loss, output: Any, target: Any, rows: int, device: torch.device) -> Tensor:
    """Shape (rows,), on the device and not waited for: what `loss` gives for each row of `output` and `target`.

    NaN for a row that weighs nothing. A loss that the model computed for all rows is that of each. What the loss draws
    is drawn again afterwards. Collective where the loss is.
    """

    def of(row: int) -> Tensor:
        def cut(_: str, part: Tensor) -> Tensor:
            return part[row : row + 1] if part.shape[:1] == (rows,) else part

        weighed = weigh(loss(with_leaves(output, cut), take(target, row, row + 1, rows=rows)), 1)
        return (weighed.value / weighed.weight if weighed.summed else weighed.value).double()

    with seeded(device):
        return torch.stack([of(row) for row in range(rows)])
