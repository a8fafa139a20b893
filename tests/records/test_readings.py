"""Test figures computed from records: bandwidths as in nccl-tests, waiting apart from transfer, sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbkit.records import readings
from nbkit.records.readings import Bar, Late, bars, late_rank, table, traffic_matrix, usual_bars, usual_steps
from nbkit.records.record_file import mean_of
from nbkit.records.records import Group, StepRecord, Traffic
from nbkit.records.run_advice import PipelineLink, largest_loss, reading

N = 4
ALL = {"dp 1 [0,1,2,3]": (0, 1, 2, 3)}
LABEL = "dp 1 [0,1,2,3]"


def row(op: str, size: float, seconds: float = 0.1, blocked: float = 0.0, timed: float = 1) -> Traffic:
    return Traffic(op, "dp", LABEL, None, 1, size, timed, seconds, blocked)


def parts(exposed: float, **others: float) -> dict[str, float]:
    zero = dict.fromkeys(("compute", "bubble", "data", "optimizer", "other"), 0.0)
    return {**zero, "exposed": exposed, **others}


def test_bandwidths_equal_those_of_nccl_tests() -> None:
    # 100 bytes contributed by each of 4 ranks, 0.1 s.
    expected = {
        "all_reduce": (1000, 1500),  # 2 (n-1)/n
        "all_gather": (4000, 3000),  # 400 bytes in all; (n-1)/n
        "reduce_scatter": (1000, 750),
        "broadcast": (1000, 1000),
    }
    steps = {rank: StepRecord(1, traffic=tuple(row(op, 100, blocked=0.025) for op in expected)) for rank in range(N)}

    found = {one.op: one for one in table(steps, ALL)}

    for op, (algbw, busbw) in expected.items():
        assert (found[op].algbw, found[op].busbw) == (pytest.approx(algbw), pytest.approx(busbw))
        assert (found[op].calls, found[op].bytes, found[op].seconds) == (1, 400, pytest.approx(0.1))
        assert found[op].overlap == pytest.approx(0.75)


def test_all_ranks_of_a_stage_are_peers_even_without_a_common_group() -> None:
    # dp=2 tp=2 pp=2: stages of ranks 0 to 3 and 4 to 7; ranks 0 and 3 share no group.
    groups = {f"tp {a}": (a, a + 1) for a in (0, 2, 4, 6)} | {f"dp {a}": (a, a + 2) for a in (0, 1, 4, 5)}
    groups |= {"pp": tuple(range(8))}
    steps = {
        rank: StepRecord(
            1,
            parts=parts(0.1),
            traffic=tuple(
                Traffic("all_reduce", label.split()[0], label, None, 1, 100, 1, 0.1, 0.0)
                for label, members in groups.items()
                if rank in members
            ),
        )
        for rank in range(8)
        if rank != 6
    }

    assert [bar.peers for bar in bars(steps, groups)] == [(0, 1, 2, 3)] * 4 + [(4, 5, 6, 7)] * 3


def test_untimed_operations_have_no_bandwidth() -> None:
    (found,) = table({0: StepRecord(1, traffic=(row("all_reduce", 100, 0.0, timed=0),))}, ALL)

    assert (found.seconds, found.algbw, found.busbw, found.overlap) == (None, None, None, None)


def test_an_untimed_operation_gets_the_time_of_the_last_timed_step() -> None:
    untimed, other = row("all_reduce", 100, 0.0, blocked=0.01, timed=0), row("all_gather", 100, 0.2)
    before = [{0: StepRecord(step, traffic=(untimed,))} for step in (6, 4)]
    before[1:1] = [{0: StepRecord(5, traffic=(row("all_reduce", 100, 0.1, blocked=0.025), row("all_gather", 1)))}]

    now = {0: StepRecord(7, traffic=(untimed, other))}
    found = {one.op: one for one in table(now, ALL, near=before)}

    (timed,) = (one for one in table(before[1], ALL) if one.op == "all_reduce")
    assert found["all_reduce"] == replace(timed, blocked=untimed.blocked)
    assert found["all_gather"] == next(one for one in table(now, ALL) if one.op == "all_gather")

    half = {0: StepRecord(7, traffic=(row("all_reduce", 50, 0.0, timed=0),))}
    (found_half,) = table(half, ALL, near=before)
    assert (found_half.seconds, found_half.busbw) == (timed.seconds, pytest.approx((timed.busbw or 0) / 2))


def test_a_mean_over_timed_and_untimed_steps_has_the_times_of_the_timed_ones() -> None:
    timed = StepRecord(5, traffic=(row("all_gather", 100, 0.1, blocked=0.025),))
    untimed = [
        StepRecord(step, traffic=(row("all_gather", 100, 0.0, blocked=0.025, timed=0),)) for step in range(6, 10)
    ]

    (found,), (alone,) = table({0: mean_of([timed, *untimed])}, ALL), table({0: timed}, ALL)

    for name in ("calls", "bytes", "seconds", "algbw", "busbw", "overlap"):
        assert getattr(found, name) == pytest.approx(getattr(alone, name)), name


def test_waiting_is_the_blocked_time_beyond_that_of_the_last_rank() -> None:
    steps = {}
    for rank, stood in enumerate((0.05, 0.01, 0.04, 0.05)):
        rows = (row("all_reduce", 8, 0.1, stood),)
        steps[rank] = StepRecord(1, seconds=1.0, parts=parts(stood, compute=1 - stood), traffic=rows)

    found = bars(steps, ALL)

    assert [bar.waiting for bar in found] == pytest.approx([0.04, 0, 0.03, 0.04])
    assert [bar.exposed for bar in found] == pytest.approx([0.01] * N)
    # One rank's records are missing, so it is unknown whether it was the last.
    del steps[1]
    assert [bar.waiting for bar in bars(steps, ALL)] == [0, 0, 0]


def test_a_step_that_was_not_measured_has_no_bar() -> None:
    assert bars({0: StepRecord(1, seconds=1.0)}, ALL) == []
    assert usual_bars([], ALL) == [] and reading([]) == "" and late_rank([]) is None


def test_traffic_of_collectives_is_modelled_as_rings_and_of_messages_is_exact() -> None:
    message = Traffic("send", "pp", "pp 2 [0,3]", 3, 2, 64, 0, 0, 0)
    steps = {rank: StepRecord(1, traffic=(row("all_reduce", 100), row("all_to_all", 40))) for rank in range(N)}
    steps[0] = StepRecord(1, traffic=(*steps[0].traffic, message))

    found = traffic_matrix(steps, ALL, N)

    assert found.sent[0] == (0, 0, 0, 64) and sum(map(sum, found.sent)) == 64
    assert found.modelled[0] == pytest.approx((0, 150 + 10, 10, 10))
    assert found.modelled[3] == pytest.approx((150 + 10, 10, 10, 0))
    # The table of operations says the same.
    sums = {one.op: one.sent for one in table(steps, ALL)}
    assert sum(sums[op] for op in ("all_reduce", "all_to_all")) == pytest.approx(sum(map(sum, found.modelled)))
    assert sums["send"] == 64
    # The cluster was resized after this step.
    assert traffic_matrix(steps, ALL, 2) == found


def test_the_sentence_names_the_largest_loss_and_a_remedy() -> None:
    even = [Bar(rank, 1.0, compute=0.58, exposed=0.42) for rank in range(N)]
    rows = table({rank: StepRecord(1, traffic=(row("all_reduce", 100),)) for rank in range(N)}, ALL)

    assert reading(even, rows) == "42% of the step is exposed all-reduce on dp: try zero1 or a larger micro-batch"
    # Of two operations it names the one that ranks waited for, although the other moved more bytes.
    tensor = replace(row("all_reduce", 10, blocked=0.42), axis="tp", group="other")
    both = table(
        {rank: StepRecord(1, traffic=(row("all_reduce", 100, blocked=0.01), tensor)) for rank in range(N)}, ALL
    )
    assert reading(even, both).startswith("42% of the step is exposed all-reduce on tp")
    assert reading([Bar(0, 1.0, compute=0.97, other=0.03)]) == "97% of the step is compute."
    slow = [
        Bar(0, 1.0, optimizer=0.5, compute=0.5),
        *(Bar(rank, 1.0, compute=0.5, waiting=0.5) for rank in range(1, N)),
    ]
    assert "rank 0. The optimizer takes longer there" in reading(slow)
    slow[0] = Bar(0, 1.0, other=0.5, compute=0.5)
    assert reading(slow).endswith(
        "for rank 0. More time passes there outside of the measured parts (500 ms, elsewhere 0 s: 500 ms more, 50% of "
        "the step): look at what only this rank does"
    )
    assert reading([Bar(0, 1.0, compute=0.7, bubble=0.3)]).startswith("30% of the step is pipeline bubble: try more")


def test_a_slightly_late_rank_is_not_named_if_all_ranks_lose_more_to_one_part() -> None:
    found = [Bar(rank, 1.0, compute=0.4, exposed=0.5, waiting=0.1) for rank in range(N)]
    found[1] = Bar(1, 1.0, compute=0.5, exposed=0.5)

    assert late_rank(found) == Late(1, pytest.approx(0.1), "compute")
    assert largest_loss(found) == "exposed"
    assert reading(found).startswith("50% of the step is exposed communication")
    # If only one rank loses the time, that rank is late because of it.
    found[0], found[1] = Bar(0, 1.0, compute=0.9, waiting=0.1), Bar(1, 1.0, compute=0.5, data=0.5)
    assert largest_loss([found[0], found[1]]) == Late(1, pytest.approx(0.1), "data")


def test_a_slightly_late_rank_or_slow_link_does_not_hide_a_larger_bubble() -> None:
    found = [Bar(0, 1.0, bubble=0.50, compute=0.50), *(Bar(rank, 1.0, bubble=0.56, compute=0.44) for rank in (1, 2, 3))]
    assert late_rank(found) == Late(0, pytest.approx(0.06), "compute")
    assert largest_loss(found) == "bubble"
    assert "of the step is pipeline bubble: try more micro-batches" in reading(found)
    link = PipelineLink(0, 1, 8, 800, 0.1)
    assert largest_loss(found, slow=link) == "bubble"

    # If it costs more than the usual bubble, the rank and the link are named.
    late = [Bar(0, 1.0, bubble=0.2, compute=0.8), *(Bar(rank, 1.0, bubble=0.5, compute=0.5) for rank in (1, 2, 3))]
    assert largest_loss(late) == Late(0, pytest.approx(0.3), "compute")
    assert largest_loss(found, slow=replace(link, seconds=0.3)) == replace(link, seconds=0.3)


def test_an_uneven_bubble_outweighs_a_slightly_slow_link() -> None:
    link = PipelineLink(2, 0, 8, 800, 0.08)
    found = [
        Bar(0, 1.0, bubble=0.48, compute=0.52, peers=(0, 1)),
        Bar(1, 1.0, bubble=0.55, compute=0.45, peers=(0, 1)),
        *(Bar(rank, 1.0, compute=1.0, peers=(2, 3)) for rank in (2, 3)),
    ]
    # The cause is the stage with most of the work, not the link, and not rank 0, which is a little slow.
    assert largest_loss(found, slow=link) == Late(2, pytest.approx(0.48), "compute")
    assert "the share is large" in reading(found, slow=link)


def test_the_sentence_blames_nbkit_if_it_examines_strategies_on_the_late_rank() -> None:
    found = [Bar(0, 1.0, compute=0.9, waiting=0.1), *(Bar(rank, 1.0, compute=0.6, waiting=0.4) for rank in range(1, 4))]
    assert "look at" in reading(found)
    found[0] = replace(found[0], examining=0.8)
    assert reading(found) == (
        "nbkit examines strategies for the panel on rank 0. That takes 300 ms of each step (30%) and ends by itself."
    )
    # If every rank examines, or for a shorter time than the rank is late, something else is the cause.
    for others in ([replace(bar, examining=0.8) for bar in found], [replace(found[0], examining=0.1), *found[1:]]):
        assert "nbkit" not in reading(others)


def test_the_sentence_blames_memory_if_the_late_rank_reads_pages_from_disk() -> None:
    found = [Bar(0, 1.0, compute=0.9, waiting=0.1), *(Bar(rank, 1.0, compute=0.6, waiting=0.4) for rank in range(1, 4))]
    found[0] = replace(found[0], faults=2000.0)
    assert reading(found) == (
        "The others wait for rank 0. It takes 300 ms more, 30% of the step. In each step the system reads 2,000 pages "
        "of its memory back from disk: the machine is short of memory, so end other programs, or use a smaller "
        "micro-batch"
    )
    # Memory is not the cause if few pages, a loader's pages of a mapped file, or pages of every rank are read.
    loader = [replace(found[0], data=0.3, compute=0.6), *found[1:]]
    every = [replace(bar, faults=2000.0) for bar in found]
    for others in ([replace(found[0], faults=200.0), *found[1:]], loader, every):
        assert "disk" not in reading(others) and "rank 0" in reading(others)
    alike = [Bar(rank, 1.0, compute=1.0, faults=1500.0) for rank in range(2)]
    assert reading(alike).startswith(
        "100% of the step is compute, and waiting for memory. In each step the system reads"
    )
    assert reading([replace(bar, faults=500.0) for bar in alike]) == "100% of the step is compute."


def test_the_late_rank_among_64_is_named() -> None:
    found = [Bar(rank, 1.0, compute=0.6, waiting=0.4) for rank in range(64)]
    found[17] = Bar(17, 1.0, compute=0.6, data=0.4)

    assert late_rank(found) == Late(17, pytest.approx(0.4), "data")
    assert reading(found) == (
        "The others wait for rank 17. The loader takes longer there (400 ms, elsewhere 0 s: 400 ms more, 40% of the "
        "step): look at its loader"
    )


def test_a_tiny_time_elsewhere_is_not_shown_as_negative() -> None:
    found = [Bar(0, 1.0, compute=0.6, waiting=0.4), Bar(1, 1.0, compute=0.6, data=0.30052)]
    found[0] = replace(found[0], data=2e-6)

    assert "(301 ms, elsewhere 2 µs: 301 ms more" in reading(found)


def test_members_of_returns_the_ranks_of_each_group() -> None:
    assert readings.members_of([Group("a", "dp", (0, 1))]) == {"a": (0, 1)}


def test_usual_steps_skip_the_first_step_and_change_every_five_steps() -> None:
    assert list(usual_steps(newest=41, first=41)) == [41]
    assert list(usual_steps(newest=43, first=41)) == [42, 43]
    windows = [usual_steps(newest, first=41) for newest in range(45, 50)]
    assert set(windows) == {range(42, 46)}
    assert usual_steps(newest=99, first=41) == range(76, 96)
