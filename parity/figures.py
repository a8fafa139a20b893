"""The distance of what the ranks hold from the truth, and how large it may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.training import Outcome, Pieces, Truth


@dataclass(frozen=True)
class Bars:
    """grads: ||difference|| / ||gradient|| of the whole model; largest: max |difference| of any tensor / max |gradient|
    of the model; losses, norms: relative, the largest of all steps."""

    grads: float
    largest: float
    losses: float
    norms: float


BARS = {"float32": Bars(1e-6, 1e-5, 1e-5, 1e-5), "float64": Bars(1e-12, 1e-12, 1e-10, 1e-10)}


@dataclass(frozen=True)
class Figures:
    """See Bars. weights: as grads, of the weights after the last step. wrong: what is wrong beyond numbers."""

    grads: float
    largest: float
    losses: float
    norms: float
    weights: float
    wrong: str = ""

    def missed(self, bars: Bars) -> list[str]:
        """What is not as it has to be; a figure that is not a number is not."""
        names = ("grads", "largest", "losses", "norms")
        missed = [n for n in names if not getattr(self, n) <= getattr(bars, n)]
        return [*missed, *([self.wrong] if self.wrong else [])]


def compared(ranks: Sequence[Outcome], truth: Truth) -> Figures:
    """Of every element the rank that is farthest off counts; an element that no rank holds is wrong."""
    first, wrong = ranks[0], []
    if any((rank.losses, rank.norms) != (first.losses, first.norms) for rank in ranks):
        wrong.append("histories differ between ranks")
    if len(first.losses) != len(truth.losses):
        wrong.append(f"{len(first.losses)} steps instead of {len(truth.losses)}")
    grads, missing = _differences([rank.grads for rank in ranks], truth.grads)
    weights, absent = _differences([rank.weights for rank in ranks], truth.weights)
    wrong += [f"no rank holds all of {name}" for name in sorted({*missing, *absent})]
    return Figures(
        grads=_norm(grads) / _norm(truth.grads),
        largest=_largest(grads) / _largest(truth.grads),
        losses=_relative(first.losses, truth.losses),
        norms=_relative(first.norms, truth.norms),
        weights=_norm(weights) / _norm(truth.weights),
        wrong="; ".join(wrong),
    )


def far(one: Truth, other: Truth) -> Figures:
    """The same of two runs in one process."""
    grads = {name: (one.grads[name] - grad).double() for name, grad in other.grads.items()}
    weights = {name: (one.weights[name] - weight).double() for name, weight in other.weights.items()}
    return Figures(
        grads=_norm(grads) / _norm(other.grads),
        largest=_largest(grads) / _largest(other.grads),
        losses=_relative(one.losses, other.losses),
        norms=_relative(one.norms, other.norms),
        weights=_norm(weights) / _norm(other.weights),
    )


def _differences(ranks: Sequence[Pieces], whole: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """(name -> largest |difference| of each element, names of which something is nowhere)."""
    found = {name: torch.full(tensor.shape, -1.0, dtype=torch.float64) for name, tensor in whole.items()}
    for pieces in ranks:
        for name, (tensor, layout) in pieces.items():
            if name not in whole:
                # One process never had this gradient: here it is zeros.
                found[name] = torch.maximum(found.get(name, torch.zeros(layout.shape)), tensor.abs().max().double())
                continue
            for local, place in layout.pieces:
                off = (tensor[local.slices].double() - whole[name][place.slices].double()).abs()
                target = found[name][place.slices]
                # A NaN is the farthest there is, and maximum() hands it on.
                target.copy_(torch.maximum(target, off))
    return found, [name for name, tensor in found.items() if bool((tensor < 0).any())]


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([t.double().norm() for t in tensors.values()]).norm())


def _largest(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([t.double().abs().max() for t in tensors.values()]).max())


def _relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max((abs(a - b) / abs(b) if a == a else float("nan") for a, b in zip(ours, theirs, strict=False)), default=0)
