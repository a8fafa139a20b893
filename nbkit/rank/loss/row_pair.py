"""Compares some rows together with each alone: the model must give the same for them, and the loss add up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import isclose, isfinite, sqrt

import torch
from torch import Tensor

from nbkit.rank.loss.mean_over_rows import shown
from nbkit.rank.loss.row_trial import Auxiliary, Measured
from nbkit.rank.parallel.proof.compare import gap


class RowPair:
    """numbers: of the rows; whole: all together; parts: the first half and the second. eps: of the coarsest dtype.

    drew: random numbers that are not keyed. lengths: name -> entries along dim 0 of each row, of the tensors of the
    output that hold rows.
    """

    def __init__(self, numbers: list[int], whole: Measured, parts: Sequence[Measured], drew: bool) -> None:
        self.numbers, self.whole, self.drew = numbers, whole, drew
        # A tensor with one number for each row looks like a scalar where there is one row.
        self.parts = [replace(part, auxiliary=_of_all(part, whole)) for part in parts]
        self.eps = eps = whole.eps
        self.lengths: dict[str, int] = {}
        self._joined: dict[str, Tensor] = {}
        for name, tensor in whole.tensors.items():
            one, other = (part.tensors.get(name) for part in parts)
            if one is None or other is None or not one.ndim or one.shape != other.shape:
                continue
            joined = torch.cat([one, other])
            # Of what is no row, but several, the order is not known: it holds rows if it looks so.
            if joined.shape == tensor.shape and not len(tensor) % whole.rows:
                if len(tensor) == whole.rows or not far(tensor, joined, eps):
                    self.lengths[name], self._joined[name] = len(tensor) // whole.rows, joined

    def mixed(self, used: Collection[str]) -> str:
        """The numbers that show that what the model gives for rows depends on others, in the tensors `used`; or ""."""
        for name in self.lengths.keys() & used:
            tensor, joined = self.whole.tensors[name], self._joined[name]
            if tensor.is_floating_point() and far(tensor, joined, self.eps):
                away = float((tensor - joined).abs().max())
                return (
                    f"output{f' {name!r}' * bool(name)} differs by {away:.3g}, largest {float(tensor.abs().max()):.3g}"
                )
        return ""

    def differs(self, noise: Callable[[RowPair], float]) -> str:
        """The numbers that show that the loss, less its auxiliary terms, does not add up; "" where it does.

        noise: by how much gradients of this model differ that do add up.
        """
        (value, grads), *parts = [measured.without_auxiliary() for measured in (self.whole, *self.parts)]
        numbers = f"{len(self.numbers)} rows " + shown(
            value, self.whole.weight, [(part, m.weight) for (part, _), m in zip(parts, self.parts, strict=True)]
        )
        summed = sum(part for part, _ in parts)
        weight = sum(m.weight for m in self.parts)
        if not isfinite(summed) or not isclose(self.whole.weight, weight, rel_tol=max(1e-6, 8 * self.eps)):
            return numbers
        if abs(value - summed) > self._tolerance(max(abs(value), abs(summed))):
            return numbers
        worst = apart(grads, [each for _, each in parts])
        if worst > max(1e-4 if self.eps > 1e-12 else 1e-8, 16 * self.eps) and worst > 10 * noise(self):
            return f"{numbers}; their gradients differ by {100 * worst:.2g} %"
        return ""

    def unbalanced(self) -> str:
        """The auxiliary terms of the loss that are not means over rows, with their numbers; "" where all are."""
        found = []
        for name, (term, slope, _) in self.whole.auxiliary.items():
            alone = [part.auxiliary[name][0] for part in self.parts if name in part.auxiliary]
            mean = sum(alone) / max(len(alone), 1)
            if slope and abs(term - mean) > 1e-5 * max(abs(term), abs(mean)):
                found.append(f"{name!r} {term:.6g}, mean of the parts {mean:.6g}")
        return "; ".join(found)

    def _tolerance(self, largest: float) -> float:
        """What noise, as the model's outputs show it, may change a summed loss of this size."""
        noise, felt = 4 * self.eps, 0.0
        for name, joined in self._joined.items():
            tensor = self.whole.tensors[name]
            if tensor.is_floating_point() and tensor.numel():
                away = float((tensor.double() - joined.double()).abs().max())
                own = max(4 * self.eps * float(tensor.abs().max()), away)
                noise, felt = max(noise, own), felt + own * self.whole.slopes.get(name, 0.0)
        # Where the loss does not come from what is given out, it is taken for a smooth function with its least at 0.
        rows, mean = self.whole.weight or 1.0, largest / (self.whole.weight or 1.0)
        bound = rows * (2 * noise + 8 * sqrt(mean) * noise + 8 * noise**2 + 16 * self.eps * mean)
        return max(2 * felt, min(bound, max(2e-3, 2 * self.eps) * largest + 1e-6 * rows))


def _of_all(part: Measured, whole: Measured) -> Auxiliary:
    """Return the auxiliary terms of `part` that are such in `whole` too."""
    return {name: term for name, term in part.auxiliary.items() if name in whole.auxiliary}


def far(one: Tensor, other: Tensor, eps: float) -> bool:
    """Whether what should be the same is not: of other shapes, or more apart than arithmetic makes it."""
    if one.is_floating_point():
        one, other = one.double(), other.double()
    return gap(one, other) > max(1e-3, 16 * eps)


def apart(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> float:
    """The largest relative difference of a parameter's gradient from the sum of the parts'."""
    if not whole or any(len(part) != len(whole) for part in parts):
        return 0.0
    summed = [torch.stack([_doubled(grad) for grad in grads]).sum(0) for grads in zip(*parts, strict=True)]
    norms = [max(float(_doubled(grad).norm()), float(other.norm())) for grad, other in zip(whole, summed, strict=True)]
    # Gradients that are zero but for noise, as that of a key's bias, are measured by the others.
    floor = 1e-3 * sqrt(sum(norm**2 for norm in norms))
    away = [float((_doubled(grad) - other).norm()) for grad, other in zip(whole, summed, strict=True)]
    found = max(
        (far / max(norm, floor) for far, norm in zip(away, norms, strict=True) if max(norm, floor)), default=0.0
    )
    return found if isfinite(found) else 0.0


def _doubled(tensor: Tensor) -> Tensor:
    """In float64; a complex one as its two parts."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()
