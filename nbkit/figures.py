"""Formats numbers such as "12,300" and "2.314" for the line of a training and the views of a run; names rate units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def figure(value: float) -> str:
    """Return a number for people; "" if it is NaN or infinite."""
    if not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def unit_of(numbers: Mapping[str, Any]) -> str:
    """Return the unit of a step's "tokens", from the step's numbers.

    It is "rows" if each sample has one token, as images and rows of a table do, and "tokens" otherwise.
    """
    return "rows" if "samples" in numbers and numbers["samples"] == numbers.get("tokens") else "tokens"
