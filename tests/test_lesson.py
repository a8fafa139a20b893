"""Test questions of lessons: a guess is locked, judged within a tolerance, stored, and collected from a class."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import nbkit
from nbkit.errors import NbkitError, UsageError
from nbkit.notebook.headless import Headless
from nbkit.notebook.widgets.question_form import question_form


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NBKIT_GUESSES", raising=False)
    return tmp_path


def ask(**more: Any) -> Any:
    return nbkit.lesson.predict("How many S leave a rank?", **{"key": "1.2", "unit": "S", "within": "2%"} | more)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "guesses.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("within", "guess", "right"), [
    ("2%", 1.53, True),
    ("2%", 1.531, False),
    ("2%", 1.47, True),
    (0.25, 1.75, True),
    (0.25, 1.76, False),
    (0, 1.5, True),
    (0, 1.4999, False),
    ("2%", None, None),
])  # fmt: skip
def test_a_guess_is_right_only_within_the_tolerance(within: Any, guess: Any, right: Any) -> None:
    question = ask(within=within)
    question.lock(guess)
    question.check(1.5)

    assert question.verdict.right is right


def test_guess_measured_value_and_formula_are_shown_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    question = ask()
    question.lock(3)
    question.check(1.51, formula=1.5, by="2 (n - 1) / n")

    said = capsys.readouterr().out.splitlines()[-1]
    line = "you said: 3 S · measured: 1.51 S · formula 2 (n - 1) / n: 1.5 S → Look again: too large by 98.68 %."
    assert said == line
    page = question.verdict._repr_html_()
    assert all(f"<b>{value}</b>" in page for value in ("3 S", "1.51 S", "1.5 S"))


def test_the_answer_is_hidden_until_the_guess_is_locked(capsys: pytest.CaptureFixture[str]) -> None:
    question = ask()
    question.check(1.75)

    assert "1.75" not in capsys.readouterr().out and question.verdict is None
    question.lock(1.75)
    assert "measured: 1.75 S → Right, within 2 %." in capsys.readouterr().out.replace(" · ", " ").replace("  ", " ")
    assert question.verdict.right


def test_a_locked_guess_cannot_be_changed() -> None:
    question = ask()
    question.lock(2)
    question.lock(1.5)

    assert question.guess == 2.0


def test_a_choice_is_right_if_it_equals_the_measured_one() -> None:
    for guess, right in (("as much", True), ("less", False)):
        question = ask(unit="", choices=("more", "as much", "less"))
        question.lock(guess)
        question.check("as much")
        assert question.verdict.right is right


@pytest.mark.parametrize(("make", "words"), [
    (lambda: ask(within="much"), "within= is not a distance"),
    (lambda: ask(within=-1), "within= is not a distance"),
    (lambda: ask(between=(3, 1)), "A slider goes from a smaller number"),
    (lambda: ask(choices=("yes",)), "at least two different texts"),
    (lambda: ask(choices=("yes", "yes")), "at least two different texts"),
    (lambda: ask(choices=("yes", "no"), between=(0, 1)), "not both"),
    (lambda: ask().lock("many"), "The guess is not a number"),
    (lambda: ask().lock(float("nan")), "The guess is not a number"),
    (lambda: ask(choices=("yes", "no")).lock("maybe"), "The guess is not one of the choices"),
    (lambda: ask(choices=("yes", "no")).check(3), "The measured value is not one of the choices"),
    (lambda: ask().check(None), "The measured value is missing"),
])  # fmt: skip
def test_invalid_questions_guesses_and_answers_are_refused(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


def test_guesses_and_answers_are_written_as_lines_of_a_file(folder: Path) -> None:
    question = ask()
    question.lock(1.5)
    question.check(1.5, formula=1.5)

    guess, answer = lines(folder)
    assert (guess["kind"], guess["key"], guess["guess"], guess["unit"]) == ("guess", "1.2", 1.5, "S")
    assert (answer["kind"], answer["measured"], answer["formula"], answer["right"]) == ("answer", 1.5, 1.5, True)
    assert guess["user"] and guess["time"].endswith("Z")


def test_a_folder_that_cannot_be_written_only_warns(folder: Path) -> None:
    (folder / "guesses.jsonl").mkdir()
    question = ask()

    with pytest.warns(UserWarning, match=r"The guess is not kept: .*guesses\.jsonl"):
        question.lock(1.5)
    assert question.locked


@pytest.mark.parametrize("in_a_file", [False, True])
def test_guesses_can_come_from_an_environment_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, in_a_file: bool
) -> None:
    text = json.dumps({"1.2": 1.5, "1.3": None})
    (folder / "mine.json").write_text(text)
    monkeypatch.setenv("NBKIT_GUESSES", "mine.json" if in_a_file else text)

    asked = {key: ask(key=key) for key in ("1.2", "1.3", "1.4")}

    assert {key: (one.locked, one.guess) for key, one in asked.items()} == {
        "1.2": (True, 1.5),
        "1.3": (True, None),
        "1.4": (True, None),
    }


@pytest.mark.parametrize("text", ["{not json", "missing.json", "{1}"])
def test_guesses_that_cannot_be_read_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NBKIT_GUESSES", text)

    with pytest.raises(UsageError, match="NBKIT_GUESSES cannot be read"):
        ask()


def test_a_teacher_collects_the_first_guesses_of_a_class(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, guesses in (("ada", (3, 1.5)), ("bob", (1.5,)), ("cyd", (None,)), ("dan", ())):
        home = folder / name / "lessons"
        home.mkdir(parents=True)
        monkeypatch.chdir(home)
        monkeypatch.setenv("JUPYTERHUB_USER", name)
        for guess in guesses:  # after a restart of the kernel, the question is asked again
            question = ask()
            question.lock(guess)
            question.check(1.5)
        ask(key="10.1").lock(7)
    (folder / "ada" / "lessons" / "guesses.jsonl").open("a").write("{half a li\n")

    found = nbkit.lesson.collect(folder)

    first = {row["user"]: row for row in found.rows if row["key"] == "1.2"}
    assert {user: (row["guess"], row["right"], row["tries"]) for user, row in first.items()} == {
        "ada": (3.0, False, 2),
        "bob": (1.5, True, 1),
        "cyd": (None, None, 1),
    }
    assert first["ada"]["measured"] == 1.5
    one, ten = found.by_question()
    assert (one["readers"], one["right"], one["wrong"], one["unknown"], one["open"]) == (3, 1, 1, 1, 0)
    assert (ten["key"], ten["open"]) == ("10.1", 4)
    assert "7 guesses of 4 readers\n1 lines cannot be read" in repr(found)


def test_a_missing_class_folder_is_an_error() -> None:
    with pytest.raises(NbkitError, match="There is no such folder"):
        nbkit.lesson.collect("no-such-class")


def test_without_anywidget_there_is_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)

    assert question_form({}, lambda guess: None) is None


def test_a_notebook_without_a_page_shows_the_answer_as_text_alone(folder: Path) -> None:
    sources = [
        "import nbkit\nsent = nbkit.lesson.predict('How many S?', key='1.2', unit='S')",
        "sent.check(1.75, formula=1.5)",
        "sent.check(1.75)\nsent.lock(1.75)",
    ]
    cells: list[dict[str, Any]] = [{"cell_type": "code", "source": source, "outputs": []} for source in sources]
    with Headless(folder, lambda cell, text: None) as kernel:
        kernel.run({"cells": cells[:2]})
        (waiting,) = cells[1]["outputs"]
        assert waiting["data"]["text/plain"] == "you said: — · measured: 1.75 S · formula: 1.5 S → No guess."
        assert "1.75" not in waiting["data"]["text/html"]
        kernel.run({"cells": cells[2:]})

    assert all("1.75 S" in cell["outputs"][0]["data"]["text/html"] for cell in cells[1:])
