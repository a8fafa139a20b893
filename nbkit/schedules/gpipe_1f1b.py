"""Schedules that follow a rule: GPipe, 1F1B, interleaved 1F1B, DualPipeV.

A list from which every operation of some micro-batches is taken out is still a valid list: nothing else waits for
them. So rules that want a multiple of the ranks, or at least twice as many micro-batches as ranks, are asked for
more than there are, and the rest is dropped.
"""

from __future__ import annotations

from collections import deque
from itertools import chain

from nbkit.schedules.ops import Kind, Op


def gpipe(ranks: int, microbatches: int, rank: int) -> list[Op]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""
    forwards = [Op("F", rank, micro) for micro in range(microbatches)]
    return forwards + [Op("B", rank, micro) for micro in range(microbatches)]


def one_f_one_b(ranks: int, microbatches: int, rank: int) -> list[Op]:
    """A backward as soon as there is one, so that rank r holds at most ranks - r activations.

    PipeDream-Flush, Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1.
    """
    warm = min(microbatches, ranks - rank - 1)
    forwards = [Op("F", rank, micro) for micro in range(microbatches)]
    backwards = [Op("B", rank, micro) for micro in range(microbatches)]
    return _one_by_one(forwards, backwards, warm)


def interleaved(ranks: int, microbatches: int, rank: int, virtual: int) -> list[Op]:
    """1F1B with `virtual` stages on each rank, stage s on rank s mod ranks; the bubble is `virtual` times smaller.

    Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2: groups of `ranks` micro-batches pass one stage of this
    rank after the other.
    """
    groups = -(-microbatches // ranks)
    forwards, backwards = [], []
    for group in range(groups):
        micros = range(group * ranks, (group + 1) * ranks)
        stages = range(rank, ranks * virtual, ranks)
        forwards += [Op("F", stage, micro) for stage in stages for micro in micros]
        backwards += [Op("B", stage, micro) for stage in reversed(stages) for micro in micros]
    warm = min(len(forwards), (ranks - rank - 1) * 2 + (virtual - 1) * ranks)
    return [op for op in _one_by_one(forwards, backwards, warm) if op.micro < microbatches]


def dualpipev(ranks: int, microbatches: int, rank: int) -> list[Op]:
    """Two stages on each rank, r and 2 ranks - 1 - r, whose forwards and backwards alternate.

    DeepSeek's "cut-in-half" DualPipe (github.com/deepseek-ai/DualPipe, dualpipev.py), its eight steps. What they
    run side by side, a forward and a backward, is run one after the other here.
    """
    return [op for op in _dualpipev(ranks, max(microbatches, 2 * ranks), rank) if op.micro < microbatches]


def _dualpipev(ranks: int, microbatches: int, rank: int) -> list[Op]:
    ops: list[Op] = []
    stages = (rank, 2 * ranks - 1 - rank)
    done = {(kind, half): 0 for kind in "FB" for half in (0, 1)}
    waiting: deque[Op] = deque()

    def do(kind: Kind, half: int) -> None:
        counter = ("F" if kind == "F" else "B", half)
        ops.append(Op(kind, stages[half], done[counter]))
        done[counter] += 1
        if kind == "I":
            waiting.append(Op("W", *ops[-1][1:]))

    after = ranks - rank - 1
    for _ in range(2 * after):
        do("F", 0)
    for _ in range(rank + 1):
        do("F", 0)
        do("F", 1)
    for _ in range(after):
        do("I", 1)
        ops.append(waiting.popleft())
        do("F", 1)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        for kind, half in (("F", 0), ("B", 1), ("F", 1), ("B", 0)):
            do(kind, half)  # type: ignore[arg-type]
    for _ in range(after):
        do("B", 1)
        do("F", 1)
        do("B", 0)
    # The second half of the backwards that end the pipeline leaves its weights for later.
    endings = [half for _ in range(rank + 1) for half in (1, 0)]
    for number, half in enumerate(endings):
        do("I" if number > rank else "B", half)
    for _ in range(after):
        ops.append(waiting.popleft())
        do("I", 0)
    return ops + list(waiting)


def _one_by_one(forwards: list[Op], backwards: list[Op], warm: int) -> list[Op]:
    """`warm` forwards, then a forward and a backward in turn, then the backwards that are left."""
    steady = chain.from_iterable(zip(forwards[warm:], backwards, strict=False))
    return [*forwards[:warm], *steady, *backwards[len(forwards) - warm :]]
