"""Test that a generating pipeline keeps every rank busy, and uses no token before it is known."""

from __future__ import annotations

import pytest

from nbkit.schedules import BUILT_IN, Op, Schedule
from nbkit.schedules.simulate import token_rounds


def played(schedule: Schedule, sequences: int, rounds: int) -> int:
    """Return the time units until all is done, if each rank follows its list. Fail if ranks wait forever."""
    lists = token_rounds(schedule, sequences, rounds)
    last, at, done, time = schedule.num_stages - 1, [0] * schedule.ranks, set[Op](), 0
    while any(place < len(ops) for place, ops in zip(at, lists, strict=True)):
        ready = []
        for rank, ops in enumerate(lists):
            if at[rank] < len(ops):
                _, stage, number = op = ops[at[rank]]
                assert schedule.rank_of(stage) == rank
                needed = Op("F", stage - 1, number) if stage else Op("F", last, number - sequences)
                if needed in done or needed.micro < 0:
                    ready.append((rank, op))
        assert ready, f"a standstill at {at}"
        for rank, op in ready:
            at[rank] += 1
            done.add(op)
        time += 1
    assert len(done) == schedule.num_stages * sequences * rounds
    return time


@pytest.mark.parametrize("name", BUILT_IN)
def test_token_rounds_of_every_schedule_run_to_their_end(name: str) -> None:
    for ranks in (1, 2, 3, 4):
        for sequences in (1, 2, 3, 5):
            played(Schedule.of(name, ranks, 1), sequences, 4)


def test_as_many_sequences_as_stages_leave_no_rank_idle() -> None:
    schedule, tokens = Schedule.of("1f1b", 4, 1), 32

    assert played(schedule, 4, tokens) == 4 * tokens + 3
    assert 4 * played(schedule, 1, tokens) == 4 * 4 * tokens
    assert played(Schedule.of("interleaved", 4, 1), 8, tokens) <= 2 * 8 * tokens + 8
