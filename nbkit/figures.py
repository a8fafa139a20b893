"""Formats numbers for people: bytes, seconds, losses and rates, and tables of them. All views use the same functions.

board/plugin/static/paint.js has the same formats for what a page draws.
"""

from __future__ import annotations

import html
import math
from collections.abc import Collection, Mapping, Sequence
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


def html_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    titles: Sequence[str] = (),
    *,
    figures: Collection[str] = (),
    bold: int | None = None,
) -> str:
    """Return a table as HTML, in the colours of the notebook's theme.

    titles: a tooltip for each row. figures: the columns that hold numbers; they are right-aligned and not wrapped.
    bold: the index of the row to show in bold; None for no row.
    """
    styles = ["text-align:right;white-space:nowrap" if column in figures else "text-align:left" for column in columns]

    def line(cells: Sequence[str], tag: str, more: str = "") -> str:
        pairs = zip(cells, styles, strict=False)  # a refused row is shorter: it has a reason instead of figures
        return "".join(f"<{tag} style='{style}{more}'>{html.escape(cell)}</{tag}>" for cell, style in pairs)

    body = ""
    for i, row in enumerate(rows):
        title = f" title='{html.escape(titles[i], quote=True)}'" if titles else ""
        body += f"<tr{title}>{line(row, 'td', ';font-weight:bold' if i == bold else '')}</tr>"
    return f"<table><thead><tr>{line(columns, 'th')}</tr></thead><tbody>{body}</tbody></table>"
