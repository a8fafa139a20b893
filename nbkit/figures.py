"""Formats numbers for people: bytes, seconds, losses and rates. Every view of a quantity uses the same function.

board/plugin/static/paint.js has the same formats for what a page draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def figure(value: float) -> str:
    """Return a number for people; "" if it is NaN or infinite."""
    if not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def size(count: float | None) -> str:
    """Return bytes with three digits, such as "882 kB"; "unknown" for None."""
    if count is None:
        return "unknown"
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.3g} {units[0]}"


def seconds(value: float | None) -> str:
    """Return seconds with three digits, such as "176 ms"; "unknown" for None."""
    if value is None:
        return "unknown"
    if value >= 999.5:
        return f"{value:,.0f} s"
    for limit, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= limit * 0.9995:
            return f"{value / limit:.3g} {unit}"
    return f"{value * 1e6:.3g} µs" if value else "0 s"


def between(low: float, high: float) -> str:
    """Return an interval of seconds, such as "29–31 ms"."""
    return f"{low:.3g}–{high:.3g} s" if high >= 1 else f"{low * 1e3:.3g}–{high * 1e3:.3g} ms"


def unit_of(numbers: Mapping[str, Any]) -> str:
    """Return the unit of a step's "tokens", from the step's numbers.

    It is "rows" if each sample has one token, as images and rows of a table do, and "tokens" otherwise.
    """
    return "rows" if "samples" in numbers and numbers["samples"] == numbers.get("tokens") else "tokens"
