"""Draw SVGs in one style that is legible on light and dark pages, and on a phone.

A drawing brings its own background, so it stays legible when a page and the reader's system disagree about dark mode.
Most are 420 units wide. The smallest letters are 13 units high: on a phone they are about 11 pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

WIDTH = 420
STYLE = """
svg { --paper: #fbfaf7; --ink: #20262d; --soft: #56616c; --line: #8a949e;
  --plain: #eceff2; --dp: #dbe2f6; --zero: #d3efdf; --tp: #fbe0c8; --pp: #e8daf3; --cp: #f6d6d6;
  --dp-line: #5a6fb8; --zero-line: #2a935f; --tp-line: #d25d0a; --pp-line: #78519d; --cp-line: #b03a3a; }
@media (prefers-color-scheme: dark) { svg { --paper: #1d2126; --ink: #eceff2; --soft: #b4bec8; --line: #7d8893;
  --plain: #343b43; --dp: #35447a; --zero: #1c5b3b; --tp: #7d3c0c; --pp: #54387a; --cp: #702a2a;
  --dp-line: #93a5e6; --zero-line: #5cc490; --tp-line: #f0955a; --pp-line: #b795dd; --cp-line: #e58a8a; } }
text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: var(--ink); }
.small { font-size: 13px; } .soft { fill: var(--soft); } .bold { font-weight: 600; } .big { font-size: 17px; }
.code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; }
.paper { fill: var(--paper); } .stroke { fill: none; stroke: var(--line); stroke-width: 1.5; }
.tip { fill: var(--line); }
.plain { fill: var(--plain); stroke: var(--line); } .dp { fill: var(--dp); stroke: var(--dp-line); }
.zero { fill: var(--zero); stroke: var(--zero-line); } .tp { fill: var(--tp); stroke: var(--tp-line); }
.pp { fill: var(--pp); stroke: var(--pp-line); } .cp { fill: var(--cp); stroke: var(--cp-line); }
.gone { fill: none; stroke: var(--line); stroke-dasharray: 4 3; }
""".strip()


@dataclass
class Drawing:
    """An SVG that grows by shapes. title: what a screen reader says; height: in units of the drawing.

    Positions are units from the upper left corner. kind of a shape: plain, dp, zero, tp, pp, cp, or gone.
    """

    title: str
    height: int
    style: str = ""
    width: int = WIDTH
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, kind: str = "plain", label: str = "",
            words: str = "") -> None:  # fmt: skip
        """Draw a box; label: text in its middle, in the classes of `words`."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>')
        if label:
            self.text(x + width / 2, y + height / 2 + 5, label, words)

    def text(self, x: float, y: float, text: str, words: str = "", anchor: str = "middle") -> None:
        """Write text whose baseline is at y. words: some of small, soft, bold, big and code."""
        kind = f' class="{words}"' if words else ""
        self.parts.append(f'<text{kind} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text, quote=False)}</text>')

    def left(self, x: float, y: float, text: str, words: str = "") -> None:
        """Write text that begins at x."""
        self.text(x, y, text, words, "start")

    def line(self, *points: tuple[float, float], dashed: bool = False, kind: str = "stroke") -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points).replace(".0", "")
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<polyline class="{kind}" points="{path}"{dash}/>')

    def begin(self, kind: str) -> None:
        """Begin a group of parts with a class of its own."""
        self.parts.append(f'<g class="{kind}">')

    def end(self) -> None:
        """End the group."""
        self.parts.append("</g>")

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line through points with a tip at the last one. The last part is horizontal or vertical."""
        (x0, y0), (x, y) = points[-2:]
        length = max(abs(x - x0), abs(y - y0))
        dx, dy = (x - x0) / length, (y - y0) / length
        self.line(*points[:-1], (x - 6 * dx, y - 6 * dy))
        tip = [(x, y), (x - 8 * dx - 4 * dy, y - 8 * dy + 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy - 4 * dx)]
        self.parts.append(f'<polygon class="tip" points="{" ".join(f"{a:g},{b:g}" for a, b in tip)}"/>')

    def area(self, kind: str, *points: tuple[float, float]) -> None:
        """Draw a filled polygon."""
        self.parts.append(f'<polygon class="{kind}" points="{" ".join(f"{x:g},{y:g}" for x, y in points)}"/>')

    def svg(self) -> str:
        """Return the file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width * 4 // 3}" height="{self.height * 4 // 3}" role="img">'
        )
        paper = f'<rect class="paper" width="{self.width}" height="{self.height}" rx="10"/>'
        style = f"<style>\n{STYLE}\n{self.style}</style>"
        return "\n".join([head, f"<title>{escape(self.title)}</title>", style, paper, *self.parts, "</svg>\n"])
