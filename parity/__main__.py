"""Train every strategy beside one process and print how far apart they are.

python -m parity                     the whole matrix, in float64 and float32, 50 steps: about 20 minutes on 2 cores
python -m parity gpt2 zbv            the cells in whose names all these words occur
python -m parity --planted           bugs put into the ranks, each of which has to turn it red: about 2 minutes
python -m parity --steps 3           fewer steps of AdamW
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from parity.bf16 import bars_of_bf16, bf16_cells
from parity.cells import extra_cells, matrix
from parity.figures import BARS, compared
from parity.planted import BUGS, unseen
from parity.rounds import Result, in_lanes, truths
from parity.training import Truth

HEAD = ("model", "strategy", "weights", "with", "steps", "gradients", "largest", "losses", "norms", "met")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 1 when a cell is not as one process."""
    parser = argparse.ArgumentParser(
        prog="python -m parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="word", help="only cells in whose names all of these occur")
    parser.add_argument("--steps", type=int, default=50, help="of AdamW in each cell of the matrix (default 50)")
    parser.add_argument("--out", type=Path, help="write the table there too")
    parser.add_argument("--planted", action="store_true", help="only the planted bugs")
    asked = parser.parse_args(arguments)
    if asked.planted:
        told, failed = _planted()
        print("\n".join([told, *failed]))
        return int(bool(failed))
    cells = [*matrix("float64", asked.steps), *matrix("float32", asked.steps)]
    cells += [*extra_cells("float64", 6), *bf16_cells(6)]
    cells = [cell for cell in cells if all(word in str(cell) for word in asked.words)]
    began = time.monotonic()
    head, rows, failed = [_line(HEAD), _line(["---"] * len(HEAD))], [], []
    print("\n".join(head), flush=True)
    with ThreadPoolExecutor(1) as pool:
        known = pool.submit(truths, cells, timeout=3600)
        for result in in_lanes(cells):
            row, why = _judged(result, known.result()[result[0].truth])
            rows.append(_line(row))
            failed += [f"{result[0]}: {why}"] if why else []
            print(rows[-1], flush=True)
    tail = ["", f"{len(cells) - len(failed)} of {len(cells)} cells are as one process."]
    if not asked.words:
        told, blind = _planted()
        tail.append(told)
        failed += blind
    print("\n".join([*tail, *failed]), flush=True)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if asked.out is not None:
        asked.out.write_text("\n".join([*head, *sorted(rows), *tail]) + "\n")
    return int(bool(failed))


def _planted() -> tuple[str, list[str]]:
    """What is to be said of the planted bugs, and what has failed."""
    green, red = unseen(BUGS)
    return f"{len(BUGS)} planted bugs: {len(green)} not seen.", [f"planted, and not seen: {w}" for w in green] + red


def _judged(result: Result, truth: Truth) -> tuple[list[str], str]:
    """(row of the table, why it is not as one process)."""
    cell, found = result
    row = [cell.subject, cell.strategy, cell.dtype, " ".join(sorted(cell.extras)), str(cell.steps)]
    if isinstance(found, str):
        return [*row, "", "", "", "", f"**no**: {found.strip().splitlines()[0]}"], found
    figures = compared(found, truth)
    missed = ", ".join(figures.missed(bars_of_bf16(cell) if "bf16" in cell.extras else BARS[cell.dtype]))
    row += [f"{n:.1e}" for n in (figures.grads, figures.largest, figures.losses, figures.norms)]
    return [*row, f"**no**: {missed}" if missed else "yes"], missed


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
