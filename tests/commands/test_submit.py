"""Test nbkit submit: parameters, the outputs in a new file, and the messages."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbkit.commands import main
from nbkit.errors import UsageError
from nbkit.notebook.headless import set_parameters, text_of


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore the signal handlers after the test: the command sets its own in this process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def notebook_of(*sources: str, tagged: int | None = None) -> dict[str, Any]:
    cells = [
        {"cell_type": "code", "metadata": {"tags": ["parameters"] * (i == tagged)}, "source": source, "outputs": []}
        for i, source in enumerate(sources)
    ]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def sources_of(notebook: dict[str, Any]) -> list[str]:
    return [cell["source"] for cell in notebook["cells"]]


def test_the_first_assignment_gets_the_value_and_keeps_its_comment() -> None:
    notebook = notebook_of(
        "%load_ext nbkit\nä = 'ü'; STEPS = 300  # many\nA, RATE = 1, 2e-3\nTEXT: str = 'a'\nWHERE = f(3)",
        "STEPS = 2",
    )

    set_parameters(notebook, {"STEPS": "5", "RATE": "1", "TEXT": "7", "WHERE": "here", "A": "-2"})

    assert sources_of(notebook) == [
        "%load_ext nbkit\nä = 'ü'; STEPS = 5  # many\nA, RATE = -2, 1.0\nTEXT: str = '7'\nWHERE = 'here'",
        "STEPS = 2",
    ]


def test_only_the_cell_tagged_parameters_is_changed() -> None:
    notebook = notebook_of("STEPS = 1", "STEPS = 2\nON = True", "OTHER = 3", tagged=1)

    set_parameters(notebook, {"STEPS": "5", "ON": "false"})

    assert sources_of(notebook) == ["STEPS = 1", "STEPS = 5\nON = False", "OTHER = 3"]
    with pytest.raises(UsageError, match="no parameter OTHER") as error:
        set_parameters(notebook, {"OTHER": "5"})
    assert "it assigns: STEPS, ON" in str(error.value)


@pytest.mark.parametrize(("before", "given"), [("3", "many"), ("3", "1.5"), ("True", "1"), ("[1]", "(1,)")])
def test_a_parameter_of_another_type_is_refused(before: str, given: str) -> None:
    with pytest.raises(UsageError, match="STEPS is of another type"):
        set_parameters(notebook_of(f"STEPS = {before}"), {"STEPS": given})


@pytest.mark.usefixtures("signals")
def test_outputs_are_saved_in_a_new_file_even_if_the_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "NBKIT_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lessons").mkdir()
    path = tmp_path / "lessons" / "one.ipynb"
    path.write_text(
        json.dumps(notebook_of("N = 2", "import os; print('n', N, os.path.basename(os.getcwd()))", "1 / 0"))
    )
    before = path.read_text()

    assert main(["submit", "lessons/one.ipynb", "-p", "N=3"]) == 1

    (kept,) = tmp_path.glob("one-*.ipynb")
    cells = json.loads(kept.read_text())["cells"]
    said = capfd.readouterr()
    assert text_of(cells[1]) == "n 3 lessons\n"
    assert cells[2]["outputs"][0]["ename"] == "ZeroDivisionError"
    assert path.read_text() == before
    assert "cell 2 of 3: import os" in said.out and "n 3 lessons\n" in said.out
    assert "Code cell 3 of the notebook failed: 1 / 0" in said.err and kept.name in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.ipynb"], "none.ipynb cannot be read"),
        (["one.ipynb", "-p", "N"], "A parameter is a name and a value."),
        (["one.ipynb", "--output", "one.ipynb"], "another file than the notebook"),
        (["one.ipynb", "--gpus", "2"], "are for Slurm"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_runs(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.ipynb").write_text(json.dumps(notebook_of("N = 2")))

    assert main(["submit", *words]) in (1, 2)
    assert said in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["one.ipynb"]
