"""The dashboard as one SVG picture, for a notebook that is read without a kernel."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from nbkit.figures import figure, seconds
from nbkit.notebook.run.follower import PARTS
from nbkit.notebook.widgets.dashboard.text_view import PART_NAMES, bars_title, ranks_shown, steps_of
from nbkit.notebook.widgets.javascript import colours
from nbkit.notebook.widgets.svg import ALARM, FAINT, INK, RULE, box_at, line_at, picture_of, round_values, text_at
from nbkit.records.event_words import GREAT

COLOURS = colours("COLOURS")
_WIDTH, _LEFT, _RIGHT = 900, 70, 20
_CURVE_HEIGHT, _BAR = 170, 22
_POINTS = 600  # of the curve; more cannot be seen
_CHARACTERS = 125  # that fit in a line of 13 px text


def svg_of(snapshot: dict[str, Any]) -> str:
    """Return a picture of a RunReader.snapshot: headline, loss, a bar per rank; "" before the first finished step."""
    points = snapshot["points"]
    if not points:
        return ""
    state, step, last = snapshot["state"], snapshot["step"], points[-1]
    strategy = snapshot["strategies"][int(last[6])] or state["run"]
    figures = [
        steps_of(last[0], state),
        state.get("left", ""),
        f"loss {figure(last[4])}" if figure(last[4]) else "",
        f"{figure(state['rate'])} {state['unit']}/s" if state.get("rate") else "",
    ]
    before = int(points[0][0] - points[0][1])
    told = [f"{state['world']} ranks", state["stands"], state["run"]]
    told += [f"steps {before + 1:,} to {int(last[0]):,}"] * (before > 0)
    drawn = [
        text_at(16, 26, strategy, size=15, bold=True),
        text_at(_WIDTH - 16, 26, " · ".join(word for word in figures if word), bold=True, anchor="end"),
        text_at(16, 46, " · ".join(told), colour=FAINT),
    ]
    y = 70.0
    for line in textwrap.wrap(step.get("reading", ""), _CHARACTERS):
        drawn.append(text_at(16, y, line, size=13))
        y += 19
    drawn += _curve(points, snapshot["events"], y + 14)
    y += 14 + _CURVE_HEIGHT + 50
    if step.get("ranks"):
        bars, y = _ranks(step, y)
        drawn += bars
    return picture_of(drawn, _WIDTH, y, f"dashboard of {state['run']}")


def _curve(points: Sequence[Sequence[float]], events: Sequence[dict[str, Any]], top: float) -> list[str]:
    """Return the loss over the steps, with a mark at each event such as a switch or a failure."""
    thinned = points[:: max(1, -(-len(points) // _POINTS))]
    known = [(point[0], point[4]) for point in thinned if math.isfinite(point[4])]
    first, last = points[0][0] - points[0][1], points[-1][0]
    bottom = top + _CURVE_HEIGHT
    drawn = [text_at(16, top, "loss", bold=True)]
    if known:
        low, high = min(loss for _, loss in known), max(loss for _, loss in known)
        low, high = (low - 0.5, high + 0.5) if high - low < 1e-12 else (low, high)

        def across(step: float) -> float:
            return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - first) / max(last - first, 1)

        def down(loss: float) -> float:
            return bottom - (_CURVE_HEIGHT - 24) * (loss - low) / (high - low)

        for value in round_values(low, high):
            drawn += [line_at(_LEFT, down(value), _WIDTH - _RIGHT, down(value), RULE)]
            drawn += [text_at(_LEFT - 8, down(value) + 4, figure(value) or "0", colour=FAINT, anchor="end")]
        for value in round_values(first, last):
            drawn += [text_at(across(value), bottom + 20, f"{value:,.0f}", colour=FAINT, anchor="middle")]
        drawn += [text_at(16, bottom + 20, "step", bold=True)]
        drawn += _changes(events, across, top + 10, bottom)
        line = " ".join(f"{across(step):.1f},{down(loss):.1f}" for step, loss in known)
        drawn += [f"<polyline points='{line}' fill='none' stroke='{INK}' stroke-width='2'/>"]
    return drawn


def _changes(events: Iterable[dict[str, Any]], across: Any, top: float, bottom: float) -> list[str]:
    drawn, free = [], 0.0
    for event in (event for event in events if event["kind"] in GREAT):
        name = f"{event['sign']} {event['name']}"
        colour = ALARM if event["kind"] == "failure" else INK
        x = across(event["step"])
        drawn.append(line_at(x, top, x, bottom, colour, dashes="3 3"))
        wide = 7.0 * len(name)
        left = x + wide > _WIDTH
        start = x - wide if left else x
        if start >= free:
            side, anchor = (-3, "end") if left else (3, "start")
            drawn.append(text_at(x + side, top, name, colour=colour, bold=True, anchor=anchor))
            free = start + wide
    return drawn


def _ranks(step: dict[str, Any], top: float) -> tuple[list[str], float]:
    """Return the bars of the ranks, and the y coordinate below them."""
    late, rows = step.get("late"), ranks_shown(step)
    drawn = [text_at(16, top, bars_title(step), bold=True)]
    x = float(16)
    whole = sum(row[1] for row in step["ranks"]) or 1.0  # of all ranks, as in the sentence above
    for i, part in enumerate(PARTS):
        if not any(row[2 + i] for row in rows):
            continue
        name = f"{PART_NAMES.get(part, part)} {sum(row[2 + i] for row in step['ranks']) / whole:.0%}"
        drawn += [box_at(x, top + 11, 11, 11, COLOURS[part]), text_at(x + 16, top + 21, name)]
        x += 34 + 6.4 * len(name)
    scale = (_WIDTH - _LEFT - 110) / (max(row[1] for row in rows) or 1.0)
    y = top + 34
    for row in rows:
        slow = late is not None and late["rank"] == row[0]
        colour = ALARM if slow else FAINT
        drawn.append(text_at(_LEFT - 8, y + 14, f"rank {row[0]}", colour=colour, anchor="end", bold=slow))
        at = float(_LEFT)
        for part, value in zip(PARTS, row[2:], strict=True):
            drawn.append(box_at(at, y + 2, value * scale, _BAR - 6, COLOURS[part]) if value > 0 else "")
            at += value * scale
        drawn.append(text_at(at + 6, y + 14, seconds(row[1]) + (" ◀ late" if slow else ""), colour=colour))
        y += _BAR
    return drawn, y + 12
