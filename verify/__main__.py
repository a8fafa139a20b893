"""Train models under strategies and in one process, and print how far apart they are.

python -m verify parity              every strategy, in float64 and float32, 50 steps: about 20 minutes on 2 cores
python -m verify parity gpt2 zbv     only cases whose names contain all these words; --steps 3: fewer steps of AdamW
python -m verify planted             put known bugs into the ranks; the comparison must detect each: about 4 minutes
python -m verify planted ep=         only bugs whose name or case contains these words: those of expert parallelism
python -m verify zoo                 every architecture: about 13 minutes; --out verify/results.md stores the table
python -m verify zoo gpt2 tp         only cases with all these words: a model, a strategy or an axis of it, chain
python -m verify optimizers          12 optimizers and one pair, under 12 strategies; --out stores the table
python -m verify fuzz 500            500 random models, split over two ranks; fuzz 50 100: seeds 100 to 149
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from verify import fuzz
from verify.cases import (
    OPTIMIZER_STRATEGIES,
    Case,
    bf16_cases,
    optimizer_cases,
    parity_extras,
    parity_matrix,
    zoo_cases,
)
from verify.compare import PARITY_HEAD, counted, parity_row, zoo_table, zoo_totals
from verify.models.images import MISSING
from verify.optimizers import OPTIMIZERS
from verify.planted import BUGS, unseen
from verify.rank_sets import verdicts
from verify.training import ARCHITECTURES


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 1 if a case differs from one process and was not refused."""
    parser = argparse.ArgumentParser(
        prog="python -m verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("parity", "planted", "zoo", "optimizers", "fuzz"))
    parser.add_argument("words", nargs="*", metavar="word", help="take only the cases whose names contain all words")
    parser.add_argument("--steps", type=int, default=50, help="steps of AdamW in each case of the parity (default 50)")
    parser.add_argument("--out", type=Path, help="write the table there too")
    asked = parser.parse_args(arguments)
    began = time.monotonic()
    if asked.what == "fuzz":
        return fuzz.main(asked.words)
    if asked.what == "planted":
        lines, wrong = [], _planted(asked.words)
        print("\n".join(wrong))
    elif asked.what == "optimizers":
        lines, wrong = _optimizers(asked.words)
    elif asked.what == "zoo":
        lines, wrong = _zoo(asked.words)
    else:
        lines, wrong = _parity(asked.words, asked.steps)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if asked.out is not None:
        asked.out.write_text("\n".join(lines).rstrip() + "\n")
    return int(bool(wrong[1:] if asked.what == "planted" else wrong))


def _parity(words: Sequence[str], steps: int) -> tuple[list[str], list[str]]:
    """Return (lines of the table, cases that differ from one process)."""
    cases = [*parity_matrix("float64", steps), *parity_matrix("float32", steps)]
    cases += [*parity_extras("float64", 6), *bf16_cases(6)]
    cases = [case for case in cases if all(word in str(case) for word in words)]
    _require(cases, words)
    head, rows, wrong = [_line(PARITY_HEAD), _line(["---"] * len(PARITY_HEAD))], [], []
    print("\n".join(head), flush=True)
    for case, verdict in verdicts(cases):
        rows.append(_line(parity_row(case, verdict)))
        print(rows[-1], flush=True)
        if verdict.kind != "equal":
            wrong.append(f"{case}: {verdict.kind} {verdict.text}")
    tail = ["", f"{len(rows) - len(wrong)} of {len(cases)} cases are as in one process."]
    if not words:
        told, *blind = _planted()
        tail.append(told)
        wrong += blind
    print("\n".join([*tail, *wrong]), flush=True)
    return [*head, *sorted(rows), *tail], wrong


def _planted(words: Sequence[str] = ()) -> list[str]:
    """Return a line about the planted bugs, and a line for each that was missed or whose case fails without it."""
    bugs = [bug for bug in BUGS if all(word in f"{bug.what}, {bug.case}" for word in words)]
    _require([bug.case for bug in bugs], words)
    green, red = unseen(bugs)
    head = f"{len(bugs)} planted bugs: {len(green)} not seen."
    return [head, *(f"planted, and not seen: {what}" for what in green), *red]


def _zoo(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (lines of the page, cases that differ from one process, or from what `nbkit.check` says)."""
    chosen, found = list(zoo_cases(tuple(ARCHITECTURES), words)), {}
    _require(chosen, words)
    for case, verdict in verdicts(chosen, patience=180, check=True):
        found[case] = verdict
        said = f"; check: {verdict.check}" if verdict.check else ""
        print(f"{len(found)}/{len(chosen)} {case}: {verdict.kind} {verdict.text}{said}", flush=True)
    ordered = {case: found[case] for case in chosen}
    left_out = f"{len({case.model for case in chosen})} architectures."
    if MISSING:
        left_out += f" Left out, because they cannot be imported here: {', '.join(MISSING)}."
    lines = [zoo_totals(ordered), left_out, "", *zoo_table(ordered)]
    print("\n".join(["", *lines]))
    wrong = [str(case) for case, verdict in found.items() if verdict.is_wrong]
    return ["# Each model under each strategy", "", *lines], wrong


def _optimizers(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (lines of the page, cases that differ from one process)."""
    chosen = list(optimizer_cases(tuple(OPTIMIZERS), words))
    _require(chosen, words)
    found = {}
    for case, verdict in verdicts(chosen):
        found[case] = verdict
        print(f"{len(found)}/{len(chosen)} {case}: {verdict.kind} {verdict.text}", flush=True)
    ordered = {case: found[case] for case in chosen}
    lines = [counted(ordered), "", *zoo_table(ordered, [tuple(OPTIMIZER_STRATEGIES)])]
    print("\n".join(["", *lines]))
    wrong = [str(case) for case, verdict in found.items() if verdict.is_wrong]
    return ["# Each optimizer under each strategy", "", *lines], wrong


def _require(cases: Sequence[Case], words: Sequence[str]) -> None:
    """Exit if there are no cases, because a run without comparisons would pass."""
    if not cases:
        raise SystemExit(f"no case has all of these words: {' '.join(words)}")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
