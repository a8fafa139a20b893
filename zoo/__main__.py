"""Train every architecture under every strategy, and print which cells are as one process, refused, or neither.

python -m zoo                the whole table: about 10 minutes on 2 cores; --out zoo/results.md stores it
python -m zoo gpt2 tp        the cells that have all these words: a model, a strategy or its kind, chain
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from zoo.cells import cells
from zoo.image_models import MISSING
from zoo.rounds import verdicts
from zoo.training import SUBJECTS
from zoo.verdicts import table, totals, wrong_with


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 1 when a cell is neither as one process nor refused, or check said something else."""
    parser = argparse.ArgumentParser(
        prog="python -m zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="word", help="only cells that have all of these")
    parser.add_argument("--out", type=Path, help="write the table there too")
    asked = parser.parse_args(arguments)
    chosen = list(cells(tuple(SUBJECTS), asked.words))
    began, found = time.monotonic(), {}
    for cell, verdict in verdicts(chosen):
        found[cell] = verdict
        said = f"; check: {verdict.check}" if verdict.check else ""
        print(f"{len(found)}/{len(chosen)} {cell}: {verdict.kind} {verdict.text}{said}", flush=True)
    ordered = {cell: found[cell] for cell in chosen}
    left_out = f"{len({cell.subject for cell in chosen})} architectures."
    if MISSING:
        left_out += f" Not to be imported here, and left out: {', '.join(MISSING)}."
    lines = [totals(ordered), left_out, "", *table(ordered)]
    print("\n".join(["", *lines]))
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if asked.out is not None:
        asked.out.write_text(
            "\n".join(["# What becomes of each model under each strategy", "", *lines]).rstrip() + "\n"
        )
    return int(any(map(wrong_with, found.values())))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
