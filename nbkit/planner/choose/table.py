"""A plan for people: a table as text or HTML, and why one row comes before another."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from nbkit.errors import UsageError
from nbkit.planner.choose.levers_that_help import is_exact
from nbkit.planner.choose.ranked_strategies import Plan, Row

_HEADS = ("strategy", "step", "between", "limit", "peak", "states", "activations", "working", "sent in a step", "rate")
_SHOWN, _REFUSED = 12, 4


def text(plan: Plan) -> str:
    """The best rows, what was refused, and how to go on."""
    if not plan.rows:
        return "\n".join([_title(plan), "Nothing fits.", *_refusals(plan)])
    table = [_HEADS, *(_cells(row, plan) for row in plan.rows[:_SHOWN])]
    widths = [max(len(line[i]) for line in table) for i in range(len(_HEADS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    marked = [f"{mark} {line}" for mark, line in zip([" ", "→", *" " * len(lines)], lines, strict=False)]
    left = len(plan.rows) - _SHOWN
    more = [f"  … {left} more that fit: .rows"] if left > 0 else []
    return "\n".join([_title(plan), *marked, *more, *_levers(plan), *_refusals(plan)])


def page(plan: Plan) -> str:
    """The same in HTML, in the notebook's own colours."""
    head = "".join(f"<th style='text-align:left'>{html.escape(cell)}</th>" for cell in _HEADS)
    body = ""
    for number, row in enumerate(plan.rows[:_SHOWN]):
        weight = "font-weight:bold" if not number else ""
        cells = "".join(f"<td style='text-align:left;{weight}'>{html.escape(c)}</td>" for c in _cells(row, plan))
        body += f"<tr>{cells}</tr>"
    notes = "".join(f"<div>{html.escape(line.strip())}</div>" for line in [*_levers(plan), *_refusals(plan)])
    title = html.escape(_title(plan))
    return f"<div>{title}</div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"


def why(plan: Plan, first: str, second: str) -> str:
    """What two rows differ in. Raises UsageError for a strategy that has no row, with the reason if it was refused."""
    one, other = _find(plan, first), _find(plan, second)
    fast, slow = (one, other) if one.seconds <= other.seconds else (other, one)
    lines = [f"{fast.settings} takes {span(fast.seconds)} a step, {slow.settings} {span(slow.seconds)}:"]
    for name in ("compute", "exposed", "bubble", "optimizer"):
        a, b = getattr(fast.parts, name), getattr(slow.parts, name)
        if abs(b - a) >= 0.01 * slow.seconds:
            lines.append(f"  {name:12} {span(a):>9} and {span(b):>9}   {'+' if b >= a else '-'}{span(abs(b - a))}")
    for axis in sorted({*fast.sent, *slow.sent}):
        a, b = fast.sent.get(axis, 0.0), slow.sent.get(axis, 0.0)
        lines.append(f"  sent on {axis:4} {size(a):>9} and {size(b):>9}")
    lines.append(f"  peak         {size(fast.peak.total):>9} and {size(slow.peak.total):>9}   of {size(plan.usable)}")
    if fast.high >= slow.low:
        lines.append("Their intervals overlap: measure both before you rely on it.")
    return "\n".join(lines)


def _find(plan: Plan, wanted: str) -> Row:
    words = " ".join(wanted.split())
    for row in plan.rows:
        if words in (row.settings, row.strategy, row.label):
            return row
    refused = next((one for one in plan.refused if one.strategy == words), None)
    if refused is not None:
        raise UsageError(f"{words} is refused. {refused.why}", numbers=refused.numbers, hint=plan.rows[0].strategy)
    names = ", ".join(row.strategy for row in plan.rows[:5])
    raise UsageError(
        f"{words!r} has no row in this plan.", numbers=f"the best: {names}", hint=f'"{names.split(", ")[0]}"'
    )


def _title(plan: Plan) -> str:
    return (
        f"{plan.model}, {plan.batch:,} rows a step, on {plan.on}: {len(plan.rows)} strategies fit, "
        f"{len(plan.refused)} do not; predicted, not measured"
    )


def _levers(plan: Plan) -> list[str]:
    """What would relieve the link of the best row that has such a key."""
    row = next((row for row in plan.rows if row.levers), None)
    if row is None:
        return []
    return [f"  {row.strategy} waits for its link: {span(row.seconds)} a step. {in_words(row.levers)}"]


def in_words(levers: Mapping[str, float]) -> str:
    """What they would leave of a step: those after which losses are as before, then the others."""
    words = []
    for exact, what in ((True, "With the same sums"), (False, "Not equal to one process")):
        some = [f"{lever} {span(took)}" for lever, took in levers.items() if is_exact(lever) is exact]
        words += [f"{what}: {', '.join(some)}"] * bool(some)
    return ". ".join(words)


def _refusals(plan: Plan) -> list[str]:
    return [f"  refused: {one.strategy}: {one.why} {one.numbers}" for one in plan.refused[-_REFUSED:]]


def _cells(row: Row, plan: Plan) -> Sequence[str]:
    states = row.peak.parameters + row.peak.gradients + row.peak.optimizer
    axis = max(row.sent, key=lambda one: row.sent[one], default="")
    between = f", {size(row.between)} between nodes" if row.between else ""
    return (
        row.settings,
        span(row.seconds),
        f"{span(row.low)} - {span(row.high)}",
        row.limit,
        size(row.peak.total),
        size(states),
        size(row.peak.activations),
        size(row.peak.working),
        f"{size(sum(row.sent.values()))}, most on {axis}{between}" if row.sent else "nothing",
        f"{row.rate:,.0f} {plan.unit}/s, {row.device_seconds_per_million:.3g} device s / M",
    )


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def span(seconds: float) -> str:
    """Seconds for people."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
