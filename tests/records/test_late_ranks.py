"""Test which rank is named as late, with several groups of ranks, on steps of 100 ms with a delay of 30 ms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbkit.records.readings import Bar, Late, bars, late_rank, usual_bars
from nbkit.records.records import Detail, StepRecord, TimedCall, Traffic
from nbkit.records.run_advice import PipelineLink, links, reading, slow_link
from nbkit.strategy import Strategy

MS = 0.001
DELAY = 30 * MS


def job(
    text: str, *, own: dict[int, dict[str, float]] | None = None, stood: dict[int, dict[str, float]] | None = None
) -> tuple[dict[int, StepRecord], dict[str, tuple[int, ...]]]:
    """Return records of one step. own: extra seconds of a rank's parts. stood: its waits, by axis.

    Waits on "pp" are bubble.
    """
    mesh = Strategy.parse(text, 4).mesh
    groups = {f"{axis} {ranks}": ranks for axis in ("pp", "dp", "tp") for ranks in mesh.groups(axis) if len(ranks) > 1}
    groups["world"] = (0, 1, 2, 3)
    steps = {}
    for rank in range(4):
        more, still = (own or {}).get(rank, {}), (stood or {}).get(rank, {})
        rows = [
            Traffic("recv" if label.startswith("pp") else "all_reduce", label.split()[0], label,
                    None, 1, 8, 1, 0.1, still.get(label.split()[0], 0.0) + 2 * MS)
            for label, ranks in groups.items()
            if rank in ranks
        ]  # fmt: skip
        parts = {"compute": 60 * MS, "data": 1 * MS, "optimizer": 5 * MS, "other": 1 * MS, "bubble": 0.0}
        parts = {part: seconds + more.get(part, 0.0) for part, seconds in parts.items()}
        parts["bubble"] += sum(row.blocked for row in rows if row.axis == "pp")
        parts["exposed"] = sum(row.blocked for row in rows if row.axis != "pp")
        steps[rank] = StepRecord(1, seconds=sum(parts.values()), parts=parts, traffic=tuple(rows))
    return steps, groups


# Mesh order: tp fastest, pp slowest. A rank waits on the first axis that it shares with a late rank.
@pytest.mark.parametrize(
    ("text", "late", "stood"),
    [
        ("dp=2 tp=2", 0, {1: "tp", 2: "dp", 3: "dp"}),
        ("dp=2 tp=2", 3, {2: "tp", 1: "dp", 0: "dp"}),
        ("dp=2 pp=2", 0, {2: "pp", 1: "dp", 3: "dp"}),
        ("dp=2 pp=2", 3, {1: "pp", 2: "dp", 0: "dp"}),
        ("tp=2 pp=2", 2, {0: "pp", 3: "tp", 1: "pp"}),
        ("pp=4", 1, {0: "pp", 2: "pp", 3: "pp"}),
        ("dp=4", 2, {0: "dp", 1: "dp", 3: "dp"}),
    ],
)
@pytest.mark.parametrize("part", ["compute", "data"])
def test_the_late_rank_among_several_groups_is_named(text: str, late: int, stood: dict[int, str], part: str) -> None:
    steps, members = job(text, own={late: {part: DELAY}}, stood={rank: {axis: DELAY} for rank, axis in stood.items()})

    assert late_rank(bars(steps, members)) == Late(late, pytest.approx(DELAY), part)


def test_a_stage_with_more_work_does_not_hide_a_late_rank_of_another_stage() -> None:
    # Stage 1 is ranks 2 and 3, and takes 40 ms more than stage 0; rank 0 is 30 ms later than rank 1.
    own = {0: {"compute": DELAY}, 2: {"compute": 40 * MS}, 3: {"compute": 40 * MS}}
    stood = {0: {"pp": 40 * MS}, 1: {"pp": 40 * MS, "dp": DELAY}, 2: {"pp": DELAY}, 3: {"dp": DELAY}}
    steps, members = job("dp=2 pp=2", own=own, stood=stood)
    found = late_rank(bars(steps, members))
    assert found is not None and (found.rank, found.cause) == (0, "compute")

    # Without that rank, the others wait for the stage.
    steps, members = job("pp=4", own={3: {"compute": 40 * MS}}, stood={rank: {"pp": 40 * MS} for rank in range(3)})
    assert late_rank(bars(steps, members)) == Late(3, pytest.approx(40 * MS), "compute")


def test_a_slow_link_is_distinguished_from_a_slow_rank() -> None:
    # Between ranks 0 and 1 on tp; ranks 2 and 3 wait for them on dp.
    stood = {0: {"tp": DELAY}, 1: {"tp": DELAY}, 2: {"dp": DELAY}, 3: {"dp": DELAY}}
    steps, members = job("dp=2 tp=2", stood=stood)
    found = bars(steps, members)

    assert late_rank(found) == Late(0, pytest.approx(DELAY), "exposed", (1,))
    assert "for ranks 0, 1. Exposed communication takes longer there (36 ms, elsewhere 6 ms: 30" in reading(found)
    # All ranks wait equally long: none waits for another.
    steps, members = job("dp=4", stood={rank: {"dp": DELAY} for rank in range(4)})
    assert late_rank(bars(steps, members)) is None


def test_no_rank_is_named_if_no_rank_waits() -> None:
    steps, members = job("dp=2 tp=2", own={rank: {"data": DELAY} for rank in range(4)})

    assert late_rank(bars(steps, members)) is None


def test_one_disturbed_step_of_three_does_not_change_the_late_rank() -> None:
    late, members = job(
        "dp=2 tp=2", own={0: {"compute": DELAY}}, stood={1: {"tp": DELAY}, 2: {"dp": DELAY}, 3: {"dp": DELAY}}
    )
    long = 10 * DELAY
    chance, _ = job("dp=2 tp=2", own={2: {"other": long}}, stood={0: {"dp": long}, 3: {"tp": long}, 1: {"dp": long}})

    found = late_rank(usual_bars([late, chance, late], members))

    assert found == Late(0, pytest.approx(DELAY), "compute")


def test_the_parts_of_a_median_bar_add_up_to_its_seconds() -> None:
    every = []
    for late in range(3):  # a part that is long in one of three steps is in no median
        steps, members = job("dp=4", own={0: {("data", "other", "compute")[late]: 5 * DELAY}})
        every.append(steps)

    for bar in usual_bars(every, members):
        whole = bar.own + bar.idle + bar.exposed
        assert whole == pytest.approx(bar.seconds), bar
    assert usual_bars(every, members)[0].seconds > 5 * DELAY


def test_a_usual_bar_is_as_long_as_the_measured_step() -> None:
    steps, members = job("dp=4")
    seconds = steps[0].seconds

    def by_clock(clock: float) -> list[Bar]:
        timed = {rank: replace(record, numbers={"seconds": clock}) for rank, record in steps.items()}
        return usual_bars([timed, timed], members)

    longer, shorter = by_clock(seconds + DELAY), by_clock(seconds / 2)
    for bar, plain, half in zip(longer, usual_bars([steps], members), shorter, strict=True):
        assert (bar.seconds, bar.other) == (pytest.approx(seconds + DELAY), pytest.approx(plain.other + DELAY))
        assert bar.compute == plain.compute == pytest.approx(2 * half.compute)
        assert half.own + half.idle + half.exposed == pytest.approx(half.seconds) == pytest.approx(seconds / 2)


def test_the_sentence_about_a_late_rank_gives_two_bar_lengths_and_their_difference() -> None:
    # Compute takes 1.1234 s and 0.7777 s: the others wait 0.3 s, which is not the difference of two bars.
    of = [Bar(rank, 1.2, compute=0.7777, waiting=0.3, other=0.1223, peers=(0, 1, 2)) for rank in range(3)]
    of[1] = Bar(1, 1.2, compute=1.1234, other=0.0766, peers=(0, 1, 2))

    said = reading(of)

    assert "It computes for 1.12 s; ranks 0, 2, with the same share, need 778 ms (342 ms more, 29% of" in said
    late = late_rank(of)
    assert late is not None and late.longer == pytest.approx(0.342)
    assert (late.took, late.twins_took) == (of[1].compute, of[0].compute)


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        ((3,), "for rank 3. It computes for 90 ms; rank 2, with the same share, needs 60 ms (30 ms more, "),
        (
            (2, 3),
            "for rank 3. Compute takes longer there, and on rank 2 with the same share (90 ms, elsewhere 60 ms: 30",
        ),
    ],
)
def test_a_late_rank_is_compared_with_those_that_have_the_same_share(slow: tuple[int, ...], said: str) -> None:
    # dp=2 pp=2: ranks 2 and 3 are stage 1. The others wait in the pipeline for as long.
    own = {rank: {"compute": DELAY} for rank in slow}
    stood = {rank: {"pp": DELAY} for rank in range(4) if rank not in slow}
    stood |= {2: {"dp": DELAY}} if slow == (3,) else {2: {"dp": 1 * MS}}
    steps, members = job("dp=2 pp=2", own=own, stood=stood)
    of = bars(steps, members)

    assert said in reading(of)
    assert "the same share" not in reading(of, alike=False)  # because speeds= gives them different shares


def call(op: str, peer: int, place: int, issued: int, waited: int | None, done: int | None) -> TimedCall:
    blocked = 0 if waited is None or done is None else done - waited
    return TimedCall(op, "pp 1 [0,1]", peer, place, 100, issued, waited, done, blocked)


def test_a_link_is_charged_for_the_wait_after_a_message_was_sent() -> None:
    ahead = 1_000_000  # ns by which rank 1's clock runs ahead
    sender = [
        call("send", 1, 1, 1_000, None, None),
        call("send", 1, 2, 5_000, None, None),
        call("send", 1, 3, 9_000, None, None),
    ]
    receiver = [
        # The receiver waited for the sender until 1000, then 500 for the message.
        call("recv", 0, 1, ahead, ahead + 200, ahead + 1_500),
        # The message was there already.
        call("recv", 0, 2, ahead, ahead + 8_000, ahead + 8_000),
        # The receiver never waited for it.
        call("recv", 0, 3, ahead, None, None),
    ]
    details = {0: Detail(1, calls=tuple(sender)), 1: Detail(1, calls=tuple(receiver))}

    assert links(details, {1: -ahead}) == [PipelineLink(0, 1, 2, 200, pytest.approx(500e-9))]
    assert links({1: details[1]}) == []


def test_the_slow_link_is_the_one_that_stands_out() -> None:
    quick, slow = PipelineLink(0, 1, 8, 800, 2 * MS), PipelineLink(1, 0, 8, 800, DELAY)

    assert slow_link([slow, quick], 0.1) == slow
    assert slow_link([slow, quick], 1.0) is None  # too little of the step
    assert slow_link([slow, quick], 0.02) is None  # more than the whole step: measured in another step
    assert slow_link([slow, PipelineLink(0, 1, 8, 800, DELAY / 2)], 0.1) is None  # the others are slow too
    assert slow_link([], 0.1) is None
    # A slow link is slow in both directions.
    both = [slow, PipelineLink(0, 1, 8, 800, DELAY * 0.9)]
    assert slow_link([*both, PipelineLink(1, 2, 8, 800, 2 * MS)], 0.1) == slow
    assert slow_link([*both, PipelineLink(1, 2, 8, 800, DELAY / 2)], 0.1) is None
    bar = Bar(0, 0.1, compute=0.06, bubble=0.04)
    said = reading([bar], slow=slow)
    assert said.startswith("Messages from rank 1 to rank 0 hold the pipeline up for 30 ms of each step (30%): look at")
