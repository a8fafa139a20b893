"""Test a tab for each rank in a real JupyterLab, during the cell and in the saved notebook, and a prompt on a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.test_lab import notebook_of
from tests.browser.test_panel import choose_theme

CELLS = {
    "load": "%load_ext nbkit",
    "start": "%cluster start -n 2 --cpu --ttl 10min",
    "tabs": (
        "%%distributed --tabs\nimport os, time\nprint('begun by', rank)\n"
        "while not os.path.exists('go'): time.sleep(0.05)\nprint('ended by', rank)\nrank"
    ),
    "breakpoint": "%%distributed\nx = rank + 20\nif rank == 1:\n    breakpoint()\nx",
    "stop": "%cluster stop",
}
NUMBER = {name: number for number, name in enumerate(CELLS)}


@pytest.fixture(scope="module")
def page(open_page: Callable[..., Any]) -> Iterator[Any]:
    page = open_page(notebook_of(list(CELLS.values())), "tabs.ipynb")
    page.run(NUMBER["load"])
    assert "2 ranks" in page.run(NUMBER["start"], seconds=120)
    yield page
    page.run(NUMBER["stop"])


@pytest.mark.long
def test_each_rank_has_a_tab_while_the_cell_runs_and_afterwards(page: Any, tmp_path: Path) -> None:
    go = Path(page.server["root"]) / "go"
    go.unlink(missing_ok=True)
    page.start(NUMBER["tabs"])
    page.wait_for_output(NUMBER["tabs"], "begun by 0")
    output = page.cell(NUMBER["tabs"]).locator(".jp-Cell-outputArea")
    assert not output.get_by_text("begun by 1").is_visible()
    output.locator(".lm-TabBar-tab", has_text="rank 1").click()
    page.wait_for_output(NUMBER["tabs"], "begun by 1")
    page.picture(tmp_path / "running.png")
    go.touch()
    page.wait_done(NUMBER["tabs"])
    page.wait_for_output(NUMBER["tabs"], "ended by 1")  # the open tab stays open
    assert not output.get_by_text("ended by 0").is_visible()
    output.locator("label", has_text="rank 0").click()
    output.get_by_text("ended by 0").wait_for()
    assert not output.get_by_text("ended by 1").is_visible()
    assert "Out[0]: 0" in page.output(NUMBER["tabs"])
    page.picture(tmp_path / "light.png")
    choose_theme(page, "Dark")
    page.picture(tmp_path / "dark.png")
    text, ground = (
        output.locator("pre:visible").first.evaluate(f"element => getComputedStyle({on}).{what}")
        for on, what in (("element", "color"), ("element.closest('.jp-Notebook')", "backgroundColor"))
    )
    choose_theme(page, "Light")
    assert brightness(text) > 150 > 80 > brightness(ground), (text, ground)
    assert page.problems == []


def brightness(colour: str) -> float:
    """Return the brightness, 0 to 255, of "rgb(17, 17, 17)" or "rgba(255, 255, 255, 1)"."""
    red, green, blue = (float(part) for part in colour.partition("(")[2].rstrip(")").split(",")[:3])
    return (red + green + blue) / 3


@pytest.mark.long
def test_a_breakpoint_has_its_prompt_in_the_page(page: Any) -> None:
    page.start(NUMBER["breakpoint"])
    for number, line in enumerate(("p x * 2", "c")):
        # An answered prompt stays in the page, and accepts no more input.
        box = page.cell(NUMBER["breakpoint"]).locator("input.jp-Stdin-input").nth(number)
        box.wait_for()
        box.fill(line)
        box.press("Enter")
    page.wait_done(NUMBER["breakpoint"])
    shown = page.output(NUMBER["breakpoint"])
    assert "[1] 42" in shown and "(Pdb rank 1)" in shown and "Out[0]: 20" in shown, shown
