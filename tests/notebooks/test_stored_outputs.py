"""Test that lessons have no outputs, and that their rendered copies have outputs without names of a machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lessons import LESSONS, RENDERED, code_of, digest, is_stale, rendered, stored, texts_of, with_outputs

from nbkit.notebook.headless import read_notebook

OF_A_MACHINE = re.compile(r"/(?:home|root|Users|tmp|var|work|mnt|private)/|\b(?!USER@HOST)\w+@\w")
LARGEST = 1_000_000  # bytes


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_has_no_outputs_and_its_copy_has_the_current_ones(path: Path) -> None:
    assert [cell for cell in code_of(stored(path)) if cell["outputs"] or cell["execution_count"]] == []
    assert not is_stale(path), "the code has changed since it was executed: make lessons"
    assert with_outputs(path) == stored(rendered(path)), "the text has changed: make lessons"


def test_every_rendered_copy_belongs_to_a_lesson() -> None:
    assert {path.name for path in RENDERED.glob("*")} == {path.name for path in LESSONS}


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_outputs_are_small_and_any_page_can_show_them(path: Path) -> None:
    notebook = stored(rendered(path))
    outputs = [output for cell in code_of(notebook) for output in cell["outputs"]]

    assert rendered(path).stat().st_size < LARGEST and "widgets" not in notebook["metadata"]
    assert [cell["execution_count"] for cell in code_of(notebook)] == list(range(1, len(code_of(notebook)) + 1))
    assert [output for output in outputs if output["output_type"] == "error"] == []
    # Cells with these tags show messages about a rank killed on purpose, or nbkit's warning.
    loud = {"broken", "warns"}
    quiet = [cell for cell in code_of(notebook) if not loud & set(cell["metadata"].get("tags", []))]
    assert [output for cell in quiet for output in cell["outputs"] if output.get("name") == "stderr"] == []
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert kinds <= {"text/plain", "text/html", "image/png", "image/svg+xml"}


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_outputs_have_no_machine_names_and_no_terminal_codes(path: Path) -> None:
    texts = texts_of(stored(rendered(path)))

    assert len(texts) > 10
    assert [text for text in texts if OF_A_MACHINE.search(text)] == []
    assert [text for text in texts if "\x1b" in text or "\r" in text] == []


def test_the_switches_of_the_lesson_start_late_and_are_spread_over_the_run() -> None:
    notebook = stored(RENDERED / "00_switch_live.ipynb")
    code = "\n".join("".join(cell["source"]) for cell in code_of(notebook))
    steps = int(re.findall(r"^STEPS = (\d+)", code, re.MULTILINE)[0])
    said = re.findall(r" → .* after step (\d+)$", "\n".join(texts_of(notebook)), re.MULTILINE)
    switches = sorted(set(map(int, said)))

    assert len(switches) == 5
    assert switches[0] >= 20 and switches[-1] - switches[0] >= steps / 4


def test_changed_code_makes_outputs_stale_and_changed_text_does_not() -> None:
    def changed(kind: str) -> dict[str, Any]:
        notebook = stored(LESSONS[0])
        next(cell for cell in notebook["cells"] if cell["cell_type"] == kind)["source"] = "something else"
        return notebook

    assert digest(changed("code")) != digest(stored(LESSONS[0])) == digest(changed("markdown"))


def test_read_notebook_removes_outputs_and_execution_counts() -> None:
    read = read_notebook(rendered(LESSONS[0]))

    assert [cell for cell in code_of(read) if cell["outputs"] or cell["execution_count"]] == []
