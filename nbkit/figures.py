"""Numbers as the line of a training and the views of a run show them: "12,300", "2.314", and what a rate counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def figure(value: float) -> str:
    """Return a number for people; "" for what is none."""
    if not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def unit_of(numbers: Mapping[str, Any]) -> str:
    """Return what is counted as the "tokens" of a step by these of its numbers: "rows" where each of its samples has
    one, as images and rows of a table have, so that nothing in them is a sequence; else "tokens"."""
    return "rows" if "samples" in numbers and numbers["samples"] == numbers.get("tokens") else "tokens"
