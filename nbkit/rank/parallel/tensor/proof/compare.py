"""Whether two tensors are the same but for rounding."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["unlike"]


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
