"""Functions that draw SVG, for pictures in notebooks and pages that are read without a kernel."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from html import escape

INK, FAINT, RULE, ALARM = "#23272e", "#68717d", "#dfe3e8", "#c3393f"


def picture_of(parts: Iterable[str], width: float, height: float, words: str) -> str:
    """Return the parts as one picture. words: describe it for readers who cannot see it.

    The picture has a light background of its own, because an image cannot know the theme of its page.
    """
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {width:.0f} {height:.0f}' role='img' aria-label='{escape(words, quote=True)}' "
        f"font-family='sans-serif'><rect width='100%' height='100%' rx='6' fill='#ffffff' stroke='{RULE}'/>"
        f"{''.join(parts)}</svg>"
    )


def image(svg: str, words: str, style: str = "max-width:100%") -> str:
    """Return the picture as an HTML <img>.

    In an untrusted notebook JupyterLab removes SVG elements from HTML, and does not show image/svg+xml. It keeps <img>,
    as GitHub, nbviewer and nbconvert do.
    """
    data = base64.b64encode(svg.encode()).decode()
    return f"<img src='data:image/svg+xml;base64,{data}' style='{style}' alt='{escape(words, quote=True)}'>"


def round_values(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round values between two values."""
    raw = (high - low) / count
    ten = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    apart = next(ten * times for times in (1, 2, 2.5, 5, 10) if ten * times >= raw * 0.999)
    start = math.ceil(low / apart - 1e-9)
    return [apart * i for i in range(start, math.floor(high / apart + 1e-9) + 1)]


def text_at(
    x: float, y: float, words: str, *, size: int = 12, colour: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    weight = " font-weight='600'" if bold else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{colour}' text-anchor='{anchor}'{weight}>"
        f"{escape(words)}</text>"
    )


def box_at(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{max(width, 0):.1f}' height='{height:.1f}' fill='{colour}'/>"


def line_at(x0: float, y0: float, x1: float, y1: float, colour: str, dashes: str = "") -> str:
    dash = f" stroke-dasharray='{dashes}'" if dashes else ""
    return f"<line x1='{x0:.1f}' y1='{y0:.1f}' x2='{x1:.1f}' y2='{y1:.1f}' stroke='{colour}'{dash}/>"
