"""mine=ddp: a class of your own does the work of nbkit's data parallelism, ZeRO-1 or split linear layers.

`use(MyDDP)` registers the class, and `strategy="mine"` trains with it. A class has the methods of one kind:

    ddp     __init__(self, model)               before the first step: give every rank the weights of rank 0
            ready(self, parameter)              the gradient of a parameter is complete: `parameter.grad`
            finish(self)                        after the backward pass: every `.grad` is the mean over the ranks

    zero1   part(self, size, rank, ranks)       (start, stop) of the elements that a rank updates, of `size`
            reduce(self, gradients)             return this rank's part of the mean over the ranks of a flat tensor
            gather(self, part, weights)         write the parts of all ranks into `weights`, a flat tensor

    tp      part(self, size, rank, ranks)       (start, stop) of the features that a rank holds, of `size`
            column(self, x, weight, bias)       a linear layer whose output features are divided; x is whole
            row(self, x, weight, bias)          a linear layer whose input features are divided; the output is whole

The classes call torch.distributed on the default group, so the axis of a strategy with `mine=` is the whole world.
`size` is a multiple of `ranks`. The torch half is nbkit/rank/parallel/mine.py. judge.py in the same folder tests if a
class is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nbkit.errors import StrategyError, UsageError
from nbkit.schedules import Op, Schedule, simulate
from nbkit.techniques.key import AnyStrategy, Key
from nbkit.techniques.registry import add, key_of, spelled

METHODS: Mapping[str, tuple[str, ...]] = {
    "ddp": ("ready", "finish"),
    "zero1": ("part", "reduce", "gather"),
    "tp": ("part", "column", "row"),
}
"""Kind -> the methods of its classes. A kind is also the name of the preset that the class replaces."""


@dataclass(frozen=True)
class Judgement:
    """A verdict on code that a user has written.

    name: the name of the class or function. right: True if its results equal nbkit's, and it sends no more bytes.
    numbers: what was compared, or what is wrong. cause: the likely cause; "" if it is right.
    """

    name: str
    right: bool
    numbers: str
    cause: str = ""

    def __repr__(self) -> str:
        if self.right:
            return f"{self.name} is right: {self.numbers}."
        return f"{self.name} is wrong: {self.numbers}.\nLikely cause: {self.cause}"

    def __bool__(self) -> bool:
        return self.right


def kind_of(given: Any) -> str:
    """Return the kind of a class: "ddp", "zero1" or "tp". Raises UsageError if it is none of these."""
    if isinstance(given, type):
        for kind, methods in METHODS.items():
            if all(callable(getattr(given, name, None)) for name in methods):
                return kind
    kinds = "; ".join(f"{kind}: {', '.join(methods)}" for kind, methods in METHODS.items())
    name = getattr(given, "__name__", repr(given))
    raise UsageError(f"{name} is not a class with the methods of a strategy.", numbers=kinds, hint="class MyDDP:")


class MineKey(Key):
    """The kind of the class: ddp, zero1 or tp.

    classes: kind -> the class that this process knows.
    """

    name = "mine"
    rehearsed = True

    def __init__(self, classes: Mapping[str, type] | None = None) -> None:
        self.classes = dict(classes or {})

    def parse(self, text: str) -> str:
        if text not in METHODS:
            numbers = f"kinds: {' '.join(METHODS)}"
            raise StrategyError(f"{'mine=' + text!r} is not a kind of class.", numbers=numbers, hint="ddp mine=ddp")
        return text

    def refuse(self, value: str, strategy: AnyStrategy) -> None:
        axis, size = "tp" if value == "tp" else "dp", strategy.mesh.size
        whole = f"{value} mine={value}"
        if strategy.degree(axis) < size or size == 1 or strategy.zero != (value == "zero1"):
            numbers = f"{axis} {strategy.degree(axis)} of {size} rank{'s' * (size != 1)}, zero {strategy.zero}"
            what = f"mine={value} replaces {value} only if all ranks use {value}, and there are at least two ranks."
            raise StrategyError(what, numbers=numbers, hint=whole)
        if others := {name: other for name, other in strategy.settings.items() if name != self.name}:
            raise StrategyError(
                "Your own class decides what is sent, so these keys have no effect.",
                numbers=spelled(others),
                hint=whole,
            )

    def class_of(self, kind: str) -> type:
        """Return the class of that kind. Raises StrategyError if this process knows none."""
        if kind not in self.classes:
            hint = "nbkit.techniques.use(MyClass)   on all ranks: %%distributed"
            raise StrategyError(f"mine={kind} needs your own class.", numbers="none is known here", hint=hint)
        return self.classes[kind]


def use(own: type) -> None:
    """Train with a class of your own. Afterwards `strategy="mine"` uses this class. Call this on all ranks.

    own: a class with the methods of one kind: `ready` and `finish` (ddp), `part`, `reduce` and `gather` (zero1), or
    `part`, `column` and `row` (tp).

    The class replaces an earlier one of the same kind. Raises UsageError for a class with other methods.
    """
    kind, known = kind_of(own), _key().classes
    known.pop(kind, None)  # "mine" means the class that was added last
    add(MineKey({**known, kind: own}))


def class_in(strategy: AnyStrategy) -> type | None:
    """Return the class with which `strategy` trains, or None. Raises StrategyError if this process does not know it."""
    kind = strategy.settings.get("mine")
    return None if kind is None else _key().class_of(kind)


def in_full(text: str) -> str:
    """Return a strategy in full: replace "mine" at its beginning by the preset and the key that it stands for."""
    first, _, rest = text.strip().partition(" ")
    if first != "mine":
        return text
    if not (known := _key().classes):
        hint = "nbkit.techniques.use(MyDDP) on all ranks;   or name the kind: ddp mine=ddp"
        raise StrategyError("The strategy 'mine' needs your own class.", numbers="none is known here", hint=hint)
    kind = list(known)[-1]
    return f"{kind} mine={kind} {rest}"


def _key() -> MineKey:
    found = key_of("mine")
    assert isinstance(found, MineKey)
    return found


SIZES = ((2, 4), (2, 1), (4, 8), (4, 2), (3, 7))
"""(ranks, micro-batches) of the pipelines for which a schedule is judged."""


def judge_schedule(build: Callable[..., Any]) -> Judgement:
    """Compare a schedule with 1F1B: is it complete, does it end, how long is a step, how many activations are kept?

    build: as for `nbkit.schedules.register`. A forward of a micro-batch takes time 1, a backward takes time 2, and
    messages take no time.
    """
    name = getattr(build, "__name__", "the schedule")
    for ranks, microbatches in SIZES:
        size = f"{ranks} ranks, {microbatches} micro-batches"
        best = simulate(Schedule.of("1f1b", ranks, microbatches))
        try:
            lists = [build(ranks, microbatches, rank) for rank in range(ranks)]
        except Exception as error:
            said = f"{size}: {type(error).__name__}: {error}"
            return Judgement(name, False, said, "the function raises an error for this size: call it by hand.")
        if not all(isinstance(ops, (list, tuple)) and all(map(_is_op, ops)) for ops in lists):
            shown = next(repr(ops)[:60] for ops in lists if not (isinstance(ops, list) and all(map(_is_op, ops))))
            cause = "the function returns no list of Op(kind, stage, micro): does it end with `return ops`?"
            return Judgement(name, False, f"{size}: it gives {shown}", cause)
        ops = tuple(tuple(Op(*op) for op in each) for each in lists)
        try:
            found = simulate(Schedule("1f1b", ranks, microbatches, 1, ops))  # the name determines the stages of ranks
        except StrategyError as error:
            off = f"{error.what.removeprefix('1f1b: ').removesuffix('.')} ({error.numbers})"
            return Judgement(name, False, off, _cause_in(ops, microbatches))
        if found.makespan > best.makespan + 1e-9:
            off = f"{size}: a step takes {found.makespan:g}, with 1F1B {best.makespan:g}"
            return Judgement(name, False, off, _why_slow(ops, microbatches))
        for rank, (kept, least) in enumerate(zip(found.peak, best.peak, strict=True)):
            if kept > least:
                off = f"{size}: rank {rank} keeps {kept} micro-batches at once, with 1F1B {least}"
                cause = "all forwards come before the first backward, as in GPipe."
                if kept < microbatches or least == microbatches:
                    cause = "the warm-up is too long: a rank needs ranks - rank - 1 forwards before its first pair."
                return Judgement(name, False, off, cause)
    ended = simulate(Schedule.of("1f1b", 4, 8))
    said = f"with 4 ranks and 8 micro-batches a step takes {ended.makespan:g}, idle {ended.bubble:.0%}, as 1F1B"
    return Judgement(name, True, said)


def _is_op(op: Any) -> bool:
    return isinstance(op, tuple) and len(op) == 3


def _cause_in(lists: Sequence[Sequence[Op]], microbatches: int) -> str:
    """Return why the lists, one for each rank, cannot run."""
    for rank, ops in enumerate(lists):
        if wrong := next((op for op in ops if op.stage != rank), None):
            return f"a rank works on its own stage, and rank {rank} has an operation of stage {wrong.stage}."
        for kind, word in (("F", "forward"), ("B", "backward")):
            micros = [op.micro for op in ops if op.kind == kind]
            if beyond := [micro for micro in micros if not 0 <= micro < microbatches]:
                last = microbatches - 1
                said = f"micro-batches are 0 to {last}, and rank {rank} has a {word} of micro-batch {beyond[0]}."
                short = " The last batch may have fewer micro-batches than ranks." * (microbatches < len(lists))
                return said + short
            if twice := [micro for micro in sorted(set(micros)) if micros.count(micro) > 1]:
                return f"an operation is twice in the list: rank {rank} has two {word}s of micro-batch {twice[0]}."
            split = {op.micro for op in ops if op.kind == "I"} if kind == "B" else set()
            if missing := sorted(set(range(microbatches)) - set(micros) - split):
                return f"an operation is missing: rank {rank} has no {word} of micro-batch {missing[0]}."
        place = {(op.kind, op.micro): at for at, op in enumerate(ops)}
        for micro in range(microbatches):
            if place.get(("B", micro), len(ops)) < place["F", micro]:
                return f"rank {rank} has the backward of micro-batch {micro} before its forward."
    warm = [_warm(ops) for ops in lists]
    if any(earlier < later for earlier, later in pairwise(warm)):
        return (
            f"a deadlock. The ranks do {', '.join(map(str, warm))} forwards before their first backward, and an "
            "earlier rank needs more of them than a later one."
        )
    if len({tuple(op.micro for op in ops if op.kind == "B") for ops in lists}) > 1:
        return "a deadlock: the ranks have their backwards in different orders of the micro-batches."
    return "a deadlock: each rank waits for an operation that another one has later in its list."


def _warm(ops: Sequence[Op]) -> int:
    """Return the number of forwards before the first other operation."""
    return next((at for at, op in enumerate(ops) if op.kind != "F"), len(ops))


def _why_slow(lists: Sequence[Sequence[Op]], microbatches: int) -> str:
    """Return why the lists take longer than 1F1B."""
    for rank, ops in enumerate(lists):
        warm, needed = _warm(ops), min(microbatches, len(lists) - rank)
        if warm < needed:
            return (
                f"the warm-up is too short: rank {rank} does {warm} forward{'s' * (warm != 1)} before its first "
                f"backward, and {needed} fill the pipeline."
            )
    orders = {tuple(op.micro for op in ops if op.kind == "B") for ops in lists}
    if orders != {tuple(range(microbatches))}:
        return "the order of the micro-batches: the one that is forward first should be backward first."
    return "a rank does a forward where another rank waits for its backward: after the warm-up, take turns."
