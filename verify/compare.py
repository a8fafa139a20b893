"""Measure the difference between ranks and one process, and give a verdict in one word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from math import inf, nan
from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from verify.cases import CHAINED, EXPERTS_CHAINED, ZOO_EXPERTS, ZOO_STRATEGIES, Case
from verify.training import BATCH, Outcome, Pieces, Truth, truth

KINDS = ("equal", "refused", "wrong", "crash", "late")
KINDS_MEAN = (
    "A case is one training, compared with one process of plain torch. *Equal*: the results are the same. *Refused*: "
    "an error before the first step says that the strategy is not possible. *Wrong*: the results differ. *Crash*: "
    "another error ends the training. *Late*: the strategy is refused after the first step."
)


@dataclass(frozen=True)
class Bars:
    """The largest differences that are allowed.

    grads: ||difference|| / ||gradient||, over the whole model. largest: max |difference| / max |gradient|. losses,
    norms: relative, the largest of all steps. moved: ||difference of the weights|| / ||their change in training||, with
    buffers.
    """

    grads: float = inf
    largest: float = inf
    losses: float = inf
    norms: float = inf
    moved: float = inf


BARS = {"float32": Bars(1e-6, 1e-5, 1e-5, 1e-5), "float64": Bars(1e-12, 1e-12, 1e-10, 1e-10)}
"""For AdamW. Its weights are not compared: it divides a gradient by its size, even one that is only rounding error."""
SGD_BARS, ROUNDED_BARS = Bars(1e-9, 1e-9, 1e-9, 1e-9, 1e-9), Bars(1e-5, 1e-5, 1e-5, 1e-5, 1e-5)
"""For SGD in float64; and for a model that rounds to float32 in its own forward."""


@dataclass(frozen=True)
class Figures(Bars):
    """The differences between the ranks and one process. wrong: what else is wrong, in words; "" if nothing is."""

    wrong: str = ""

    def missed(self, bars: Bars) -> list[str]:
        """Return the names of the figures above their bars, or not a number, and `wrong`."""
        names = ("grads", "largest", "losses", "norms", "moved")
        missed = [name for name in names if not getattr(self, name) <= getattr(bars, name)]
        return [*missed, *([self.wrong] if self.wrong else [])]


def bars_of(case: Case, known: Truth, *, fewer: bool = False) -> Bars:
    """Return the bars of `case`. Those of bfloat16 are measured; fewer: with fewer runs."""
    if "sgd" in case.extras:
        return ROUNDED_BARS if known.rounds else SGD_BARS
    return _bf16_bars(case.truth, fewer) if "bf16" in case.extras else BARS[case.dtype]


def compared(case: Case, ranks: Sequence[Outcome], known: Truth) -> Figures:
    """Return the differences. For each element the worst rank counts. An element that no rank holds is an error."""
    first, wrong = ranks[0], []
    made = first.made
    if any((rank.losses, rank.norms, rank.made) != (first.losses, first.norms, made) for rank in ranks):
        wrong.append("histories differ between ranks")
    if {made, len(first.losses), len(first.norms)} != {case.steps}:
        wrong.append(f"{made} of {case.steps} steps, with {len(first.losses)} losses and {len(first.norms)} norms")
    if any(len(rank.evaluated) != len(known.evaluated) or rank.evaluated != first.evaluated for rank in ranks):
        wrong.append("evaluations are missing, or differ between ranks")
    if any(rank.state.keys() != known.states[0].keys() for rank in ranks):
        wrong.append("the names in the final state differ")
    grads, missing = _differences([rank.grads for rank in ranks], known.grads)
    wrong += [f"no rank holds all of {name}" for name in sorted(missing)]
    return Figures(
        grads=_norm(grads.values()) / _norm(known.grads.values()),
        largest=_largest(grads) / _largest(known.grads),
        losses=_worst((_relative(first.losses, known.losses), _relative(first.evaluated, known.evaluated))),
        norms=_relative(first.norms, known.norms),
        moved=_worst(_moved(rank.state, known, case.steps) for rank in ranks),
        wrong="; ".join(wrong),
    )


def _differences(ranks: Sequence[Pieces], whole: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return (name -> largest |difference| of each element, names of which no rank holds some element)."""
    found = {name: torch.full(tensor.shape, -1.0, dtype=torch.float64) for name, tensor in whole.items()}
    for pieces in ranks:
        for name, (tensor, layout) in pieces.items():
            if name not in whole:
                # One process has no such gradient, so this one must be zero.
                most = tensor.abs().max() if tensor.numel() else tensor.new_zeros(())  # a rank's part may be empty
                found[name] = torch.maximum(found.get(name, torch.zeros(layout.shape)), most.double())
                continue
            for local, place in layout.pieces:
                off = (tensor[local.slices].double() - whole[name][place.slices].double()).abs()
                target = found[name][place.slices]
                # maximum() gives NaN if one of the two is NaN.
                target.copy_(torch.maximum(target, off))
    return found, [name for name, tensor in found.items() if bool((tensor < 0).any())]


def _moved(state: Mapping[str, Tensor], known: Truth, steps: int) -> float:
    after, before = known.states[steps], known.states[0]
    if state.keys() != after.keys():
        return inf
    off = [state[name].double() - tensor.double() for name, tensor in after.items()]
    return _norm(off) / _norm(tensor.double() - before[name].double() for name, tensor in after.items())


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([t.double().norm() for t in tensors]).norm())


def _largest(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([t.double().abs().max() for t in tensors.values()]).max())


def _relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return _worst(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=False))


def _worst(figures: Iterable[float]) -> float:
    """Return the largest; 0 if there is none, NaN if one is NaN, which max() would ignore."""
    found = list(figures)
    return max(found, default=0.0) if all(each == each for each in found) else nan


# In bfloat16, a strategy may differ from one process as much as two runs of one process with different orders of sums.


class _InParts(TorchFunctionMode):
    """Computes linear layers in parts of their input and output features, which changes only the rounding.

    order: a seed that shuffles the input features first; 0 leaves them.
    """

    def __init__(self, parts: int, order: int) -> None:
        super().__init__()
        self.parts, self.order = parts, order

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
        if self.order:
            order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(self.order))
            x, weight = x[..., order], weight[:, order]
        rows = [self._summed(x, some) for some in weight.chunk(self.parts, 0)]
        return torch.cat(rows, -1) if bias is None else torch.cat(rows, -1) + bias

    def _summed(self, x: Tensor, weight: Tensor) -> Tensor:
        pairs = zip(x.chunk(self.parts, -1), weight.chunk(self.parts, -1), strict=True)
        total: Tensor = sum(F.linear(a, b) for a, b in pairs)  # type: ignore[assignment]
        return total


def _orders(rank: int, case: Case, fewer: bool) -> list[Truth]:
    """Run one process in bfloat16 several times. Each run sums in another order, over rows, features, or both.

    There are forty runs; fewer: the eight that differ most.
    """
    every = [(parts, order) for parts in ((4,) if fewer else (1, 2, 4)) for order in range(3)]
    wraps = [nullcontext, *(partial(_InParts, parts, order) for parts, order in every)]
    several = (BATCH, 2) if fewer else (BATCH, BATCH // 2, BATCH // 4, 2)
    return [truth(case, rows=rows, wrap=wrap) for wrap in wraps for rows in several]


@cache
def _bf16_bars(case: Case, fewer: bool) -> Bars:
    """Return the largest differences between two runs of one process."""
    runs = run_ranks(_orders, 1, case, fewer, timeout=300, join=False)[0]
    found = [_far(one, other) for i, one in enumerate(runs) for other in runs[:i]]
    return Bars(*(max(getattr(each, name) for each in found) for name in ("grads", "largest", "losses", "norms")))


def _far(one: Truth, other: Truth) -> Bars:
    grads = {name: (one.grads[name] - grad).double() for name, grad in other.grads.items()}
    return Bars(
        grads=_norm(grads.values()) / _norm(other.grads.values()),
        largest=_largest(grads) / _largest(other.grads),
        losses=_relative(one.losses, other.losses),
        norms=_relative(one.norms, other.norms),
    )


@dataclass(frozen=True)
class Verdict:
    """The result of a case.

    kind: one of KINDS, of the worst rank. text: the difference, or the reason. check: the answer of `nbkit.check`, if
    something else happened. left_out: the strategies of a chain that were refused.
    """

    kind: str
    text: str
    check: str = ""
    left_out: tuple[str, ...] = ()
    figures: Figures | None = None

    @property
    def is_wrong(self) -> bool:
        """Return True for an error: a kind other than equal or refused, or a result that `check` did not predict."""
        return self.kind not in ("equal", "refused") or bool(self.check)


def judged(case: Case, found: Sequence[Outcome] | str, known: Truth) -> Verdict:
    """Return the verdict on `case`. found: the outcome of each rank, or the error that broke them.

    If `known` has what `nbkit.check` said, that must be what happened.
    """
    single = len(case.strategies) == 1
    if isinstance(found, str):
        return Verdict("crash", _ended(found), _said_otherwise(known, case.strategy, "crash") if single else "")
    kind, text, figures = _kind(case, found, known)
    if single:
        return Verdict(kind, text, _said_otherwise(known, case.strategy, kind), figures=figures)
    refused = found[0].refused
    off = [
        f"{strategy}: {why}"
        for strategy in case.strategies
        if (why := _said_otherwise(known, strategy, "refused" if strategy in refused else "equal"))
    ]
    return Verdict(kind, text, "; ".join(off), tuple(refused), figures)


def _kind(case: Case, found: Sequence[Outcome], known: Truth) -> tuple[str, str, Figures | None]:
    late = [each.late for each in found if each.late]
    if late:
        return "late", late[0], None
    first = case.strategies[0]
    if all(first in each.refused for each in found):
        return "refused", found[0].refused[first], None
    if any(each.refused != found[0].refused for each in found):
        return "wrong", "ranks differ in what they refuse", None
    figures = compared(case, found, known)
    missed = figures.missed(bars_of(case, known))
    far = f"{_worst((figures.losses, figures.moved)):.1e}"
    return ("wrong", f"{far} {', '.join(missed)}", figures) if missed else ("equal", far, figures)


def _ended(text: str) -> str:
    """Return the first line, which names the rank that failed, and the last line of its traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0] if len(lines) < 2 else f"{lines[0]} {lines[-1]}"


def _said_otherwise(known: Truth, strategy: str, kind: str) -> str:
    """Return the answer of `nbkit.check` if something else happened; "" if not, or if it was not asked."""
    said, why = known.checks.get(strategy, ("", ""))
    if not said or (said, kind) in (("fits", "equal"), ("refused", "refused")):
        return ""
    return f"{said} {_short(why)}".strip()


def _short(text: str, most: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def parity_row(case: Case, verdict: Verdict) -> list[str]:
    """Return a row of the table of figures, with the columns of PARITY_HEAD."""
    row = [str(case.model), case.strategy, case.dtype, " ".join(sorted(case.extras)), str(case.steps)]
    figures = verdict.figures
    row += ["", "", "", ""] if figures is None else [
        f"{n:.1e}" for n in (figures.grads, figures.largest, figures.losses, figures.norms)
    ]  # fmt: skip
    return [*row, "yes" if verdict.kind == "equal" else f"**no**: {verdict.kind} {_short(verdict.text)}"]


PARITY_HEAD = ("model", "strategy", "weights", "with", "steps", "gradients", "largest", "losses", "norms", "met")


def zoo_totals(verdicts: Mapping[Case, Verdict]) -> str:
    """Return one line with the number of verdicts of each kind, and of those that `check` did not predict."""
    off = sum(bool(verdict.check) for verdict in verdicts.values())
    return f"{counted(verdicts)} `nbkit.check` predicted {len(verdicts) - off} of these {len(verdicts)} results."


def counted(verdicts: Mapping[Case, Verdict]) -> str:
    """Return one line with the number of verdicts of each kind."""
    number = Counter(verdict.kind for verdict in verdicts.values())
    share = 100 * number["equal"] / max(len(verdicts), 1)
    kinds = ", ".join(f"{number[kind]} {kind}" for kind in KINDS)
    return f"{len(verdicts)} cases: {kinds} ({share:.0f} % equal)."


_TEXT = 400  # characters of a text below the tables
ZOO_TABLES = ((*ZOO_STRATEGIES, CHAINED), ZOO_EXPERTS)


def zoo_table(verdicts: Mapping[Case, Verdict], tables: Iterable[Sequence[str]] = ZOO_TABLES) -> list[str]:
    """Return lines of Markdown: tables with a row for each model or optimizer, then why cells are not equal.

    tables: the strategies in the columns of each.
    """
    rows = list[str]()
    for columns in tables:
        rows += _table({case: verdict for case, verdict in verdicts.items() if case.strategy in columns}, columns)
    for kind in ("wrong", "crash", "late", "refused"):
        some = {case: verdict for case, verdict in verdicts.items() if verdict.kind == kind}
        cut = f"Each line has the case and the text of its error, cut after {_TEXT} characters."
        rows += [f"## {kind.capitalize()}", "", cut, ""] if some else []
        rows += [f"- {_named(case)}: {_short(verdict.text, _TEXT)}" for case, verdict in some.items()]
        rows += [""] if some else []
    off = {case: verdict for case, verdict in verdicts.items() if verdict.check}
    rows += ["## Check said", ""] if off else []
    rows += [f"- {_named(case)}, {verdict.kind}: {verdict.check}" for case, verdict in off.items()]
    return rows


def _table(verdicts: Mapping[Case, Verdict], columns: Sequence[str]) -> list[str]:
    if not verdicts:
        return []
    names = ["chain" if " > " in column else column for column in columns]
    what = "optimizer" if any(case.optimizer for case in verdicts) else "model"
    rows = [f"| {what} | {' | '.join(names)} |", "|---" * (len(columns) + 1) + "|"]
    told = {(case.optimizer or case.model, case.strategy): verdict for case, verdict in verdicts.items()}
    for name in dict.fromkeys(case.optimizer or case.model for case in verdicts):
        words = [_word(told[name, strategy]) if (name, strategy) in told else "" for strategy in columns]
        rows.append(f"| {name} | {' | '.join(words)} |")
    rows += [""]
    for chain in (column for column in columns if " > " in column):
        said = f"The *chain* is one training under `{chain}`, with one step under each strategy."
        if any(verdict.left_out for verdict in verdicts.values()):
            said += " After *less* come the strategies that a chain leaves out, because they were refused."
        if any(verdict.check for verdict in verdicts.values()):
            said += " *+check*: `nbkit.check` predicted another result."
        rows += [said, ""]
    return rows


def _named(case: Case) -> str:
    chain = {CHAINED: "chain", EXPERTS_CHAINED: "chain of experts"}
    return f"{case.optimizer or case.model}, {chain.get(case.strategy, case.strategy)}"


def _word(verdict: Verdict) -> str:
    word = verdict.kind if verdict.kind in ("equal", "refused") else f"**{verdict.kind}**"
    left = f" less {', '.join(verdict.left_out)}" if verdict.left_out and verdict.kind == "equal" else ""
    return f"{word}{left}{' +check' if verdict.check else ''}"
