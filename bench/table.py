"""The table of results: one row per figure, as markdown and as JSON, and its parts on pages of the manual."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.stats import Interval, meets, quantile, ratio

_PLACE = re.compile(r"(<!-- bench: (.*?) -->\n).*?(<!-- /bench -->)", re.DOTALL)
"""A place of a page for rows of the table: those whose first cell matches the pattern."""
_FACTORS = {"ms": 1000.0, "s": 1.0, "x": 1.0}


@dataclass(frozen=True)
class Row:
    """A figure. met: None if nothing was compared. samples: the measurements from which it was computed."""

    what: str
    nbkit: str
    peer: str
    ratio: str
    again: str
    bar: str
    met: bool | None
    samples: dict[str, list[float]] = field(default_factory=dict)

    def cells(self) -> list[str]:
        met = "" if self.met is None else "yes" if self.met else "**no**"
        return [self.what, self.nbkit, self.peer, self.ratio, self.again, self.bar, met]


def compared(
    what: str,
    ours: Sequence[float],
    peer: str,
    theirs: Sequence[float],
    again: Sequence[float] | None,
    bar: float | None,
    unit: str,
    *,
    note: str = "",
) -> Row:
    """Return the row of ours / theirs, round by round. ours, theirs: seconds. bar: None shows it without a verdict.

    again: ours, measured a second time in each round, for the A/A comparison.
    """
    figure = ratio(ours, theirs)
    twin = ratio(again, ours) if again else None
    return Row(
        what=what,
        nbkit=_plain(quantile(ours).middle, unit),
        peer=f"{peer} {_plain(quantile(theirs).middle, unit)}{note}",
        ratio=_interval(figure),
        again=_interval(twin) if twin else "",
        bar=f"≤ {bar:g} x" if bar is not None else "",
        met=meets(figure, bar, twin) if bar is not None else None,
        samples={"nbkit": _kept(ours), peer: _kept(theirs), "nbkit again": _kept(again or [])},
    )


def absolute(
    what: str, values: Sequence[float], bar: float, unit: str, *, at: float = 0.5, wrong: str = "", peer: str = ""
) -> Row:
    """Return the row of a figure with a bar but no peer. at: which quantile. wrong: what is wrong with it."""
    figure = quantile(values, at)
    factor = _FACTORS[unit]
    if len(values) > 1:
        shown = f"{_plain(figure.middle, unit)} [{figure.low * factor:.3g}, {figure.high * factor:.3g}]"
    else:
        shown = _plain(figure.middle, unit)
    return Row(
        what=what,
        nbkit=f"{shown}{'; ' + wrong if wrong else ''}",
        peer=peer,
        ratio="",
        again="",
        bar=f"≤ {_plain(bar, unit)}",
        met=meets(figure, bar) and not wrong,
        samples={"nbkit": _kept(values)},
    )


def skipped(what: str, peer: str, why: str) -> Row:
    """Return the row of a comparison that could not be made here."""
    return Row(what, "", f"{peer}: {why}", "", "", "", None)


def markdown(rows: Sequence[Row], machine: str) -> str:
    """Return the table with lines that say where and how it was measured."""
    head = ["what", "nbkit", "peer", "ratio [95 %]", "A/A", "bar", "met"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row.cells())} |" for row in rows]
    legend = (
        "`python -m bench` prints medians. Each round gives a ratio: the time of nbkit divided by the time of the peer."
        " The table shows the median of these ratios and its 95 % interval. A/A compares nbkit with itself in the same "
        "rounds. A row meets its bar if the upper end of its interval is at most the bar plus half the width of the "
        "A/A interval."
    )
    return "\n".join([machine, "", *lines, "", legend, ""])


def machine() -> str:
    """Return one line that describes this machine and its software."""
    from psutil import virtual_memory

    packages = ("torch", "ipyparallel", "ipykernel", "nbdistributed")
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    memory = virtual_memory().total / 2**30
    load = os.getloadavg()[0]
    return (
        f"{platform.system()} {platform.machine()}, {_processor()}, {len(os.sched_getaffinity(0))} cores, "
        f"{memory:.0f} GiB, no GPU used; Python {platform.python_version()}, {versions}; "
        f"load {load:.1f} at the start."
    )


def write(rows: Sequence[Row], where: str, out: Path) -> None:
    """Write the table to `out`.json and `out`.md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(markdown(rows, where))
    record = {"machine": where, "rows": [asdict(row) for row in rows]}
    out.with_suffix(".json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def joined(parts: Sequence[Path]) -> tuple[list[Row], str]:
    """Return the rows of several runs, in their order, and the machine of the first. parts: JSON files of `write`."""
    runs = [json.loads(part.read_text()) for part in parts]
    return [Row(**row) for run in runs for row in run["rows"]], runs[0]["machine"]


def comparisons(table: str, pattern: str = "") -> str:
    """Return the head of a markdown table, and its rows that have a ratio with its A/A and match `pattern`."""
    head, rule, *rows = (line for line in table.splitlines(keepends=True) if line.startswith("|"))
    cells = ([cell.strip() for cell in row.split("|")[1:]] for row in rows)
    kept = [row for row, each in zip(rows, cells, strict=True) if all(each[3:5]) and re.search(pattern, each[0])]
    return "".join([head, rule, *kept])


def quote(page: Path, table: str) -> None:
    """Put comparisons of `table` into the marked places of a page. Raises ValueError if the page has none."""
    text, places = _PLACE.subn(lambda place: f"{place[1]}{comparisons(table, place[2])}{place[3]}", page.read_text())
    if not places:
        raise ValueError(f"{page} has no <!-- bench: PATTERN --> ... <!-- /bench -->")
    page.write_text(text)


def _plain(value: float, unit: str) -> str:
    shown = value * _FACTORS[unit]
    digits = f"{shown:.0f}" if abs(shown) >= 100 else f"{shown:.3g}"
    return f"{digits} {unit}"


def _interval(figure: Interval) -> str:
    return f"{figure.middle:.3f} [{figure.low:.3f}, {figure.high:.3f}]"


def _kept(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
