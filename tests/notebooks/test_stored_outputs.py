"""The lessons are stored with what they show: the outputs of the code beside them, and nothing of one machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lessons import LESSONS, code_of, digest, is_stale, stored, texts_of

from nbkit.notebook.headless import read_notebook

OF_A_MACHINE = re.compile(r"/(?:home|root|Users|tmp|var|work|mnt|private)/|\b(?!USER@HOST)\w+@\w")
LARGEST = 1_000_000  # bytes


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_the_outputs_are_those_of_the_code(path: Path) -> None:
    assert not is_stale(stored(path)), "the code has changed since it was executed: make lessons"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_the_outputs_are_small_and_can_be_shown_by_any_page(path: Path) -> None:
    notebook = stored(path)
    outputs = [output for cell in code_of(notebook) for output in cell["outputs"]]

    assert path.stat().st_size < LARGEST and "widgets" not in notebook["metadata"]
    assert [cell["execution_count"] for cell in code_of(notebook)] == list(range(1, len(code_of(notebook)) + 1))
    assert [output for output in outputs if output["output_type"] == "error"] == []
    # The cell is meant to show the words about a rank that was killed on purpose.
    quiet = [cell for cell in code_of(notebook) if "broken" not in cell["metadata"].get("tags", [])]
    assert [output for cell in quiet for output in cell["outputs"] if output.get("name") == "stderr"] == []
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert kinds <= {"text/plain", "text/html", "image/png", "image/svg+xml"}


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_the_outputs_name_nothing_of_a_machine_and_hold_no_codes(path: Path) -> None:
    texts = texts_of(stored(path))

    assert len(texts) > 10
    assert [text for text in texts if OF_A_MACHINE.search(text)] == []
    assert [text for text in texts if "\x1b" in text or "\r" in text] == []


def test_the_switches_of_the_lesson_are_apart_and_begin_when_there_is_a_curve() -> None:
    notebook = stored(next(path for path in LESSONS if path.stem == "02_switch_live"))
    code = "\n".join("".join(cell["source"]) for cell in code_of(notebook))
    steps = int(re.findall(r"^STEPS = (\d+)", code, re.MULTILINE)[0])
    said = re.findall(r" → .* after step (\d+)$", "\n".join(texts_of(notebook)), re.MULTILINE)
    switches = sorted(set(map(int, said)))

    assert len(switches) == 5
    assert switches[0] >= 20 and switches[-1] - switches[0] >= steps / 4


def test_other_code_makes_outputs_stale_and_other_words_do_not() -> None:
    def changed(kind: str) -> dict[str, Any]:
        notebook = stored(LESSONS[0])
        next(cell for cell in notebook["cells"] if cell["cell_type"] == kind)["source"] = "something else"
        return notebook

    assert is_stale(changed("code")) and digest(changed("markdown")) == digest(stored(LESSONS[0]))


def test_a_notebook_is_read_as_before_it_was_executed() -> None:
    read = read_notebook(LESSONS[0])

    assert [cell for cell in code_of(read) if cell["outputs"] or cell["execution_count"]] == []
