"""Measure the time of a printed line from `print` on a rank to the front end, unflushed and flushed."""

from __future__ import annotations

import re

from bench.rigs.kernel import Cell, Kernel
from bench.rigs.peers import start_nbkit, start_px, stop_nbkit, stop_px
from bench.settings import Settings
from bench.stats import quantile
from bench.table import Row, absolute

RANKS = 4
LINES = 50  # per rank
BAR_SECONDS = 0.050
SOURCE = """import os, time
rank_here = os.getpid()
for number in range(LINES):
    print(f"line {rank_here}.{number} printed {time.time():.6f} end"FLUSH)
    time.sleep(0.1)
"""


def run(settings: Settings) -> list[Row]:
    """Return one row for unflushed lines and one for flushed ones. Each shows `%%px` too, without a bar."""
    lines = settings.count(LINES)
    rows = []
    with Kernel(settings.folder / "line-nbkit") as ours, Kernel(settings.folder / "line-px") as theirs:
        start_nbkit(ours, RANKS)
        start_px(theirs, RANKS)
        for name, flush in (("unflushed", ""), ("flushed", ", flush=True")):
            source = SOURCE.replace("LINES", str(lines)).replace("FLUSH", flush)
            delays = _delays(ours.run("%%distributed\n" + source))
            beside = quantile(_delays(theirs.run("%%px\n" + source))).middle
            wrong = "" if len(delays) == RANKS * lines else f"{len(delays)} of {RANKS * lines} lines arrived"
            peer = f"`%%px` {beside * 1000:.3g} ms"
            what = f"line on screen after `print`, {name}, {RANKS} ranks"
            rows.append(absolute(what, delays, BAR_SECONDS, "ms", wrong=wrong, peer=peer))
        stop_nbkit(ours)
        stop_px(theirs)
    return rows


def _delays(cell: Cell) -> list[float]:
    """Return, for each line, the seconds from its print to its first arrival."""
    first: dict[str, float] = {}
    for message in cell.messages:
        text = message.content.get("text") or str(message.content.get("data", ""))
        for printed in re.findall(r"line ([\d.]+ printed [\d.]+) end", text):
            first.setdefault(printed, message.at)
    return [at - float(printed.rpartition(" ")[2]) for printed, at in first.items()]
