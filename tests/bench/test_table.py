"""Test the table: what a row contains, and which rows the pages of the manual show."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.__main__ import COMPARED, RESULTS
from bench.table import absolute, compared, comparisons, joined, markdown, quote, skipped, write


def test_a_comparison_shows_both_sides_the_ratio_and_the_verdict() -> None:
    row = compared("a cell", [0.005] * 4, "peer", [0.010] * 4, [0.005] * 4, 1.0, "ms")

    assert row.cells() == [
        "a cell",
        "5 ms",
        "peer 10 ms",
        "0.500 [0.500, 0.500]",
        "1.000 [1.000, 1.000]",
        "≤ 1 x",
        "yes",
    ]


def test_a_figure_above_its_bar_or_with_lost_data_is_not_met() -> None:
    assert absolute("start", [2.0] * 3, 1.5, "s").met is False
    assert absolute("start", [1.0] * 3, 1.5, "s").met is True

    lost = absolute("bytes", [1.1], 1.3, "x", wrong="3 missing")

    assert lost.met is False
    assert "3 missing" in lost.nbkit


def test_a_peer_that_could_not_run_is_listed_with_the_reason() -> None:
    row = skipped("a cell", "nbdistributed", "not installed")

    assert "| a cell |  | nbdistributed: not installed |" in markdown([row], "a machine")


def test_quote_fills_each_place_of_a_page_with_the_rows_of_its_pattern(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "before\n<!-- bench: ^a -->\n{}<!-- /bench -->\nbetween\n<!-- bench: ^b -->\n{}<!-- /bench -->\nafter\n"
    page.write_text(text.format("old", ""))
    rows = [compared(f"{name} \\1", [0.005] * 4, "peer", [0.01] * 4, [0.005] * 4, 1, "ms") for name in "ab"]
    table = markdown(rows, "a machine")
    first, second = (comparisons(table, pattern) for pattern in ("^a", "^b"))

    quote(page, table)
    quote(page, table)

    assert ("a \\1" in first, "b \\1" in first) == (True, False)
    assert page.read_text() == text.format(first, second)


def test_a_page_without_places_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here\n")

    with pytest.raises(ValueError, match="<!-- bench: PATTERN -->"):
        quote(page, "new\n")


def test_each_comparison_of_the_results_is_on_one_page_of_the_manual() -> None:
    stored = comparisons(RESULTS.with_suffix(".md").read_text()).splitlines()[2:]
    shown = [line for page in COMPARED for line in page.read_text().splitlines() if line in stored]

    assert len(stored) > 40
    assert sorted(shown) == sorted(stored)


def test_separate_runs_are_joined_and_a_page_shows_only_rows_with_a_ratio(tmp_path: Path) -> None:
    apart = (
        compared("a cell", [0.005] * 4, "peer", [0.010] * 4, [0.005] * 4, 1.0, "ms"),
        absolute("start", [1.0], 2, "s"),
    )
    for number, row in enumerate(apart):
        write([row], f"machine {number}", tmp_path / f"part{number}")

    rows, machine = joined([tmp_path / "part0.json", tmp_path / "part1.json"])
    table = markdown(rows, machine)

    assert (rows, machine) == (list(apart), "machine 0")
    assert "| start |" in table and "| start |" not in comparisons(table)
    assert "| a cell |" in comparisons(table) and comparisons(table).startswith("| what |")
