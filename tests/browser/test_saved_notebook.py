"""Test a notebook that was saved with live widgets, in pages without a kernel for them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nbformat import from_dict
from tables import answer_of, table_of

from nbkit.notebook.cluster.output.rank_tabs import RankTabs, RankText
from nbkit.notebook.widgets.panel.panel import StrategyPanel
from nbkit.notebook.widgets.panel.view import Looked, State, reduce
from nbkit.notebook.widgets.training_card import card_html, clock_bundle
from nbkit.notebook.widgets.widget_output import beside_widget

WIDGET = {"application/vnd.jupyter.widget-view+json": {"version_major": 2, "version_minor": 0, "model_id": "gone"}}
POINTS = [[i + 1, 1, i * 0.1, i * 100, 4 - i / 20, 1000.0, 0] for i in range(60)]
SNAPSHOT = {
    "state": {"run": "first", "world": 2, "stands": "running", "goal": 60, "left": "", "unit": "tokens", "rate": 1e3},
    "points": POINTS,
    "events": [],
    "strategies": ["dp=2"],
    "step": {},
}


def panel_still() -> dict[str, Any]:
    panel = object.__new__(StrategyPanel)
    panel.controller = type("Controller", (), {"state": reduce(State("lesson", 4), Looked(answer_of(table_of())))})()
    return panel.still()


def saved_notebook() -> dict[str, Any]:
    """Return a notebook as Lab saves it: each output has a widget, and a picture of it."""
    card = {"text/plain": "dp=2   60 steps", "text/html": card_html(SNAPSHOT)}
    cells = []
    for number, still in enumerate((panel_still(), card)):
        outputs = [
            {"output_type": "display_data", "metadata": {}, "data": data} for data in (WIDGET, beside_widget(still))
        ]
        cell = {"cell_type": "code", "id": f"c{number}", "metadata": {}, "execution_count": 1, "source": "shown"}
        cells.append({**cell, "outputs": outputs})
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


IS_DRAWN = "image => image.complete && image.naturalWidth > 200 && image.getBoundingClientRect().height > 30"


def drawn(cell: Any) -> bool:
    image = cell.locator(".nbkit-still img")
    image.wait_for(timeout=60_000)
    return bool(image.evaluate(IS_DRAWN))


@pytest.mark.parametrize("trusted", [False, pytest.param(True, marks=pytest.mark.long)])
def test_jupyterlab_shows_the_pictures_and_no_error(
    open_page: Callable[..., Any], lab: dict[str, str], trusted: bool, tmp_path: Path
) -> None:
    notebook = saved_notebook()
    if trusted:
        from nbformat.sign import NotebookNotary

        NotebookNotary(data_dir=str(Path(lab["root"]).parent / "DATA_DIR")).sign(from_dict(notebook))
    page = open_page(notebook, f"saved-{trusted}.ipynb")

    assert [drawn(page.cell(number)) for number in (0, 1)] == [True, True]
    page.picture(tmp_path / "saved.png")
    for number in (0, 1):
        assert "Error displaying widget" not in page.cell(number).locator(".jp-Cell-outputArea").inner_text()
    # While a widget in the same cell is live, its picture is hidden.
    still = page.cell(0).locator(".nbkit-still")
    still.evaluate(
        "still => { const live = document.createElement('div'); live.className = 'nbkit-live';"
        "still.closest('.jp-OutputArea').append(live); }"
    )
    hidden = still.is_hidden()
    assert hidden if trusted else not hidden  # an untrusted output has no styles, and no widgets
    assert page.cell(1).locator(".nbkit-still").is_visible()


def test_a_widget_in_vs_code_hides_only_the_picture_of_its_cell(browser: Any) -> None:
    """Test a page like that of VS Code, which has all outputs, with a .cell_container for each cell."""
    still = beside_widget(panel_still())["text/html"]
    cells = f"<div class=nbkit-live></div><div>{still}</div>", f"<div>{still}</div>"
    page = browser.new_page()
    page.set_content("".join(f"<div class=cell_container>{cell}</div>" for cell in cells))

    assert [one.is_visible() for one in page.locator(".nbkit-still").all()] == [False, True]
    page.close()


def test_text_has_the_pages_colour_on_a_dark_page_with_light_variables(browser: Any) -> None:
    """Test it, because JupyterLab's variables have light values in a dark VS Code that has shown a widget."""
    tabs = object.__new__(RankTabs)
    tabs.id, tabs.texts = "tabs", {0: RankText(), 1: RankText()}
    words = clock_bundle("running")["text/html"] + card_html(SNAPSHOT) + tabs.still()["text/html"]
    page = browser.new_page()
    light = "".join(f"--jp-{kind}-font-color{i}: black;" for kind in ("ui", "content") for i in range(4))
    page.set_content(f"<style>:root {{ {light} }} body {{ color: rgb(204, 204, 204) }}</style>{words}")
    colours = "all => all.map(one => getComputedStyle(one).color)"
    of = page.locator(".nbkit-clock, .nbkit-card > div *:not(span, style), .nbkit-tabs label, .nbkit-tabs pre")

    assert of.count() > 5 and set(of.evaluate_all(colours)) == {"rgb(204, 204, 204)"}
    page.close()


def test_a_page_exported_from_the_notebook_shows_the_pictures(browser: Any, tmp_path: Path) -> None:
    nbconvert = pytest.importorskip("nbconvert", reason="pip install nbconvert")

    notebook = from_dict(copy.deepcopy(saved_notebook()))
    html, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    (tmp_path / "saved.html").write_text(html)
    page = browser.new_page()
    page.goto((tmp_path / "saved.html").as_uri(), wait_until="domcontentloaded")
    images = page.locator(".nbkit-still img")

    assert images.count() == 2
    assert [images.nth(i).evaluate(IS_DRAWN) for i in range(2)] == [True, True]
    assert json.dumps(notebook).count("data:image/svg+xml") == 2
    page.close()
