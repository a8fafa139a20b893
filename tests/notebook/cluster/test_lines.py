"""Test labels, folding and the moving line without a cluster. The tests pass the time to `Lines`."""

from __future__ import annotations

from nbkit.notebook.cluster.output.lines import FOLD_SECONDS, UP, Lines


def shown(lines: Lines, now: float, *, final: bool = False) -> str:
    return "".join(text for _, text in lines.take(now, final=final))


def test_a_line_that_every_rank_printed_is_folded_and_shown_at_once() -> None:
    lines = Lines([0, 1, 2, 3])
    for rank in range(4):
        lines.feed(0.0, rank, "stdout", "hello\n")
    assert shown(lines, 0.0) == "[0-3] hello\n"


def test_a_line_waits_for_equal_lines_no_longer_than_the_window() -> None:
    lines = Lines([0, 1])
    lines.feed(0.0, 0, "stdout", "late\n")
    assert shown(lines, FOLD_SECONDS / 2) == ""
    assert lines.due(FOLD_SECONDS / 2) == FOLD_SECONDS / 2
    assert shown(lines, FOLD_SECONDS) == "[0] late\n"
    lines.feed(1.0, 1, "stdout", "late\n")
    assert shown(lines, 1.0 + FOLD_SECONDS) == "[1] late\n"


def test_folding_never_reorders_the_lines_of_a_rank() -> None:
    lines = Lines([0, 1])
    lines.feed(0.0, 0, "stdout", "a\nb\n")
    lines.feed(0.0, 1, "stdout", "b\na\n")
    text = shown(lines, 1.0)
    rank_1 = [line.split()[1] for line in text.splitlines() if "1" in line.split()[0]]
    rank_0 = [line.split()[1] for line in text.splitlines() if line.startswith(("[0]", "[0-1]"))]
    assert rank_0 == ["a", "b"]
    assert rank_1 == ["b", "a"]


def test_a_line_printed_twice_by_one_rank_is_shown_twice() -> None:
    lines = Lines([0, 1])
    lines.feed(0.0, 0, "stdout", "x\nx\n")
    lines.feed(0.0, 1, "stdout", "x\nx\n")
    assert shown(lines, 0.0) == "[0-1] x\n[0-1] x\n"


def test_stdout_and_stderr_keep_their_order_and_their_names() -> None:
    lines = Lines([0])
    lines.feed(0.0, 0, "stdout", "out\n")
    lines.feed(0.0, 0, "stderr", "err\n")
    assert lines.take(0.0) == [("stdout", "[0] out\n"), ("stderr", "[0] err\n")]


def test_spaces_blank_lines_and_unicode_arrive_unchanged() -> None:
    lines = Lines([0])
    lines.feed(0.0, 0, "stdout", "    indented  \n\nhéé 漢字 🚀\n")
    assert shown(lines, 0.0) == "[0]     indented  \n[0] \n[0] héé 漢字 🚀\n"


def test_a_line_cut_between_two_messages_is_one_line() -> None:
    lines = Lines([0])
    lines.feed(0.0, 0, "stdout", "half ")
    lines.feed(0.05, 0, "stdout", "and half\n")
    assert shown(lines, 0.05) == "[0] half and half\n"


def test_progress_bars_of_all_ranks_are_one_moving_line() -> None:
    lines = Lines([0, 1])
    text = ""
    for step in range(50):
        now = step * 0.05
        for rank in range(2):
            lines.feed(now, rank, "stderr", f"\r{step * 2:3d}%")
        text += shown(lines, now)
    assert "\n" not in text
    states = [state for state in text.split("\r") if state.strip()]
    assert 10 < len(states) <= 26  # only ten updates a second are shown
    assert states[-1].startswith("[0-1]")


def test_the_moving_line_is_that_of_the_rank_furthest_behind() -> None:
    lines = Lines([0, 1])
    lines.feed(0.0, 0, "stderr", "\r100%")
    lines.feed(0.0, 1, "stderr", "\r 20%")
    assert shown(lines, 1.0).strip() == "[0-1]  20%"


def test_a_line_printed_beside_a_bar_goes_above_it() -> None:
    lines = Lines([0])
    lines.feed(0.0, 0, "stderr", "\r 10%")
    before = shown(lines, 1.0)
    lines.feed(1.05, 0, "stdout", "loss 2.0\n")
    after = shown(lines, 1.05)
    screen = _terminal(before + after)
    assert screen == ["[0] loss 2.0", "[0]  10%"]


def test_the_last_state_of_a_bar_stays() -> None:
    lines = Lines([0])
    lines.feed(0.0, 0, "stderr", "\r 10%")
    text = shown(lines, 1.0)
    lines.feed(1.2, 0, "stderr", "\r100%\n")
    text += shown(lines, 1.2)
    assert _terminal(text) == ["[0] 100%"]  # it may be one of several bars that still move
    wait = lines.due(1.21)
    assert wait is not None
    text += shown(lines, 1.21 + wait)
    assert _terminal(text) == ["[0] 100%", ""]


def test_nested_bars_are_one_moving_line() -> None:
    """Feed bars as tqdm draws them: each step moves down to the inner bar and back up."""
    lines = Lines([0, 1])
    text, now = "", 0.0
    for epoch in range(3):
        for rank in range(2):
            lines.feed(now, rank, "stderr", f"\repoch {epoch}")
        for step in range(4):
            now += 0.2
            for rank in range(2):
                lines.feed(now, rank, "stderr", "\n")
                lines.feed(now, rank, "stderr", f"\rbatch {step}")
                text += shown(lines, now)
                lines.feed(now, rank, "stderr", UP)
            text += shown(lines, now + 0.15)
            assert _terminal(text) == [f"[0-1] epoch {epoch}  batch {step}"]
        for rank in range(2):  # leave=False
            lines.feed(now, rank, "stderr", f"\n\r       \r{UP}")
    for rank in range(2):
        lines.feed(now, rank, "stderr", "\repoch 3\n")
        lines.feed(now, rank, "stdout", "over\n")
    text += shown(lines, now + 1)
    assert _terminal(text) == ["[0-1] epoch 3", "[0-1] over", ""]


def test_nested_bars_that_stay_become_lines_when_the_cell_ends() -> None:
    lines = Lines([0])
    lines.feed(0.0, 0, "stderr", f"\router 50%\n\rinner 10%{UP}")
    assert shown(lines, 1.0) == "[0] outer 50%  inner 10%"
    assert _terminal("[0] outer 50%  inner 10%" + shown(lines, 2.0, final=True)) == [
        "[0] outer 50%",
        "[0] inner 10%",
        "",
    ]


def test_nested_bars_continue_after_the_outer_one_became_a_line() -> None:
    lines = Lines([0])
    lines.feed(0.0, 0, "stderr", "\router\n")
    before = shown(lines, 1.0)  # the rest comes late
    lines.feed(2.0, 0, "stderr", f"\rinner{UP}")
    lines.feed(2.0, 0, "stderr", "\router again")
    assert _terminal(before + shown(lines, 2.0)) == ["[0] outer", "[0] outer again  inner"]


def test_text_without_a_newline_is_shown_when_the_cell_ends() -> None:
    lines = Lines([0])
    lines.feed(0.0, 0, "stdout", "no newline")
    assert shown(lines, 0.0, final=True) == "[0] no newline\n"


def test_windows_line_ends_are_line_ends() -> None:
    lines = Lines([0])
    lines.feed(0.0, 0, "stdout", "one\r\ntwo\r\n")
    assert shown(lines, 0.0) == "[0] one\n[0] two\n"


def _terminal(text: str) -> list[str]:
    """Return the rows of a screen that understands newline and carriage return."""
    rows, column = [""], 0
    for letter in text:
        if letter == "\n":
            rows.append("")
            column = 0
        elif letter == "\r":
            column = 0
        else:
            row = rows[-1].ljust(column)
            rows[-1] = row[:column] + letter + row[column + 1 :]
            column += 1
    return [row.rstrip() for row in rows]


def test_text_without_a_newline_is_shown_when_nothing_follows_it() -> None:
    lines = Lines([0])
    lines.feed(0.0, 0, "stdout", "waiting for it ...")
    assert shown(lines, 0.01) == ""
    wait = lines.due(0.01)
    assert wait is not None
    assert shown(lines, 0.01 + wait) == "[0] waiting for it ..."
    lines.feed(5.0, 0, "stdout", " done\n")
    assert _terminal("[0] waiting for it ..." + shown(lines, 5.0)) == ["[0] waiting for it ... done", ""]


def test_text_without_a_newline_is_shown_while_it_grows() -> None:
    lines = Lines([0])
    seen = [lines.feed(at / 100, 0, "stdout", "x") or shown(lines, at / 100) for at in range(100)]
    assert "[0] xxxx" in "".join(seen)


def test_fifty_thousand_equal_lines_are_folded() -> None:
    lines = Lines([0, 1])
    for rank in range(2):
        lines.feed(0.0, rank, "stdout", "x\n" * 50_000)
    assert shown(lines, 0.0) == "[0-1] x\n" * 50_000


def test_the_moving_line_is_cleared_for_other_output_and_drawn_again() -> None:
    lines = Lines(ranks=[0, 1])
    lines.feed(0.0, 0, "stdout", "first\n\rstep 1")
    shown = lines.take(1.0)
    assert "".join(text for _, text in shown).endswith("[0] step 1")
    ((name, wiped),) = lines.make_way()
    assert (name, wiped) == ("stdout", f"\r{' ' * len('[0] step 1')}\r") and lines.make_way() == []
    assert lines.take(2.0) == [("stdout", "[0] step 1")]


def test_the_progress_line_of_a_training_is_hidden_beside_its_card() -> None:
    lines = Lines((0,))
    lines.feed(0.0, 0, "stdout", "\rstep 5/300 · loss 2.314 · 4,442 tokens/s")
    assert "step 5/300" in "".join(text for _, text in lines.take(0.1))
    lines.has_card = True
    lines.make_way()
    lines.feed(1.0, 0, "stdout", "\rstep 6/300 · loss 2.310 · 4,442 tokens/s")
    assert "step 6" not in "".join(text for _, text in lines.take(2.0))
    lines.feed(3.0, 0, "stdout", "\rcopying 40 %")
    assert "copying" in "".join(text for _, text in lines.take(4.0))
