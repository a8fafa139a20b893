"""Test the sentence that explains a hang: which ranks wait in what, which rank is the cause, and where ranks differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbkit.notebook.cluster.why import HangVerdict, RankState, Why, verdict
from nbkit.wire.activity import ANYONE, Activity, CodeLine, GroupLog, Operation
from nbkit.wire.process_state import main_thread_of

WORLD = (0, 1, 2, 3)


def line(number: int, calls: str = "") -> CodeLine:
    return CodeLine("/tmp/ipykernel_1/2.py", number, "<module>", 9, calls)


def collective(op: str, number: int, at: int, *, size: int = 16, dtype: str = "float32") -> Operation:
    return Operation(op, "world", "world", WORLD, number, None, size, dtype, seconds=12.0, line=line(at))


def message(op: str, peer: int, number: int = 1, *, tag: int = 0, size: int = 16) -> Operation:
    return Operation(op, "world", "world", WORLD, number, peer, size, "float32", tag, seconds=3.0, line=line(2))


def log(*issued: Operation) -> GroupLog:
    collectives = tuple(each for each in issued if each.peer is None)
    messages = tuple(each for each in issued if each.peer is not None)
    counts: dict[str, dict[int, int]] = {"send": {}, "recv": {}}
    for each in messages:
        counts[each.op][each.peer or 0] = each.number
    last = collectives[-1].number if collectives else 0
    return GroupLog("world", WORLD, last, counts["send"], counts["recv"], collectives, messages)


def waits(rank: int, *issued: Operation) -> RankState:
    """Return the state of a rank that waits in the last operation that it has issued."""
    activity = Activity(rank, 9, 20.0, issued[-1].line, waits=issued[-1], groups={"world": log(*issued)})
    return RankState(rank, "answers", "", activity.line, activity)


def runs(rank: int, *issued: Operation, at: int = 4, calls: str = "", **known: object) -> RankState:
    activity = Activity(rank, 9, 20.0, line(at, calls), groups={"world": log(*issued)})
    return RankState(rank, "answers", "", activity.line, replace(activity, **known))  # type: ignore[arg-type]


def ended(rank: int, *issued: Operation) -> RankState:
    return runs(rank, *issued, cell=None)


def of(*states: RankState) -> HangVerdict:
    return verdict({state.rank: state for state in states})


FIRST, SECOND = collective("all_reduce", 1, 6), collective("all_reduce", 2, 6)


def test_the_sentence_names_the_waiting_ranks_and_the_late_rank() -> None:
    others = [waits(rank, FIRST, SECOND) for rank in (0, 1, 3)]

    found = of(*others, runs(2, FIRST, calls="time.sleep"))

    assert found.sentence == (
        "Ranks 0-1,3 wait in all_reduce #2 on world since 12 s (cell 9 line 6); rank 2 is in time.sleep, cell 9 line 4."
    )
    assert (found.kind, found.ranks) == ("late", (2,))


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (runs(2, FIRST), "rank 2 runs cell 9 line 4"),
        (runs(2, FIRST, reads_data=True), "rank 2 reads data, cell 9 line 4"),
        (ended(2, FIRST), "rank 2 has ended its cell without it"),
        (RankState(2, "dead", "is dead (SIGKILL)"), "rank 2 is dead (SIGKILL)"),
        (RankState(2, "stopped", "is stopped by the system"), "rank 2 is stopped by the system"),
        (RankState(2, "native", "is in native code", line(3)), "rank 2 is in native code, cell 9 line 3"),
        (RankState(2, "silent", "does not answer"), "rank 2 does not answer"),
    ],
)
def test_the_late_rank_may_be_in_any_state(late: RankState, said: str) -> None:
    found = of(*(waits(rank, FIRST, SECOND) for rank in (0, 1, 3)), late)

    assert found.sentence.endswith(f"; {said}.")
    assert found.ranks == (2,)


@pytest.mark.parametrize(
    ("other", "is_past"),
    [(ended(1, FIRST), True), (waits(1, FIRST, collective("barrier", 2, 7)), True), (runs(1, FIRST), False)],
    ids=["it has ended", "it waits elsewhere", "it is on its way"],
)
def test_a_split_model_that_only_some_ranks_call_is_explained(other: RankState, is_past: bool) -> None:
    gather = collective("all_gather", 2, 6)
    alone = waits(0, FIRST, gather)
    assert alone.activity is not None
    called = replace(alone.activity, split_call=line(6, "job.model"), split_by="dp=2 zero=3")

    found = of(replace(alone, activity=called), other)

    said = " The model is split over the ranks (dp=2 zero=3), so all of them have to call job.model: cell 9 line 6 has"
    assert (said in found.sentence) is is_past and found.sentence.startswith(of(alone, other).sentence)


def test_the_last_rank_of_a_chain_of_waiting_ranks_is_the_cause() -> None:
    pair = replace(FIRST, group="dp 2 [0,1]", axis="dp", members=(0, 1))
    first = waits(0, FIRST, pair)
    first = replace(first, activity=replace(first.activity, groups={"world": log(FIRST), pair.group: log(pair)}))  # type: ignore[type-var]

    found = of(first, waits(1, FIRST, SECOND), waits(2, FIRST, SECOND), runs(3, FIRST))

    assert found.ranks == (3,)
    assert "Rank 0 waits in all_reduce #1 on dp" in found.sentence


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (collective("broadcast", 2, 3), "operation"),
        (collective("all_reduce", 2, 3, size=32), "size"),
        (collective("all_reduce", 2, 3, dtype="int32"), "dtype"),
        (replace(SECOND, root=1), "root"),
    ],
)
def test_a_collective_that_differs_on_one_rank_is_a_mismatch(other: Operation, what: str) -> None:
    found = of(*(waits(rank, FIRST, SECOND) for rank in (0, 2, 3)), waits(1, FIRST, other))

    assert found.sentence.startswith(f"Collective #2 on world differs in {what}: all_reduce of 16 bytes float32")
    assert f"({other.line}) on rank 1" in found.sentence and "(cell 9 line 6) on ranks 0,2-3" in found.sentence
    assert (found.kind, found.ranks) == ("mismatch", (1,))


def test_an_earlier_mismatch_is_named_if_ranks_wait_in_a_later_collective() -> None:
    odd = collective("all_reduce", 1, 6, dtype="float64")

    found = of(*(waits(rank, FIRST, SECOND) for rank in (0, 1, 2)), runs(3, odd))

    assert found.sentence.startswith("Collective #1 on world differs in dtype")
    assert "ranks 0-2 wait in all_reduce #2" in found.sentence
    assert found.ranks == (3,)


def test_different_sizes_in_a_completed_all_gather_are_not_the_cause() -> None:
    small, large = collective("all_gather", 1, 5), collective("all_gather", 1, 5, size=32)

    found = of(*(waits(rank, small, SECOND) for rank in (0, 1, 2)), runs(3, large))

    assert (found.kind, found.ranks) == ("late", (3,))


def test_a_collective_that_a_rank_has_skipped_is_named_with_its_line() -> None:
    left_out, later = collective("all_reduce", 1, 3), [collective("all_reduce", n, 5) for n in (1, 2)]

    found = of(*(waits(rank, left_out, later[1]) for rank in (0, 2, 3)), ended(1, later[0]))

    assert found.sentence == (
        "Rank 1 has left out all_reduce #1 on world (cell 9 line 3); "
        "ranks 0,2-3 wait in all_reduce #2 on world since 12 s (cell 9 line 5)."
    )
    assert found.ranks == (1,)


def test_different_lines_alone_are_no_mismatch() -> None:
    root, others = collective("broadcast", 1, 2), collective("broadcast", 1, 4)

    found = of(waits(0, root, SECOND), *(waits(rank, others, SECOND) for rank in (1, 2)), runs(3, others))

    assert (found.kind, found.ranks) == ("late", (3,))


def test_a_send_or_receive_without_its_other_end_names_the_other_rank() -> None:
    assert of(waits(0, message("send", 1)), ended(1)).sentence == (
        "Rank 0 waits in send #1 to rank 1 since 3 s (cell 9 line 2); rank 1 has ended its cell without receiving it."
    )
    assert of(waits(0, message("recv", 1)), runs(1)).ranks == (1,)


def test_a_message_with_different_ends_is_a_mismatch() -> None:
    found = of(waits(0, message("send", 1, tag=5)), waits(1, message("recv", 0, tag=6)))
    assert found.sentence.startswith("Message #1 from rank 0 to rank 1 differs in tag: send")
    assert (found.kind, found.ranks) == ("mismatch", (0, 1))

    assert "differs in size" in of(waits(0, message("send", 1)), waits(1, message("recv", 0, size=4))).sentence


def test_ranks_that_wait_for_each_other_are_a_circle() -> None:
    found = of(waits(0, message("recv", 1)), waits(1, message("recv", 0)))

    assert (found.kind, found.ranks) == ("circle", (0, 1))
    assert found.sentence.endswith(": each waits for another one of them.")


def test_a_receive_from_any_rank_waits_for_all_ranks_that_do_not_wait() -> None:
    assert of(waits(0, message("recv", ANYONE)), runs(1), ended(2), ended(3)).ranks == (1, 2, 3)


def test_the_rank_that_does_not_make_a_group_is_named() -> None:
    made = Operation("new_group", "", "", WORLD, 3, line=line(2))

    found = of(*(waits(rank, made) for rank in (0, 1, 2)), ended(3))

    assert found.sentence == "Ranks 0-2 wait in new_group #3 (cell 9 line 2); rank 3 has ended its cell without it."
    assert found.ranks == (3,)


def test_an_operation_that_all_ranks_have_entered_is_stuck_only_after_a_while() -> None:
    quick = replace(FIRST, seconds=0.1)

    assert not of(*(waits(rank, quick) for rank in WORLD)).stuck
    assert of(*(waits(rank, FIRST) for rank in WORLD)).stuck


def test_the_sentence_says_what_ranks_do_if_none_waits() -> None:
    assert of(*(ended(rank) for rank in WORLD)).sentence == "No cell runs."
    found = of(*(runs(rank, calls="time.sleep") for rank in WORLD))
    assert (found.sentence, found.stuck) == ("Ranks 0-3 are in time.sleep, cell 9 line 4.", False)
    assert of(runs(0), RankState(1, "stopped", "is stopped by the system")).stuck


def test_the_report_has_a_row_for_each_rank() -> None:
    states = {0: waits(0, FIRST), 1: runs(1, calls="time.sleep"), 2: ended(2), 3: RankState(3, "silent", "no answer")}
    text = repr(Why(states, verdict(states), 0.1))

    rows = text.splitlines()[2:]
    assert rows[1].split()[:5] == ["0", "waits", "all_reduce", "#1", "on"] and rows[1].endswith("cell 9 line 6")
    assert rows[2].endswith("cell 9 line 4, in time.sleep")
    assert rows[3].split() == ["2", "idle"]
    assert rows[4].split() == ["3", "no", "answer"]
    assert "<b>Rank 0 waits" in Why(states, verdict(states), 0.1)._repr_html_()


def test_the_main_thread_is_the_last_of_a_dump() -> None:
    dump = (
        'Thread 0x00007f (most recent call first):\n  File "/a/other.py", line 5 in wait\n\n'
        'Current thread 0x00008f (most recent call first):\n  File "/a b/cell.py", line 4 in <module>\n'
        '  File "/a/shell.py", line 90 in run\n'
    )

    assert [(each.file, each.line, each.function) for each in main_thread_of(dump)] == [
        ("/a b/cell.py", 4, "<module>"),
        ("/a/shell.py", 90, "run"),
    ]
