"""Compares two tensors: they are the same but for rounding where they differ by at most a tolerance x the largest one.

What the tolerance is depends on what lies between the two: each proof says its own, with the reason.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gap(whole: Tensor, other: Tensor, scale: float = 0.0) -> float:
    """The largest difference, relative to the largest value (or to `scale`, if that is more).

    inf for other shapes, for NaN, and for what is no number and differs at all.
    """
    if whole.shape != other.shape:
        return float("inf")
    if not whole.numel():
        return 0.0
    if not (whole.is_floating_point() or whole.is_complex()):
        return 0.0 if torch.equal(whole, other) else float("inf")
    a, b = whole.detach(), other.detach()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    apart = (a - b).abs().masked_fill(same, 0).max()
    largest = a.abs().masked_fill(~a.isfinite(), 0).max()
    found = float(apart) / max(float(largest), scale, 1e-30)
    return found if found == found else float("inf")


def unlike(x: Tensor, expected: Tensor, *, by_row: bool = False, least: float = 0.0) -> str:
    """What tells `x` from `expected`; "" when they are the same but for rounding. least: a scale of what is rounded."""
    if x.shape != expected.shape:
        return f"shape {tuple(x.shape)} instead of {tuple(expected.shape)}"
    if not expected.is_floating_point():
        return "" if torch.equal(x, expected) else "other values"
    x, expected = x.detach(), expected.detach()
    tolerance = (1e-3 if by_row else 1e-5) if expected.dtype == torch.float64 else 1e-3
    tolerance = 3e-2 if expected.dtype.itemsize < 4 else tolerance
    if not by_row and expected.numel():
        most, off = torch.stack([expected.abs().max(), (x - expected).abs().max()]).tolist()
        if off <= tolerance * max(most, least) < float("inf"):
            return ""
    known = expected.isfinite()
    if not torch.equal(known, x.isfinite()) or not expected.numel():
        return "other values" if expected.numel() else ""
    size = expected.abs().where(known, 0)
    scale = size.amax(-1, keepdim=True) if by_row and size.ndim else size.max()
    off = (x - expected).abs().where(known, 0)
    bad = off > tolerance * scale.clamp(min=least)
    return f"{float(off.max()):.3g} off, of {float(size.max()):.3g}" if bool(bad.any()) else ""
