"""The order in which a pipeline generates: a sequence enters the first stage again when the last one has its token.

Sequences follow one another through the stages, so that as many of them as there are stages keep every rank at work;
of one alone each rank waits for all others.
"""

from __future__ import annotations

from functools import lru_cache

from nbkit.schedules.ops import Op
from nbkit.schedules.schedule import Schedule


@lru_cache(maxsize=64)
def token_rounds(schedule: Schedule, sequences: int, rounds: int) -> tuple[tuple[Op, ...], ...]:
    """For each rank its forwards. Micro-batch n is round n // sequences of sequence n % sequences.

    schedule: says which rank holds which stage. In time of equal stages: of the operations that could run, a rank
    takes the one that is nearest to a token. Every stage takes micro-batches in the order of their numbers.
    """
    last, total = schedule.num_stages - 1, sequences * rounds
    done = [0] * (last + 1)  # micro-batches that have passed each stage
    lists: list[list[Op]] = [[] for _ in range(schedule.ranks)]
    while done[last] < total:
        before = list(done)
        for rank, ops in enumerate(lists):
            for stage in reversed(schedule.stages_of(rank)):
                known = before[stage - 1] if stage else min(before[last] + sequences, total)
                if before[stage] < known:
                    ops.append(Op("F", stage, before[stage]))
                    done[stage] += 1
                    break
    return tuple(map(tuple, lists))
