"""Test the form of a question in its own page and in JupyterLab: with mouse, keyboard, and accessible names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbkit.notebook.widgets.question_form import STATIC

MODEL = """
window.model = {
  state: STATE, sent: [], heard: {},
  get(name) { return this.state[name]; },
  set(name, value) { this.state[name] = value; this.heard[`change:${name}`]?.(); },
  on(event, act) { this.heard[event] = act; },
  off() {},
  send(message) { this.sent.push(message); },
};
question.render({ model: window.model, el: document.getElementById("here") });
"""
NUMBER = {"question": "How many S leave a rank?", "unit": "S", "low": 0, "high": 8, "choices": [], "band": "within 2 %"}
CHOICE = {"question": "More or less?", "unit": "", "low": None, "high": None, "choices": ["more", "less"], "band": ""}


@pytest.fixture(scope="module")
def window(browser: Any) -> Iterator[Any]:
    window = browser.new_context(viewport={"width": 800, "height": 400})
    yield window
    window.close()


def shown(window: Any, asked: dict[str, Any], answer: dict[str, Any] | None = None) -> Any:
    state = json.dumps({"asked": asked, "answer": answer or {"locked": False, "guess": None}})
    script = (STATIC / "question.js").read_text().replace("export default", "const question =")
    page = window.new_page()
    page.set_content(
        f"<!doctype html><style>{(STATIC / 'question.css').read_text()}</style><div id='here'></div>"
        f"<script type='module'>{script}{MODEL.replace('STATE', state)}</script>"
    )
    page.wait_for_selector(".nbkit-question")
    return page


def sent(page: Any) -> Any:
    return page.evaluate("model.sent")


def test_a_number_can_be_locked_with_the_keyboard_alone(window: Any) -> None:
    page = shown(window, NUMBER)

    page.keyboard.press("Tab")  # the slider
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("spinbutton", name=NUMBER["question"]).input_value() == "4.05"
    page.keyboard.press("Tab")
    page.keyboard.type("1.5")
    assert page.get_by_role("slider", name=NUMBER["question"]).input_value() == "1.5"
    page.keyboard.press("Enter")

    assert sent(page) == [{"lock": 1.5}]
    page.evaluate("model.set('answer', {locked: true, guess: 1.5})")
    assert page.get_by_role("status").inner_text() == "Locked. You said 1.5 S. Run the next cells."
    assert page.get_by_role("spinbutton").is_disabled() and not page.get_by_role("button").all()
    page.close()


def test_a_choice_is_locked_by_a_click(window: Any) -> None:
    page = shown(window, CHOICE)

    assert page.get_by_role("group", name="More or less?").count() == 1
    page.get_by_role("button", name="Lock my guess").click()
    assert page.get_by_role("status").inner_text() == "Choose an answer first."
    page.get_by_label("less").check()
    page.get_by_role("button", name="Lock my guess").click()
    assert sent(page) == [{"lock": "less"}]
    page.close()


def test_a_reader_can_answer_i_do_not_know(window: Any) -> None:
    page = shown(window, NUMBER)

    page.get_by_role("button", name="I do not know").click()
    assert sent(page) == [{"lock": None}]
    page.evaluate("model.set('answer', {locked: true, guess: null})")
    assert "You do not know" in page.get_by_role("status").inner_text()
    page.close()


def test_a_page_that_loads_later_shows_the_guess(window: Any) -> None:
    page = shown(window, CHOICE, {"locked": True, "guess": "more"})

    assert page.get_by_label("more").is_checked() and page.get_by_label("more").is_disabled()
    page.close()


def test_a_kernel_that_does_not_answer_is_reported_as_busy(window: Any) -> None:
    page = shown(window, NUMBER)

    page.get_by_role("spinbutton").fill("2")
    page.get_by_role("button", name="Lock my guess").click()
    page.wait_for_function("document.querySelector('[role=status]').textContent.includes('The kernel is busy')")
    page.close()


@pytest.mark.long
def test_the_answer_in_jupyterlab_comes_when_the_guess_is_locked(open_page: Any, lab: dict[str, str]) -> None:
    sources = [
        "import nbkit\nsent = nbkit.lesson.predict('How many S?', key='1.2', unit='S', between=(0, 8))",
        "sent.check(1.5, formula=1.5)",
    ]
    cells = [
        {"cell_type": "code", "metadata": {}, "source": source, "outputs": [], "execution_count": None, "id": f"c{n}"}
        for n, source in enumerate(sources)
    ]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    page = open_page(notebook, "question.ipynb")
    page.run(0)
    assert "Lock your guess first" in page.run(1) and "1.5" not in page.output(1)
    box = page.cell(0).get_by_role("spinbutton", name="How many S?")
    box.fill("1.6")
    box.press("Enter")

    page.wait_for_output(1, "too large by 6.667 %")
    assert "1.5 S" in page.output(1)
    kept = [json.loads(line) for line in (Path(lab["root"]) / "guesses.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["guess"]) for line in kept] == [("guess", 1.6), ("answer", 1.6)]
