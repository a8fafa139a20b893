"""Test `%%distributed --tabs`: each rank prints into a tab, and a saved notebook keeps the text."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_client import Cell, Kernel

from nbkit.notebook.cluster.output.rank_tabs import KEPT_CHARACTERS, RankText

WIDGET = "application/vnd.jupyter.widget-view+json"


def outputs(cell: Cell, kind: str) -> list[dict[str, Any]]:
    return [content for _, each, content in cell.messages if each == kind]


def test_each_rank_has_a_tab_and_the_saved_notebook_keeps_its_text(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed --tabs\nprint('rank', rank, '<b>')\nprint('both')\nrank * 7")
    shown, kept = outputs(cell, "display_data"), outputs(cell, "update_display_data")
    assert cell.status == "ok" and len(shown) == len(kept) == 1
    assert WIDGET in shown[0]["data"] and WIDGET not in kept[0]["data"]
    assert shown[0]["transient"] == kept[0]["transient"]
    assert kept[0]["data"]["text/plain"] == "rank 0\n    rank 0 <b>\n    both\n\nrank 1\n    rank 1 <b>\n    both\n"
    page = kept[0]["data"]["text/html"]
    assert page.count("type='radio'") == 2 and "rank 1 &lt;b&gt;\nboth" in page and "<script" not in page
    assert "both" not in "".join(content["text"] for content in outputs(cell, "stream"))
    assert "Out[1]: 7" in cell.text  # values are below the tabs


def test_text_appears_in_the_tab_of_its_rank_while_the_cell_runs(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed --tabs\nimport time\nprint('early', rank)\ntime.sleep(1.5)\nprint('late')")
    said = [(str(content["data"].get("state", "")), at) for at, kind, content in cell.messages if kind == "comm_msg"]
    ended = next(at for at, kind, _ in cell.messages if kind == "update_display_data")
    for rank in range(2):
        assert any(f"early {rank}" in state and "late" not in state and at < ended for state, at in said), said


def test_clear_output_of_a_rank_empties_only_its_tab(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%distributed --tabs\nfrom IPython.display import clear_output, display\nprint('old', rank)\n"
        "if rank == 0: display({'text/plain': 'a picture'}, raw=True); clear_output(wait=True)\nprint('new')"
    )
    kept = outputs(cell, "update_display_data")[0]
    assert kept["data"]["text/plain"] == "rank 0\n    new\n\nrank 1\n    old 1\n    new\n"
    # Clearing the picture also clears the tabs, so they are displayed again.
    kinds = [kind for _, kind, _ in cell.messages if kind in ("clear_output", "display_data")]
    assert kinds == ["display_data", "display_data", "clear_output", "display_data"]
    assert outputs(cell, "display_data")[-1]["transient"] == kept["transient"]


def test_an_error_is_shown_and_the_tabs_keep_earlier_text(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed --tabs\nprint('before')\nif rank == 1: raise ValueError('of one')")
    assert cell.status == "error" and "ValueError: of one" in cell.text
    assert "before" in outputs(cell, "update_display_data")[0]["data"]["text/html"]


def test_results_have_the_output_of_a_cell_with_tabs(kernel: Kernel) -> None:
    kernel.run("%%distributed --tabs --as results\nprint('rank', rank)")
    assert kernel.run("print(results.output)").text == "{0: 'rank 0\\n', 1: 'rank 1\\n'}\n"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (["a\nb"], "a\nb"),
        (["10%\r20%", "\r30%\n"], "30%\n"),
        (["one\r\ntwo\r\n"], "one\ntwo\n"),
        (["\x1b[31mred\x1b[0m"], "red"),
    ],
)
def test_the_text_of_a_rank_is_what_a_terminal_shows(printed: list[str], shown: str) -> None:
    text = RankText()
    for piece in printed:
        text.feed(piece)
    assert str(text) == shown


def test_a_flood_keeps_the_newest_lines_and_counts_the_others() -> None:
    text = RankText()
    for number in range(50_000):
        text.feed(f"line {number}\n")
    assert len(str(text)) < 3 * KEPT_CHARACTERS
    kept = str(text).splitlines()
    assert kept[-1] == "line 49999"
    assert kept[0].startswith(f"… {50_000 - len(kept) + 1:,} lines more")
