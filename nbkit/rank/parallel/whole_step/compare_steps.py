"""What differs between a step of one process and that of a rank, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf, isfinite

import torch
from torch import Tensor

from nbkit.rank.parallel.whole_step.steps import Stepped
from nbkit.tensor_layout import Layout

_LEAST = 1e-3  # of the norm of all gradients: what is smaller than this is measured by it


def differences(whole: Stepped, rank: Stepped, tolerance: float) -> Iterator[str]:
    """In loss, norm and gradients.

    tolerance: of a number, beside what it is of; sums of many are allowed more.
    """
    # What is not finite is not within any bound.
    if not abs(whole.loss - rank.loss) <= tolerance * max(abs(whole.loss), 1e-3):
        yield f"loss {rank.loss:.6g} instead of {whole.loss:.6g}"
    if not abs(whole.norm - rank.norm) <= 8 * tolerance * whole.norm:
        yield f"norm of the gradients {rank.norm:.6g} instead of {whole.norm:.6g}"
    for name, (grad, layout) in rank.gradients.items():
        expected = whole.gradients[name][0]
        off = _off(grad, expected, layout)
        clipped = whole.norm / 2
        if off > 64 * tolerance * _LEAST * clipped and off > 64 * tolerance * _scale(expected, clipped):
            yield f"gradient of {name!r} {off:.3g} off, of {_scale(expected, 0):.3g}"


def updates_off(
    whole: Stepped, ranks: Sequence[Stepped], before: Mapping[str, Tensor], tolerance: float
) -> Iterator[str]:
    """In the weights after the optimizer's step. before: the weights, by name."""
    sizes = {name: (_largest(true - before[name]), _largest(before[name])) for name, (true, _) in whole.weights.items()}
    for name, (held, layout) in ((name, part) for rank in ranks for name, part in rank.weights.items()):
        (true, _), (grad, _), (moved, size) = whole.weights[name], whole.gradients[name], sizes[name]
        # Weights are rounded, and of a gradient that is next to nothing an optimizer may take the sign.
        bound = 64 * tolerance * moved + 8 * torch.finfo(true.dtype).eps * size if moved else 0.0
        if _off(held, true, layout) > bound:
            sure = None if grad is None else _dense(grad).abs() > 64 * tolerance * _scale(grad, whole.norm / 2)
            if (off := _off(held, true, layout, sure)) > bound:
                yield f"update of {name!r} {off:.3g} off, of {moved:.3g}"


def buffers_off(whole: Stepped, ranks: Sequence[Stepped], tolerance: float) -> Iterator[str]:
    """In the buffers that the forward passes changed: a statistic of a micro-batch, say, is not that of the batch.

    What a rank holds in another shape is a part of it, and shows in the gradients alone.
    """
    for name, held in ((name, buffer) for rank in ranks for name, buffer in rank.buffers.items()):
        true = whole.buffers.get(name)
        if true is None or true.shape != held.shape:
            continue
        # Masks hold what is not finite.
        held, true = (x if x.is_floating_point() else x.to(torch.float64) for x in (held, true))
        away = (held - true).masked_fill((held == true) | (held.isnan() & true.isnan()), 0)
        if (off := _largest(away)) > 64 * tolerance * _largest(true.nan_to_num(0, 0, 0)):
            yield f"buffer {name!r} {off:.3g} off, of {_largest(true):.3g}"


def _scale(expected: Tensor | None, norm: float) -> float:
    return max(_largest(_dense(expected)) if expected is not None else 0.0, _LEAST * norm)


def _largest(x: Tensor) -> float:
    """inf where one is no number."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x.abs() if x.is_complex() else x)
    found = max(abs(float(low)), abs(float(high)))
    return found if isfinite(found) and isfinite(float(low)) else inf


def _off(own: Tensor | None, true: Tensor | None, layout: Layout, sure: Tensor | None = None) -> float:
    """The largest difference of what a rank holds from the same part of the whole; none counts as zeros.

    sure: the elements of the whole that count.
    """
    if own is None and true is None:
        return 0.0
    largest, nothing = 0.0, torch.zeros(())
    for here, there in layout.pieces:
        away = (_dense(own)[here.slices] if own is not None else nothing) - (
            _dense(true)[there.slices] if true is not None else nothing
        )
        largest = max(largest, _largest(away if sure is None else away.where(sure[there.slices], nothing.to(away))))
    return largest


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor
