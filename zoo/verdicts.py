"""What became of each cell, in one word, and whether check had said so; the table of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.cells import CHAINED, STRATEGIES, Cell
from zoo.training import Found, Known

KINDS = ("equal", "refused", "wrong", "crash", "late")
BAR, ROUNDED = 1e-9, 1e-5
"""How far losses and weights may be from one process; where the model itself rounds to float32 on the way."""


@dataclass(frozen=True)
class Verdict:
    """kind: one of KINDS, of the worst rank. text: how far, or why. check: what it said, where it said something else.

    left_out: the strategies of a chain that were refused, with what check said of them.
    """

    kind: str
    text: str
    check: str = ""
    left_out: tuple[str, ...] = ()


def judged(cell: Cell, found: Sequence[Found] | str, known: Known) -> Verdict:
    """found: what each rank made of it, or the text of what broke them."""
    single = len(cell.steps) == 1
    if isinstance(found, str):
        return Verdict("crash", _ended(found), _said_otherwise(known, cell.strategy, "crash") if single else "")
    kind, text = _kind(cell, found, known)
    if single:
        return Verdict(kind, text, _said_otherwise(known, cell.strategy, kind))
    refused = found[0].refused
    off = [
        f"{strategy}: {why}"
        for strategy in cell.steps
        if (why := _said_otherwise(known, strategy, "refused" if strategy in refused else "equal"))
    ]
    return Verdict(kind, text, "; ".join(off), tuple(refused))


def _ended(text: str) -> str:
    """Who broke, and the last line of its traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0] if len(lines) < 2 else f"{lines[0]} {lines[-1]}"


def _said_otherwise(known: Known, strategy: str, kind: str) -> str:
    """What check said, unless that is what happened."""
    said, why = known.checks[strategy]
    if (said, kind) in (("fits", "equal"), ("refused", "refused")):
        return ""
    return f"{said} {_short(why)}".strip()


def _kind(cell: Cell, found: Sequence[Found], known: Known) -> tuple[str, str]:
    late = [each.late for each in found if each.late]
    if late:
        return "late", late[0]
    if any(not each.made for each in found):
        return "refused", found[0].refused.get(cell.steps[0], "not refused by every rank")
    if any(each.refused != found[0].refused for each in found):
        return "wrong", "ranks differ in what they refuse"
    far = max(_far(each, known) for each in found)
    return ("equal" if far <= (ROUNDED if known.rounds else BAR) else "wrong"), f"{far:.1e}"


def _far(found: Found, known: Known) -> float:
    """The largest of: relative differences of losses; ||difference|| / ||what training moved||, buffers included."""
    after = known.after[found.made]
    if len(found.losses) != found.made or found.after.keys() != after.keys():
        return float("inf")
    losses = [abs(a - b) / abs(b) for a, b in zip(found.losses, known.losses, strict=False)]
    off = {name: (found.after[name] - tensor).double() for name, tensor in after.items()}
    moved = {name: (tensor - known.before[name]).double() for name, tensor in after.items()}
    far = [*losses, _norm(off.values()) / _norm(moved.values())]
    # max() passes over what is not a number.
    return max(far) if all(each == each for each in far) else float("inf")


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([t.norm() for t in tensors]).norm())


def _short(text: str, most: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def wrong_with(verdict: Verdict) -> bool:
    """Whether it is what may not be."""
    return verdict.kind not in ("equal", "refused") or bool(verdict.check)


def totals(verdicts: Mapping[Cell, Verdict]) -> str:
    """One line: how many of each kind, and of how many check said something else."""
    counted = Counter(verdict.kind for verdict in verdicts.values())
    share = 100 * counted["equal"] / max(len(verdicts), 1)
    kinds = ", ".join(f"{counted[kind]} {kind}" for kind in KINDS)
    off = sum(bool(verdict.check) for verdict in verdicts.values())
    return f"{len(verdicts)} cells: {kinds} ({share:.0f} % equal); check said something else of {off}."


def table(verdicts: Mapping[Cell, Verdict]) -> list[str]:
    """Lines of Markdown: a row for each model, then what is to be told of cells that are not equal."""
    columns = (*STRATEGIES, CHAINED)
    rows = [f"| model | {' | '.join(STRATEGIES)} | chain |", "|---" * (len(columns) + 1) + "|"]
    subjects = dict.fromkeys(cell.subject for cell in verdicts)
    for subject in subjects:
        told = [verdicts.get(Cell(subject, strategy)) for strategy in columns]
        rows.append(f"| {subject} | {' | '.join('' if each is None else _word(each) for each in told)} |")
    rows += ["", "The chain: `" + CHAINED + "`, a step in each. +check: `nbkit.check` said something else.", ""]
    for kind in ("wrong", "crash", "late", "refused"):
        some = {cell: verdict for cell, verdict in verdicts.items() if verdict.kind == kind}
        rows += [f"## {kind.capitalize()}", ""] if some else []
        rows += [f"- {_named(cell)}: {_short(verdict.text, 400)}" for cell, verdict in some.items()]
        rows += [""] if some else []
    off = {cell: verdict for cell, verdict in verdicts.items() if verdict.check}
    rows += ["## Check said", ""] if off else []
    rows += [f"- {_named(cell)}, {verdict.kind}: {verdict.check}" for cell, verdict in off.items()]
    return rows


def _named(cell: Cell) -> str:
    return f"{cell.subject}, {'chain' if cell.strategy == CHAINED else cell.strategy}"


def _word(verdict: Verdict) -> str:
    word = verdict.kind if verdict.kind in ("equal", "refused") else f"**{verdict.kind}**"
    left = f" less {', '.join(verdict.left_out)}" if verdict.left_out and verdict.kind == "equal" else ""
    return f"{word}{left}{' +check' if verdict.check else ''}"
