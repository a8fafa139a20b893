"""The dashboard as text, for a terminal and for front ends without widgets."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbkit.figures import figure, seconds, size
from nbkit.notebook.run.follower import PARTS
from nbkit.records.event_words import GREAT

_SIGNS = "▁▂▃▄▅▆▇█"
_BARS = {"compute": "█", "exposed": "▓", "waiting": "▒", "bubble": "░", "data": "▚", "optimizer": "▞", "other": "·"}
PART_NAMES = {"exposed": "exposed communication", "waiting": "waiting for peers", "bubble": "pipeline bubble"}
_RANKS_AT_MOST = 8
_UNITS = {"mhz": "MHz", "celsius": "°C", "watts": "W"}


@dataclass(frozen=True)
class StyledText:
    """Text in one style: the name of a part of the step (for its color), "strong", "faint", or "" for none."""

    text: str
    style: str = ""


Line = tuple[StyledText, ...]


def plain(lines: Sequence[Line]) -> str:
    """Return the lines without styles."""
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines)


def lines_of(snapshot: dict[str, Any], width: int = 100) -> list[Line]:
    """Return the snapshot of a RunReader as lines of at most `width` characters, if possible."""
    state, points, step = snapshot["state"], snapshot["points"], snapshot["step"]
    if not points:
        return [(StyledText(f"{state['run'] or 'no run yet'}: no finished step", "faint"),)]
    last = points[-1]
    strategy, pace = snapshot["strategies"][int(last[6])], f"{state['unit']}/s"
    head = [
        steps_of(last[0], state),
        state.get("left", ""),
        _number("loss", last[4]),
        _number(pace, state.get("rate"), behind=True),
    ]
    lines: list[Line] = [
        (
            StyledText(strategy or state["run"], "strong"),
            StyledText(f"   {state['world']} ranks, {state['stands']}   {state['run']}", "faint"),
        ),
        (StyledText(" · ".join(word for word in head if word), "strong"),),
        *((StyledText(line),) for line in textwrap.wrap(step.get("reading", ""), width)),
        (StyledText("loss     ", "faint"), StyledText(_spark([point[4] for point in points], width - 10), "compute")),
        (StyledText(f"{pace:<9}", "faint"), StyledText(_spark([point[5] for point in points], width - 10), "data")),
    ]
    lines += _happened(snapshot["events"])
    if step.get("ranks"):
        lines += [(), *_ranks(step, width), (), *_axes(step), *_experts(step), *_memory(step), *_health(step)]
    return lines


def steps_of(step: float, state: dict[str, Any]) -> str:
    """Return the step in words. Steps of earlier trainings count, as in every chart."""
    return f"step {int(step):,}" + (f" of {state['goal']:,}" if state.get("goal") else "")


def _spark(values: Sequence[float | None], width: int) -> str:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return ""
    per = max(1, -(-len(known) // max(width, 10)))
    means = [sum(known[i : i + per]) / len(known[i : i + per]) for i in range(0, len(known), per)]
    low, high = min(means), max(means)
    return "".join(_SIGNS[round((value - low) / (high - low or 1) * (len(_SIGNS) - 1))] for value in means)


def _happened(events: Sequence[dict[str, Any]]) -> list[Line]:
    """Return the newest three events of each kind that the curve marks with a line."""
    newest = [event for kind in GREAT for event in [each for each in events if each["kind"] == kind][-3:]]
    styles = {"failure": "exposed", "switch": "faint"}
    return [(StyledText(f"{event['sign']} {event['text']}", styles.get(event["kind"], "strong")),) for event in newest]


def ranks_shown(step: dict[str, Any]) -> list[list[float]]:
    """Return the rows of the ranks to show. If there are too many: the late rank, then those that compute longest."""
    rows: list[list[float]] = step["ranks"]
    if len(rows) <= _RANKS_AT_MOST:
        return rows
    late = step.get("late")
    slow = [row for row in rows if late and row[0] == late["rank"]]
    rest = sorted((row for row in rows if row not in slow), key=lambda row: -row[2])
    return [*slow, *rest[: _RANKS_AT_MOST - len(slow)]]


def bars_title(step: dict[str, Any]) -> str:
    """Return the title of the bars: which steps and which ranks they show."""
    shown, there = len(ranks_shown(step)), len(step["ranks"])
    some = f" ({shown} of {there} ranks: the late one, then those that compute longest)" if shown < there else ""
    return f"{step['of']}, measured{some}"


def _ranks(step: dict[str, Any], width: int) -> list[Line]:
    rows, late = ranks_shown(step), step.get("late")
    title = f"{bars_title(step)}, one bar per rank"
    room = max(width - 22, 20)
    top = max(row[1] for row in rows) or 1.0
    lines: list[Line] = [(StyledText(title, "strong"),), (StyledText(" " * 9), *_legend(rows))]
    for row in rows:
        pieces, drawn, at = [], 0, 0.0
        for part, value in zip(PARTS, row[2:], strict=True):
            at += value
            upto = round(room * at / top)
            pieces.append(StyledText(_BARS[part] * (upto - drawn), part))
            drawn = max(drawn, upto)
        mark = "◀ late" if late and row[0] == late["rank"] else ""
        lines.append((StyledText(f"rank {row[0]:<4}"), *pieces, StyledText(f" {seconds(row[1])} {mark}")))
    return lines


def _legend(rows: Sequence[Sequence[float]]) -> list[StyledText]:
    total = sum(row[1] for row in rows) or 1.0
    shares = {part: sum(row[2 + i] for row in rows) / total for i, part in enumerate(PARTS)}
    return [
        StyledText(f"{_BARS[part]} {PART_NAMES.get(part, part)} {share:.0%}  ", part)
        for part, share in shares.items()
        if share >= 0.005
    ]


def _axes(step: dict[str, Any]) -> list[Line]:
    axes: dict[str, list[float | None]] = {}
    for row in step.get("table", ()):
        if row["op"] in ("batch", "recv"):
            continue
        own = axes.setdefault(row["axis"], [0.0, None])
        own[0] = (own[0] or 0.0) + row["sent"]
        if row["formula_sent"] is not None:
            own[1] = (own[1] or 0.0) + row["formula_sent"]
    busiest = f"; the busiest rank sends {size(step['sent'])}" if step.get("sent") else ""
    title = f"Sent in a step by all ranks, collectives as in rings{busiest}"
    lines: list[Line] = [(StyledText(title, "strong"),)] if axes else []
    for axis, (measured, formula) in sorted(axes.items(), key=lambda item: -(item[1][0] or 0)):
        said = f"   by formula {size(formula)}" if formula is not None else ""
        lines.append((StyledText(f"{axis:<9}measured {size(measured or 0)}"), StyledText(said, "faint")))
    return lines


def _experts(step: dict[str, Any]) -> list[Line]:
    """Return the number of tokens of each rank's experts in a step, the ranks with most tokens first."""
    ranks = (step.get("experts") or {}).get("ranks", ())
    rows = sorted(((sum(tokens for _, tokens in each), rank, len(each)) for rank, each in ranks), reverse=True)
    if not rows:
        return []
    mean = sum(tokens for tokens, *_ in rows) / len(rows) or 1.0
    lines: list[Line] = [(), (StyledText("Tokens of each rank's experts in a step, all layers", "strong"),)]
    for tokens, rank, experts in rows[:_RANKS_AT_MOST]:
        said = f"   {experts} experts, {tokens / mean:.0%} of the mean"
        lines.append((StyledText(f"rank {rank:<4}{figure(tokens)}"), StyledText(said, "faint")))
    return lines


def _memory(step: dict[str, Any]) -> list[Line]:
    rows = step.get("memory", ())
    if not rows:
        return []
    lines: list[Line] = [(), (StyledText(f"Memory, counted in step {rows[0]['step']}", "strong"),)]
    for row in rows[:_RANKS_AT_MOST]:
        peak = "not counted" if row["peak"] is None else size(row["peak"])
        said = f"   by formula {size(sum(row['formula']))} at rest" if row["formula"] else ""
        grown = f"   the process has grown by {size(row['growth'])}" if row["growth"] is not None else ""
        text = f"rank {row['rank']:<4}{size(row['at_rest'])} at rest, peak {peak}"
        lines.append((StyledText(text), StyledText(said + grown, "faint")))
    return lines


def _health(step: dict[str, Any]) -> list[Line]:
    seen = step.get("health")
    if not seen:
        return []
    lines: list[Line] = [(), (StyledText(f"Ranks and hosts, seen in step {seen['step']}", "strong"),)]
    for row in seen["ranks"]:
        words = [f"rank {row['rank']:<4}CPU {row['cpu']:.0%}", size(row["rss"])]
        words += [f"GPU {row['busy']:.0%} busy"] if row["busy"] is not None else []
        words += [f"{row[key]:.0f} {unit}" for key, unit in _UNITS.items() if row[key] is not None]
        slowed = f", slowed by {row['slowed']}" if row["slowed"] else ""
        lines.append((StyledText(", ".join(words)), StyledText(slowed, "exposed")))
    lines += [(StyledText(seen["more"], "faint"),)] if seen["more"] else []
    for host in seen["hosts"]:
        load = f"load {host['load']:g} on {host['cores']} cores" if host["load"] is not None else ""
        clock = f"{host['mhz']:.0f} MHz" if host["mhz"] is not None else ""
        lines.append((StyledText(", ".join(word for word in (host["host"], load, clock) if word), "faint"),))
    return lines


def _number(name: str, value: float | None, *, behind: bool = False) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return f"{figure(value)} {name}" if behind else f"{name} {figure(value)}"
