"""Numbers as the line of a training and the views of a run show them: "12,300", "2.314"."""

from __future__ import annotations

import math


def figure(value: float) -> str:
    """A number for people; "" for what is none."""
    if not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
