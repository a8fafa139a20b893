"""Test that an error in handling a message ends the cell with the reason, and that odd text is no error."""

from __future__ import annotations

import io
import time

import pytest

from nbkit import Cluster
from nbkit.errors import CellError
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.notebook.cluster.output.lines import Lines

# Half of a surrogate pair: a Python string may contain it, UTF-8 may not. So it is written as code here.
LONE = r"chr(0xd800)"
SHOWN = r"\ud800"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (f"print('a' + {LONE} + 'b')", f"[0-1] a{SHOWN}b"),
        (f"import sys; print('a' + {LONE} + 'b', file=sys.stderr)", f"[0-1] a{SHOWN}b"),
        (f"from IPython.display import display, Markdown\ndisplay(Markdown({LONE}))", "Markdown object"),
        (f"from IPython.display import display\ndisplay({{'text/plain': {LONE}}}, raw=True)", SHOWN),
        (f"class Odd:\n    def __repr__(self): return {LONE}\nOdd()", SHOWN),
    ],
    ids=["stdout", "stderr", "display", "display as text", "value"],
)
def test_half_of_a_surrogate_pair_is_shown_as_an_escape(
    two: Cluster, capsys: pytest.CaptureFixture[str], source: str, text: str
) -> None:
    results = two.run(source, detach=True).wait(timeout=60)
    assert results.status == "ok"
    shown = capsys.readouterr()
    assert text in shown.out + shown.err


def test_half_of_a_surrogate_pair_in_an_error_is_shown_as_an_escape(
    two: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CellError) as failed:
        two.run(f"raise ValueError('odd ' + {LONE})", detach=True).wait(timeout=60)
    for text in (str(failed.value), failed.value.traceback, capsys.readouterr().err):
        assert f"odd {SHOWN}" in text
        text.encode()


def test_an_error_whose_text_cannot_be_made_ends_the_cell(two: Cluster) -> None:
    source = "class Odd(Exception):\n    def __str__(self): raise Odd\nraise Odd"
    with pytest.raises(CellError, match="failed: Odd: "):
        two.run(source, detach=True).wait(timeout=60)
    assert two.run("rank").values == {0: 0, 1: 1}


def test_a_terminal_that_lacks_a_character_shows_an_escape(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert two.run("print('\\u6f22', rank)", detach=True).wait(timeout=60).status == "ok"
    assert rb"[0] \u6f22 0" in out.buffer.getvalue()


def test_an_error_in_handling_an_output_ends_the_cell_and_stops_the_ranks(
    two: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Lines.feed

    def fails_on_one(self: Lines, now: float, rank: int, name: str, text: str) -> None:
        if "poison" in text:
            raise LookupError("no such line")
        feed(self, now, rank, name, text)

    monkeypatch.setattr(Lines, "feed", fails_on_one)
    two.run("kept = rank")
    source = "import time\nprint('fine')\ntime.sleep(0.3)\nif rank == 1: print('poison')\ntime.sleep(600)"
    reason = r"could not handle output \d \(stream\) of rank 1: LookupError: no such line"
    with pytest.raises(CellError, match=reason) as failed:
        two.run(source, detach=True).wait(timeout=60)
    assert failed.value.rank == 1
    assert "The cell is stopped." in capsys.readouterr().err
    assert two.run("kept").values == {0: 0, 1: 1}


@pytest.mark.long
@pytest.mark.parametrize("name", ["on_record", "_show_values", "_show_all_lines", "_close", "results"])
def test_an_error_at_the_end_of_a_cell_ends_it_with_the_reason(
    two: Cluster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fails(self: Execution, *args: object) -> None:
        raise LookupError(f"{name} is out of order")

    monkeypatch.setattr(Execution, name, fails)
    with pytest.raises(CellError, match=rf"nbkit could not handle .*: LookupError: {name} is out of order"):
        two.run("print(rank)", detach=True).wait(timeout=60)
    monkeypatch.undo()
    assert two.run("rank").values == {0: 0, 1: 1}


def test_a_timer_that_fails_ends_the_cell(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Execution) -> None:
        raise LookupError("the timer is out of order")

    monkeypatch.setattr(Execution, "_on_timer", fails)
    with pytest.raises(CellError, match="could not handle what was about to be shown: LookupError"):
        two.run("import time\nif rank == 0: print('alone')\ntime.sleep(600)", detach=True).wait(timeout=60)
    assert two.run("rank").values == {0: 0, 1: 1}


def test_a_cell_ends_even_if_an_observer_fails(two: Cluster) -> None:
    handle = two.run("import time; time.sleep(0.5)", detach=True)

    def fails(_: Execution) -> None:
        raise LookupError("the card is out of order")

    handle._execution.observers.append(fails)
    with pytest.raises(CellError, match="could not handle the end of the cell: LookupError: the card"):
        handle.wait(timeout=60)


@pytest.mark.long
def test_a_failing_screen_stops_no_rank_and_is_reported_at_the_end(two: Cluster) -> None:
    handle = two.run("import time\nfor i in range(5): print(i); time.sleep(0.1)\nended = True", detach=True)

    class Closed:
        paced = False

        def stream(self, name: str, text: str) -> None:
            raise ValueError("I/O operation on closed file")

    handle._execution.outbox.screen = Closed()
    with pytest.raises(CellError, match=r"a message for the screen \(stream\): ValueError: I/O operation"):
        handle.wait(timeout=60)
    assert two.run("ended").values == {0: True, 1: True}
    assert handle.output[0].endswith("4\n")


def test_an_unreadable_reply_ends_the_wait_for_it(two: Cluster) -> None:
    unreadable = "type('Odd', (), {'__reduce__': lambda self: (int, ('no number',))})()"
    with pytest.raises(ValueError, match="no number"):
        two.connection.client.call_and_wait([0], "builtins:eval", unreadable, timeout=60)
    assert two.run("rank").values == {0: 0, 1: 1}


def test_lost_output_that_cannot_be_fetched_ends_the_cell_with_the_reason(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbkit.notebook.cluster.cells.connection.LATE_SECONDS", 0.1)
    monkeypatch.setattr(Execution, "on_output", lambda *args: None)  # as if it were lost
    log = two.entry.folder / "output" / "rank1.jsonl"
    handle = two.run("import time; print(rank); time.sleep(1)", detach=True)
    time.sleep(0.3)
    log.rename(log.with_suffix(".gone"))
    try:
        with pytest.raises(CellError, match=r"what was asked for of rank 1: ClusterError: FileNotFoundError"):
            handle.wait(timeout=60)
    finally:
        log.with_suffix(".gone").rename(log)
    monkeypatch.undo()
    assert two.run("rank").values == {0: 0, 1: 1}


@pytest.mark.long
def test_lost_output_of_a_rank_removed_by_a_resize_is_not_an_error(two: Cluster) -> None:
    handle = two.run("import time; time.sleep(0.5)", detach=True)
    execution = handle._execution
    assert execution.arrived.keys() == {0, 1}
    execution.on_missing_output(1, 3)
    execution.on_resized(1, [], "")
    execution.on_missing_output(1, 3)
    assert execution.missing.keys() <= {0} and list(handle.wait(timeout=60).values) == [0]
    assert two.run("rank").values == {0: 0, 1: 1}
