"""Test that every schedule is complete, has no deadlock, and idles no longer than its paper says."""

from __future__ import annotations

import dataclasses

import pytest

from nbkit.errors import StrategyError
from nbkit.schedules import BUILT_IN, Op, Schedule, simulate

SPLIT = ("zb", "zbv", "dualpipev")


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_schedule_is_complete_and_runs_to_its_end(name: str) -> None:
    for ranks in range(1, 9):
        for microbatches in range(1, 17):
            schedule = Schedule.of(name, ranks, microbatches)
            timeline = simulate(schedule)  # raises when an operation is missing, or when ranks would wait for ever
            virtual = schedule.virtual
            assert [len(spans) for spans in timeline.spans] == [len(ops) for ops in schedule.ops]
            assert timeline.makespan >= 3 * virtual * microbatches + (ranks - 1) * (ranks <= microbatches)
            assert sorted(s for r in range(ranks) for s in schedule.stages_of(r)) == list(range(schedule.num_stages))
            # The lists are not random, so weight gradients add up in the same order in each run.
            assert Schedule.of(name, ranks, microbatches).ops == schedule.ops


def test_schedules_equal_those_of_the_papers() -> None:
    def text(name: str, rank: int, *args: int) -> str:
        return " ".join(map(str, Schedule.of(name, *args).ops[rank]))

    assert text("gpipe", 0, 2, 3) == "0F0 0F1 0F2 0B0 0B1 0B2"
    assert text("1f1b", 0, 2, 3) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert text("1f1b", 1, 2, 3) == "1F0 1B0 1F1 1B1 1F2 1B2"
    assert text("interleaved", 1, 2, 2) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert text("zbv", 0, 2, 2) == "0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1"
    assert text("dualpipev", 1, 2, 4).startswith("1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0")


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_makespans_and_peaks_equal_the_formulas(ranks: int, microbatches: int) -> None:
    times = {name: simulate(Schedule.of(name, ranks, microbatches)) for name in BUILT_IN}
    assert times["gpipe"].makespan == times["1f1b"].makespan == 3 * (microbatches + ranks - 1)
    assert max(times["gpipe"].peak) == microbatches
    assert times["1f1b"].peak == tuple(min(microbatches, ranks - rank) for rank in range(ranks))
    if microbatches < ranks:
        return
    work = 6 * microbatches
    assert times["interleaved"].makespan == work + 3 * (ranks - 1)
    for name in ("zb", "zbv"):
        assert times[name].makespan == work + ranks - 1
        assert max(times[name].peak) <= 3 * ranks - 1 == max(simulate(Schedule.of("interleaved", ranks, 16)).peak)
    assert max(times["zbv"].peak) <= 2 * ranks
    if microbatches >= 2 * ranks:
        assert times["dualpipev"].makespan == work + ranks - 1


def test_zb_has_at_most_two_fifths_of_the_interleaved_bubble_and_zbv_5_percent() -> None:
    for ranks in (2, 3, 4, 6, 8):
        for microbatches in (ranks, ranks + 1, 2 * ranks, 16):
            zb, interleaved = (simulate(Schedule.of(name, ranks, microbatches)) for name in ("zb", "interleaved"))
            assert zb.makespan * zb.bubble <= 0.4 * interleaved.makespan * interleaved.bubble
    for ranks, microbatches in ((2, 4), (2, 8), (2, 16), (4, 16)):
        assert simulate(Schedule.of("zbv", ranks, microbatches)).bubble <= 0.05


def test_stages_may_differ_and_transfers_take_time() -> None:
    schedule = Schedule.of("1f1b", 2, 4)
    timeline = simulate(schedule, forward=[1, 3], backward_input=[1, 3], backward_weight=[1, 3])
    assert timeline.makespan == 4 * 9 + 1 + 2  # the slow stage is never idle between its first and its last operation
    assert timeline.idle == (1 - 12 / 39, 1 - 36 / 39)
    # Transfers there and back for the first micro-batch, and two more where 1F1B waits for them.
    assert simulate(schedule, transfer=0.5).makespan == 15 + 4 * 0.5


def test_a_schedule_that_cannot_run_is_refused() -> None:
    good = Schedule.of("1f1b", 2, 2)
    first, second = good.ops
    with pytest.raises(StrategyError, match="wait for each other"):
        # Rank 0 wants the gradient of micro-batch 1 before it sends micro-batch 0 on.
        simulate(dataclasses.replace(good, ops=((first[1], first[3], first[0], first[2]), second)))
    with pytest.raises(StrategyError, match="does not do all"):
        simulate(dataclasses.replace(good, ops=(first, second[:-1])))
    with pytest.raises(StrategyError, match="twice"):
        simulate(dataclasses.replace(good, ops=(first, (*second, second[0]))))
    with pytest.raises(StrategyError, match="does not do all"):
        simulate(dataclasses.replace(good, ops=(first, (*second, Op("W", 1, 0)))))


def test_unknown_names_and_wrong_numbers_are_refused() -> None:
    with pytest.raises(StrategyError, match="'2f2b' is not a schedule"):
        Schedule.of("2f2b", 2, 4)
    with pytest.raises(StrategyError, match="at least one rank"):
        Schedule.of("1f1b", 2, 0)
    for name, virtual in (("zbv", 3), ("1f1b", 2), ("interleaved", 1)):
        with pytest.raises(StrategyError, match=f"'{name}' cannot have {virtual} stages"):
            Schedule.of(name, 2, 4, virtual)
    assert simulate(Schedule.of("interleaved", 2, 4, 3)).makespan == 3 * 3 * 4 + 3
    assert [name for name in BUILT_IN if Schedule.of(name, 2, 4).splits] == list(SPLIT)
