"""Zero-bubble schedules: backward is split, and the gradients of weights fill the time in which a rank would wait.

Qi et al. 2023 (arXiv 2401.10241, ZB) and 2024 (arXiv 2405.15362, ZB-V) write these lists by hand or find them with
an integer program. Here they come out of a greedy scheduler on a grid of equal costs: whenever a rank is free it
takes an input gradient that is ready, else a forward while it holds fewer than `limit` activations, else a weight
gradient. Which of several stages goes first, and the limit, are tried in order until the last rank is never idle
after its first forward can begin, which no list can better.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import product

from nbkit.errors import StrategyError
from nbkit.schedules.ops import Op


def zero_bubble(ranks: int, microbatches: int, virtual: int, rank_of: Callable[[int], int]) -> list[list[Op]]:
    """The lists of all ranks; `virtual` stages on each, placed by `rank_of`.

    In flight on a rank: `virtual` x `ranks` activations (those of 1F1B's first rank), and at most `ranks` more where
    that ends earlier. Raises StrategyError when nothing fits, which would be a mistake here.
    """
    ideal = 3 * virtual * microbatches + ranks - 1
    least: tuple[int, list[list[Op]]] | None = None
    for limit in range(virtual * ranks, (virtual + 1) * ranks + 1):
        for late_forward, late_backward, alternate in product((True, False), (False, True), (False, True)):
            grid = _Grid(ranks, microbatches, virtual, rank_of, limit, late_forward, late_backward, alternate)
            end = grid.run(least[0] if least else 4 * ideal + 8 * virtual * ranks)
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
    """Ticks of equal length; in each, every rank does one operation or none."""

    def __init__(
        self,
        ranks: int,
        microbatches: int,
        virtual: int,
        rank_of: Callable[[int], int],
        limit: int,
        late_forward: bool,
        late_backward: bool,
        alternate: bool,
    ) -> None:
        self.microbatches, self.limit, self.alternate = microbatches, limit, alternate
        num_stages = ranks * virtual
        placed = [[stage for stage in range(num_stages) if rank_of(stage) == rank] for rank in range(ranks)]
        self.forward_order = [sorted(stages, reverse=late_forward) for stages in placed]
        self.backward_order = [sorted(stages, reverse=late_backward) for stages in placed]
        # How many micro-batches have passed, per stage; arrivals of the present tick count from the next one on.
        self.forwards, self.backwards = [0] * num_stages, [0] * num_stages
        self.weights: list[deque[Op]] = [deque() for _ in range(ranks)]
        self.held = [0] * ranks
        self.ops: list[list[Op]] = [[] for _ in range(ranks)]

    def run(self, below: int) -> int | None:
        """The tick at which everything is done, None when that is not before `below`."""
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
