"""Count the bytes that reach the front end for each byte printed, and check that no line is lost.

The output goes through a jupyter_server.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass

from bench.rigs.kernel import Cell
from bench.rigs.server import ServedKernel
from bench.settings import Settings
from bench.table import Row, absolute

BAR = 1.3
CHARACTERS = 40
# Each rank prints different lines. Equal lines are shown once, which would improve the figure.
SOURCE = """%%distributed
import time
for number in range(NUMBER):
    print(f"r{rank} {number:06d} ".ljust(CHARACTERS - 1, "abcdefgh"[rank]) + ".")
    PAUSE
"""


@dataclass(frozen=True)
class Flood:
    """A benchmark's output. lines: for each rank. pause: seconds between two lines."""

    ranks: int
    lines: int
    pause: float
    quick_lines: int


FLOODS = (
    Flood(4, 4_000, 0.001, 200),
    Flood(2, 100_000, 0.0, 20_000),
)


def run(settings: Settings) -> list[Row]:
    """Return one row for each flood."""
    rows = []
    with ServedKernel(settings.folder / "stream") as kernel:
        kernel.run("%load_ext nbkit")
        for flood in FLOODS:
            lines = flood.lines if not (settings.quick or settings.rounds) else flood.quick_lines
            kernel.run(f"%cluster start -n {flood.ranks} --cpu --name bench")
            source = SOURCE.replace("NUMBER", str(lines)).replace("CHARACTERS", str(CHARACTERS))
            source = source.replace("PAUSE", f"time.sleep({flood.pause})" if flood.pause else "")
            cell = kernel.run(source)
            kernel.run("%cluster stop")
            printed = flood.ranks * lines * (CHARACTERS + 1)
            pace = f"at {flood.pause * 1000:g} ms" if flood.pause else "at once"
            size = f"{flood.ranks} ranks x {lines:,} lines of {CHARACTERS} characters {pace}"
            wrong = _wrong(cell, flood.ranks, lines)
            what = f"bytes shown / bytes printed, {size}"
            peer = "" if wrong else f"every line there after {cell.seconds:.1f} s"
            rows.append(absolute(what, [shown(cell) / printed], BAR, "x", wrong=wrong, peer=peer))
    return rows


def shown(cell: Cell) -> int:
    """Return the bytes of content in all messages of the cell that a front end shows."""
    kinds = {"stream", "display_data", "update_display_data", "execute_result", "error"}
    return sum(len(json.dumps(message.content)) for message in cell.messages if message.kind in kinds)


def _wrong(cell: Cell, ranks: int, lines: int) -> str:
    """Return what is wrong with the lines: missing, repeated, mislabelled or out of order; "" if nothing is."""
    pattern = re.compile(r"^\[(\d)\] r(\d) (\d{6}) ([a-h]*)\.$", re.MULTILINE)
    # Like a terminal: text before a carriage return is overwritten.
    screen = "\n".join(line.rpartition("\r")[2] for line in cell.text.split("\n"))
    found = pattern.findall(screen)
    mislabelled = sum(label != rank for label, rank, _, _ in found)
    numbers: dict[str, list[int]] = {}
    for _, rank, number, _ in found:
        numbers.setdefault(rank, []).append(int(number))
    missing = ranks * lines - sum(len(set(of_rank)) for of_rank in numbers.values())
    repeated = sum(count - 1 for of_rank in numbers.values() for count in Counter(of_rank).values())
    disordered = sum(of_rank != sorted(of_rank) for of_rank in numbers.values())
    counts = {"missing": missing, "repeated": repeated, "mislabelled": mislabelled, "ranks out of order": disordered}
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
