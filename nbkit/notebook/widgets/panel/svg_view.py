"""The strategy panel as one SVG picture, for a notebook that is read without a kernel."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from nbkit.figures import seconds, size
from nbkit.notebook.widgets.javascript import colours
from nbkit.notebook.widgets.svg import ALARM, FAINT, INK, RULE, box_at, line_at, picture_of, round_values, text_at

FAMILIES = colours("FAMILIES")
_WIDTH, _MARGIN, _LINE = 960, 16, 18
_CHARACTERS = 140  # that fit in a line of 12 px text
_LEFT, _RIGHT, _HIGH = 70, 470, 230  # of the plot
_GRID, _CELL_AT_MOST, _BLOCKS_AT_MOST = 510, 34, 16
_ROWS_AT_MOST, _NAME_AT_MOST = 16, 40
_COLUMNS = (
    ("memory", "memory", 385),
    ("peak", "peak", 455),
    ("step", "step", 525),
    ("interval", "interval", 615),
    ("sends", "sends", 695),
    ("moved", "moves", 765),
    ("pause", "pause", 835),
    ("payback", "pays back", 944),
)
"""Key of a row, title, and the x coordinate of the column's right edge."""


def svg_of(headline: str, job: Mapping[str, Any], outcome: str) -> str:
    """Return a picture of a `job_view`. outcome: the result of the last control, "" for none."""
    now = next((row for row in job["rows"] if row["current"]), None)
    told = [job["arithmetic"], now["cut"] if now else "", f"cluster {job['cluster']}"]
    drawn = [
        text_at(_MARGIN, 26, job["strategy"], size=15, bold=True),
        text_at(_WIDTH - _MARGIN, 26, headline, bold=True, anchor="end"),
        text_at(_MARGIN, 46, " · ".join(words for words in told if words), colour=FAINT),
    ]
    y = 68.0
    if job["recommended"]:
        label = next(row["label"] for row in job["rows"] if row["recommended"])
        for words in textwrap.wrap(f"Recommended: {label}, {job['because']}.", _CHARACTERS - 10):
            drawn.append(text_at(_MARGIN, y, words, bold=True))
            y += _LINE
    held, below = _held(job, y + 6)
    drawn += [*_plot(job, y + 6), *held]
    y = max(y + 6 + _HIGH + 62, below + 10)
    table, y = _table(job["rows"], y)
    drawn += table
    facts = [f"a rank has room for {job['limit']}"] * bool(job["limit"]) + [f"link: {job['link']}"] * bool(job["link"])
    for words in ("; ".join(["≈ predicted, the others measured", *facts]), f"last: {outcome}" if outcome else ""):
        for line in textwrap.wrap(words, _CHARACTERS):
            drawn.append(text_at(_MARGIN, y, line, colour=FAINT))
            y += _LINE
    return picture_of(drawn, _WIDTH, y, f"strategies of cluster {job['cluster']}, {job['strategy']} now")


def _plot(job: Mapping[str, Any], top: float) -> list[str]:
    """Return a plot of memory and step time. Filled dots are measured, and the current strategy has a ring."""
    drawn = [text_at(_MARGIN, top, "memory and time of each strategy: lower left is better", colour=FAINT)]
    rows = [row for row in job["rows"] if row["ok"] and row["values"]["peak"] and row["values"]["step"]]
    top, bottom = top + 20, top + _HIGH
    if not rows:
        return [*drawn, text_at(_MARGIN, top + 10, "No step time is known yet.", colour=FAINT)]
    most_bytes, most_seconds = (1.1 * max(float(row["values"][key]) for row in rows) for key in ("peak", "step"))

    def across(value: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * value / most_bytes

    def down(value: float) -> float:
        return bottom - (bottom - top) * min(value / most_seconds, 1.0)

    for value in round_values(0.0, most_bytes, 3):
        drawn += [line_at(across(value), top, across(value), bottom, RULE)]
        drawn += [text_at(across(value), bottom + 16, size(value), colour=FAINT, anchor="middle")]
    for value in round_values(0.0, most_seconds, 3):
        drawn += [line_at(_LEFT, down(value), _RIGHT, down(value), RULE)]
        drawn += [text_at(_LEFT - 8, down(value) + 4, seconds(value), colour=FAINT, anchor="end")]
    drawn += [text_at(_RIGHT, bottom + 34, "peak memory of the fullest rank", colour=FAINT, anchor="end")]
    drawn += [text_at(_MARGIN, bottom + 34, "● measured  ○ predicted  ◎ now", colour=FAINT)]
    for row in sorted(rows, key=lambda row: (row["current"], row["recommended"])):
        x, y, colour = across(row["values"]["peak"]), down(row["values"]["step"]), FAMILIES[row["family"]]
        fill = "#ffffff" if row["step"].startswith("≈") else colour
        drawn.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='5' fill='{fill}' stroke='{colour}' stroke-width='2'/>")
        if row["current"]:
            drawn.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='8.5' fill='none' stroke='{INK}' stroke-width='1.5'/>")
        if row["current"] or row["recommended"]:
            drawn.append(text_at(x - 12, y - 8, row["label"], bold=True, anchor="end" if x > 200 else "start"))
    return drawn


def _held(job: Mapping[str, Any], top: float) -> tuple[list[str], float]:
    """Return a grid of how much of each block each rank holds, and the y coordinate below it."""
    drawn = [text_at(_GRID, top, "who holds what: ranks across, layers down", colour=FAINT)]
    blocks, ranks, held, colour = job["blocks"], job["ranks"], job["held"], FAMILIES[job["family"]]
    names = max((len(block["name"]) for block in blocks), default=0)
    left = _GRID + 7 * min(names, 14) + 8
    cell = min(_CELL_AT_MOST, (_WIDTH - _MARGIN - left) / max(ranks, 1))
    y = top + 20
    for rank in range(0, ranks, max(1, round(18 / cell))):
        drawn.append(text_at(left + cell * (rank + 0.5), y, str(rank), size=11, colour=FAINT, anchor="middle"))
    y += 6
    for place, block in enumerate(blocks[:_BLOCKS_AT_MOST]):
        drawn.append(text_at(left - 8, y + 11, block["name"][:14], size=11, colour=FAINT, anchor="end"))
        for rank in range(ranks):
            x, part = left + cell * rank, held["rows"][held["ranks"][rank]][place]
            drawn.append(box_at(x, y, cell - 1, 13, "#eceef1"))
            drawn.append(box_at(x, y, (cell - 1) * part, 13, colour) if part > 0 else "")
        y += 15
    if more := len(blocks) - _BLOCKS_AT_MOST:
        drawn += [text_at(left, y + 11, f"and {more} more layers", size=11, colour=FAINT)] * (more > 0)
    return [*drawn, text_at(_GRID, y + 26, job["legend"][job["family"]], size=11, colour=FAINT)], y + 26


def _table(rows: Sequence[Mapping[str, Any]], top: float) -> tuple[list[str], float]:
    """Return the rows that fit, and the y coordinate below them."""
    fit = [row for row in rows if row["ok"]]
    first = [row for row in fit if row["current"] or row["recommended"] or row["values"]["step"]]
    shown = [*first, *(row for row in fit if row not in first)][:_ROWS_AT_MOST]
    drawn = [text_at(_MARGIN, top, "strategy", colour=FAINT)]
    drawn += [text_at(end, top, name, colour=FAINT, anchor="end") for _, name, end in _COLUMNS]
    y = top + 6
    for row in (row for row in fit if row in shown):
        drawn.append(line_at(_MARGIN, y, _WIDTH - _MARGIN, y, RULE))
        y += _LINE
        drawn.append(box_at(_MARGIN, y - 13, 10, 10, FAMILIES[row["family"]]))
        mark = " · now" * row["current"] + " · recommended" * row["recommended"]
        name = textwrap.shorten(row["label"] + mark, _NAME_AT_MOST, placeholder="…")
        drawn.append(text_at(_MARGIN + 16, y - 4, name, bold=bool(mark)))
        for key, _, end in _COLUMNS:
            if row[key] and row[key] != "unknown":
                colour = ALARM if key == "memory" and row["tight"] else INK
                drawn.append(text_at(end, y - 4, row[key], colour=colour, anchor="end"))
    others = [
        (len(fit) - len(shown), "more fit"),
        (sum(row["untried"] for row in rows), "are not examined yet"),
        (sum(not row["ok"] and not row["untried"] for row in rows), "cannot be used here"),
    ]
    y += _LINE
    if words := ", ".join(f"{count} {what}" for count, what in others if count):
        drawn.append(text_at(_MARGIN, y, words, colour=FAINT))
        y += _LINE
    return drawn, y
