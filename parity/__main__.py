"""Train every strategy beside one process and print how far apart they are.

python -m parity                     the whole matrix, in float64 and float32, 50 steps: about half an hour on 2 cores
python -m parity gpt2 zbv            the cells in whose names all these words occur
python -m parity --steps 3           fewer steps of AdamW
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import ranks

from parity.bf16 import bars_of_bf16, bf16_cells
from parity.cells import Cell, extra_cells, matrix
from parity.figures import BARS, compared
from parity.planted import BUGS, unseen
from parity.rounds import results, truths

HEAD = ("model", "strategy", "weights", "with", "steps", "gradients", "largest", "losses", "norms", "met")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 1 when a cell is not as one process."""
    parser = argparse.ArgumentParser(
        prog="python -m parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="word", help="only cells in whose names all of these occur")
    parser.add_argument("--steps", type=int, default=50, help="of AdamW in each cell of the matrix (default 50)")
    parser.add_argument("--out", type=Path, help="write the table there too")
    asked = parser.parse_args(arguments)
    cells = [*matrix("float64", asked.steps), *matrix("float32", asked.steps)]
    cells += [*extra_cells("float64", 6), *bf16_cells(6)]
    cells = [cell for cell in cells if all(word in str(cell) for word in asked.words)]
    # In memory once, for all ranks.
    ranks._PRELOAD += ["transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"]
    began = time.monotonic()
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    print("\n".join(lines), flush=True)
    failed: list[str] = []
    for (_, _, subject), group in groupby(sorted(cells, key=_round), key=_round):
        together = list(group)
        known = truths(together)
        for cell, found in results(together):
            bars = bars_of_bf16(cell) if "bf16" in cell.extras else BARS[cell.dtype]
            extras = " ".join(sorted(cell.extras))
            row = [subject, cell.strategy, cell.dtype, extras, str(cell.steps)]
            if isinstance(found, str):
                row += ["", "", "", "", f"**no**: {found.strip().splitlines()[0]}"]
                failed.append(f"{cell}: {found}")
            else:
                figures = compared(found, known[cell.truth])
                missed = figures.missed(bars)
                row += [f"{n:.1e}" for n in (figures.grads, figures.largest, figures.losses, figures.norms)]
                row += [f"**no**: {', '.join(missed)}" if missed else "yes"]
                failed += [f"{cell}: {', '.join(missed)}"] if missed else []
            lines.append(_line(row))
            print(lines[-1], flush=True)
    off = len(failed)
    if not asked.words:
        lines.append("")
        for num_ranks in (2, 4):
            green, red = unseen(num_ranks)
            failed += [f"planted, and not seen: {what}" for what in green] + red
        lines.append(f"{len(BUGS)} planted bugs: {sum('not seen' in what for what in failed)} not seen.")
        print(lines[-1], flush=True)
    lines += ["", f"{len(cells) - off} of {len(cells)} cells are as one process."]
    print("\n".join([*lines[-2:], *failed]), flush=True)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if asked.out is not None:
        asked.out.write_text("\n".join(lines) + "\n")
    return int(bool(failed))


def _round(cell: Cell) -> tuple[int, str, str]:
    """Cells of one model and one number of ranks run in the same processes."""
    return cell.ranks, cell.dtype, cell.subject


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
