"""The schedules that come with nbkit: GPipe, 1F1B, interleaved 1F1B, two zero-bubble schedules, and DualPipeV.

A list stays valid if all operations of some micro-batches are removed, because no other operation waits for them. Some
rules need a multiple of the ranks, or at least twice as many micro-batches as ranks. They make lists for more
micro-batches than there are, and drop the surplus.

Zero-bubble schedules split a backward pass: the gradients of weights fill the time in which a rank would wait.
Qi et al. 2023 (arXiv 2401.10241, ZB) and 2024 (arXiv 2405.15362, ZB-V) write these lists by hand, or find them with
an integer program. Here a greedy scheduler makes them, on a grid of equal costs. A free rank takes an input gradient
that is ready, else a forward if it holds fewer than `limit` activations, else a weight gradient. The scheduler tries
different limits and orders of stages, until the last rank is never idle after its first forward. No list can be better.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from itertools import chain, product

from nbkit.errors import StrategyError
from nbkit.schedules import schedule
from nbkit.schedules.schedule import Kind, Op, names, rank_of, register


def gpipe(ranks: int, microbatches: int, rank: int) -> list[Op]:
    """Return all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""
    forwards = [Op("F", rank, micro) for micro in range(microbatches)]
    return forwards + [Op("B", rank, micro) for micro in range(microbatches)]


def one_f_one_b(ranks: int, microbatches: int, rank: int) -> list[Op]:
    """Return forwards and backwards in turns: rank r of n holds activations of at most n - r micro-batches.

    Each backward runs as soon as possible. This is PipeDream-Flush (Narayanan et al. 2021, arXiv 2104.04473).
    """
    warm = min(microbatches, ranks - rank - 1)
    forwards = [Op("F", rank, micro) for micro in range(microbatches)]
    backwards = [Op("B", rank, micro) for micro in range(microbatches)]
    return _one_by_one(forwards, backwards, warm)


def interleaved(ranks: int, microbatches: int, rank: int, stages_per_rank: int) -> list[Op]:
    """Return 1F1B with `stages_per_rank` stages on each rank (2 in a training): stage s is on rank s mod ranks.

    A group has as many micro-batches as there are ranks. Each rank runs a whole group through its first stage, then
    through its second stage, and so on. Then it takes the next group (Narayanan et al. 2021, arXiv 2104.04473, section
    2.2.2).
    """
    groups = -(-microbatches // ranks)
    forwards, backwards = [], []
    for group in range(groups):
        micros = range(group * ranks, (group + 1) * ranks)
        stages = range(rank, ranks * stages_per_rank, ranks)
        forwards += [Op("F", stage, micro) for stage in stages for micro in micros]
        backwards += [Op("B", stage, micro) for stage in reversed(stages) for micro in micros]
    warm = min(len(forwards), (ranks - rank - 1) * 2 + (stages_per_rank - 1) * ranks)
    return [op for op in _one_by_one(forwards, backwards, warm) if op.micro < microbatches]


def dualpipev(ranks: int, microbatches: int, rank: int) -> list[Op]:
    """Return DualPipeV: stages r and 2 ranks - 1 - r are on rank r, and their forwards and backwards alternate.

    The order has eight parts, as in DeepSeek's DualPipeV, the "cut-in-half" DualPipe (github.com/deepseek-ai/DualPipe).
    DeepSeek runs a forward and a backward at the same time. nbkit runs them one after the other.
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
    # In the second half of the last backwards, the gradients of weights are left for later.
    endings = [half for _ in range(rank + 1) for half in (1, 0)]
    for number, half in enumerate(endings):
        do("I" if number > rank else "B", half)
    for _ in range(after):
        ops.append(waiting.popleft())
        do("I", 0)
    return ops + list(waiting)


def _one_by_one(forwards: list[Op], backwards: list[Op], warm: int) -> list[Op]:
    """Return `warm` forwards, then forwards and backwards in turn, then the remaining backwards."""
    steady = chain.from_iterable(zip(forwards[warm:], backwards, strict=False))
    return [*forwards[:warm], *steady, *backwards[len(forwards) - warm :]]


def zb(ranks: int, microbatches: int, rank: int, stages_per_rank: int) -> list[Op]:
    """Return a zero-bubble schedule with stages r, r + ranks, ... on rank r (Qi et al. 2023, ZB)."""
    return zero_bubble(ranks, microbatches, stages_per_rank, v_shaped=False)[rank]


def zbv(ranks: int, microbatches: int, rank: int) -> list[Op]:
    """Return a zero-bubble schedule in a V: stages r and 2 ranks - 1 - r are on rank r (Qi et al. 2024, ZB-V)."""
    return zero_bubble(ranks, microbatches, 2, v_shaped=True)[rank]


@lru_cache(maxsize=64)
def zero_bubble(ranks: int, microbatches: int, stages_per_rank: int, *, v_shaped: bool) -> list[list[Op]]:
    """Return the list of each rank.

    A rank holds at most `stages_per_rank` x `ranks` activations at once (like the first rank of 1F1B), and up to
    `ranks` more if the schedule then ends earlier. Raises StrategyError if no schedule is found, which would be a bug.
    """
    ideal = 3 * stages_per_rank * microbatches + ranks - 1
    least: tuple[int, list[list[Op]]] | None = None
    for limit in range(stages_per_rank * ranks, (stages_per_rank + 1) * ranks + 1):
        for late_forward, late_backward, alternate in product((True, False), (False, True), (False, True)):
            grid = _Grid(ranks, microbatches, stages_per_rank, v_shaped, limit, late_forward, late_backward, alternate)
            end = grid.run(least[0] if least else 4 * ideal + 8 * stages_per_rank * ranks)
            if end is not None:
                least = (end, grid.ops)
            if end == ideal:
                return grid.ops
    if least is None:
        raise StrategyError(
            "No zero-bubble schedule was found.", numbers=f"{ranks} ranks, {microbatches} micro-batches"
        )
    return least[1]


class _Grid:
    """A greedy scheduler with ticks of equal length. In each tick, a rank does one operation or none."""

    def __init__(
        self,
        ranks: int,
        microbatches: int,
        stages_per_rank: int,
        v_shaped: bool,
        limit: int,
        late_forward: bool,
        late_backward: bool,
        alternate: bool,
    ) -> None:
        self.microbatches, self.limit, self.alternate = microbatches, limit, alternate
        num_stages = ranks * stages_per_rank
        placed: list[list[int]] = [[] for _ in range(ranks)]
        for stage in range(num_stages):
            placed[rank_of(stage, ranks, v_shaped=v_shaped)].append(stage)
        self.forward_order = [sorted(stages, reverse=late_forward) for stages in placed]
        self.backward_order = [sorted(stages, reverse=late_backward) for stages in placed]
        # The number of micro-batches that have passed each stage before the current tick.
        self.forwards, self.backwards = [0] * num_stages, [0] * num_stages
        self.weights: list[deque[Op]] = [deque() for _ in range(ranks)]
        self.held = [0] * ranks
        self.ops: list[list[Op]] = [[] for _ in range(ranks)]

    def run(self, below: int) -> int | None:
        """Return the tick at which all operations are done, or None if that is not before tick `below`."""
        left = 3 * self.microbatches * len(self.forwards)
        for tick in range(below):
            if not left:
                return tick
            chosen = [(rank, op) for rank in range(len(self.ops)) if (op := self._choose(rank)) is not None]
            for rank, op in chosen:
                self._do(rank, op)
            left -= len(chosen)
        return None

    def _choose(self, rank: int) -> Op | None:
        forward = self._next_forward(rank) if self.held[rank] < self.limit else None
        backward = self._next_backward(rank)
        if self.alternate and forward and self.ops[rank] and self.ops[rank][-1].kind == "I":
            return forward
        return backward or forward or (self.weights[rank][0] if self.weights[rank] else None)

    def _next_forward(self, rank: int) -> Op | None:
        for stage in self.forward_order[rank]:
            micro = self.forwards[stage]
            if micro < self.microbatches and (stage == 0 or self.forwards[stage - 1] > micro):
                return Op("F", stage, micro)
        return None

    def _next_backward(self, rank: int) -> Op | None:
        last = len(self.forwards) - 1
        for stage in self.backward_order[rank]:
            micro = self.backwards[stage]
            if micro < self.forwards[stage] and (stage == last or self.backwards[stage + 1] > micro):
                return Op("I", stage, micro)
        return None

    def _do(self, rank: int, op: Op) -> None:
        self.ops[rank].append(op)
        if op.kind == "F":
            self.forwards[op.stage] += 1
            self.held[rank] += 1
        elif op.kind == "I":
            self.backwards[op.stage] += 1
            self.weights[rank].append(Op("W", op.stage, op.micro))
        else:
            self.weights[rank].popleft()
            self.held[rank] -= 1


# Do not check these at each import. tests/schedules checks them.
register("gpipe", gpipe, check=False)
register("1f1b", one_f_one_b, check=False)
register("interleaved", interleaved, stages_per_rank=2, check=False)
register("zb", zb, stages_per_rank=2, check=False)
register("zbv", zbv, stages_per_rank=2, v_shaped=True, check=False)
register("dualpipev", dualpipev, stages_per_rank=2, v_shaped=True, microbatches_per_rank=2, check=False)
BUILT_IN = schedule.built_in = names()
