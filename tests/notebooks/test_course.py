"""Test the course: each lesson asks questions, and the answers in its text equal what the lesson measures."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from lessons import LESSONS, answers_of, code_of, questions_of, stored

import nbkit
from nbkit.notebook.cluster import registry
from nbkit.notebook.headless import Headless, read_notebook, shown_by, tagged

COURSE = [path for path in LESSONS if questions_of(stored(path))]
"""The lessons that ask by `nbkit.lesson.predict`."""
ON_SLURM = "20_laptop_to_cluster"
"""It needs two nodes: tests/machines/test_lesson.py executes it."""
SAMPLE = "03_data_parallel"
PUBLIC = {"nbkit", "nbkit.errors", "nbkit.schedules", "nbkit.strategy", "nbkit.techniques"}
WIDEST = 0.15
"""The widest band around an answer, as a share of it. An answer in per cent may have 6 points."""


def imported(source: str) -> set[str]:
    code = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith("%"))
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.partition(".")[0] == "nbkit"}


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_a_lesson_asks_at_least_twice_and_answers_every_question(path: Path) -> None:
    notebook = stored(path)
    questions = questions_of(notebook)
    number = str(int(path.stem[:2]))

    assert list(questions) == [f"{number}.{n}" for n in range(1, len(questions) + 1)]
    assert len(questions) >= 2
    assert set(answers_of(notebook)) == set(questions)


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_each_question_accepts_only_a_narrow_band_around_the_answer(path: Path) -> None:
    notebook = stored(path)
    for key, answer in answers_of(notebook).items():
        question = questions_of(notebook)[key]
        if isinstance(answer, str):
            assert answer in question["choices"], key
            continue
        within = question.get("within", "2%")
        size = float(within[:-1]) / 100 if isinstance(within, str) else within / max(abs(answer), 1e-9)
        assert size <= WIDEST or (question.get("unit") == "%" and within <= 6), (key, within)
        low, high = question.get("between", (answer, answer))
        assert low <= answer <= high, key


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_a_lesson_uses_few_ranks_and_its_introduction_is_short(path: Path) -> None:
    notebook = stored(path)
    cluster = re.search(r'^(?:CLUSTER|HERE) = "-n (\d)', "\n".join("".join(cell["source"]) for cell in code_of(notebook)), re.M)

    assert cluster and 2 <= int(cluster[1]) <= 5
    introduction = next("".join(cell["source"]) for cell in notebook["cells"])
    assert len(re.sub(r"```.*?```", "", introduction, flags=re.S).split()) <= 220


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_imports_only_public_modules(path: Path) -> None:
    for cell in code_of(stored(path)):
        assert imported("".join(cell["source"])) <= PUBLIC


def test_question_keys_are_unique_in_the_course() -> None:
    keys = [key for path in COURSE for key in questions_of(stored(path))]

    assert len(keys) == len(set(keys))


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "name", [SAMPLE, *(pytest.param(one.stem, marks=pytest.mark.long) for one in COURSE if one.stem not in (SAMPLE, ON_SLURM))]
)
def test_the_answers_in_the_text_equal_the_measured_values(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = executed(name, tmp_path, monkeypatch)
    rows = {row["key"]: row for row in nbkit.lesson.collect(tmp_path).rows}

    assert set(rows) == set(questions_of(notebook))
    wrong = {key: (row["guess"], row["measured"]) for key, row in rows.items() if row["right"] is not True}
    assert wrong == {}
    assert registry.entries() == []
    if dashboard := tagged(notebook, "dashboard"):
        # A page that shows the notebook later has no kernel, so it cannot show the widget.
        (output,) = dashboard[0]["outputs"]
        assert set(output["data"]) == {"text/plain", "text/html"}
        assert "<img src='data:image/svg+xml;base64," in output["data"]["text/html"] and "rank 2" in shown_by(dashboard[0])


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Execute a lesson for a reader whose guesses are the answers in its text."""
    notebook = read_notebook(next(path for path in LESSONS if path.stem == name))
    for cell in tagged(notebook, "parameters"):
        cell["source"] = re.sub(r'(?m)^CLUSTER = "([^"]*)"', r'CLUSTER = "\1 --ttl 10min"', "".join(cell["source"]))
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "NBKIT_HOME"):
        monkeypatch.setenv(variable, str(folder / variable))
    monkeypatch.setenv("NBKIT_GUESSES", json.dumps(answers_of(notebook)))
    with Headless(folder, lambda cell, text: None) as kernel:
        kernel.run(notebook)  # raises for the first cell that fails
    return notebook


def test_answers_of_reads_numbers_with_units_and_choices_as_text() -> None:
    cells = [
        {"cell_type": "code", "source": 'nbkit.lesson.predict("How many?", key="1.1", unit="S")'},
        {"cell_type": "code", "source": 'nbkit.lesson.predict("Best?", key="1.2", choices=("4M", "1M"))'},
        {"cell_type": "markdown", "source": "<details><summary>Answer 1.1</summary>\n\n**1,200.5 S.** So.\n\n</details>"},
        {"cell_type": "markdown", "source": "<details><summary>Answer 1.2</summary>\n\n**4M.** So.\n\n</details>"},
    ]

    assert answers_of({"cells": cells}) == {"1.1": 1200.5, "1.2": "4M"}
