"""Test nbkit's extension of JupyterLab: sidebar, status bar, docked tabs, the switch. test_lab.py has a short test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_lab import PANEL

pytestmark = pytest.mark.long
SECONDS = 60_000
TRAINING = """%%distributed --detach
import time
trainer = nbkit.Trainer(
    model=lambda: nbkit.GPT(nbkit.GPTConfig(block=32, layers=1, width=32)),
    loss=lambda logits, target: torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    data=nbkit.TextDataset(block=32, limit=100_000),
    batch_size=8,
    callbacks=[lambda *_: time.sleep(0.12)],
)
trainer.fit(1_000_000)"""
CELLS = ["'first'", TRAINING, "handle.stop()", "7 * 6"]


@pytest.fixture(scope="module")
def page(open_page: Callable[..., Any]) -> Any:
    """Open the notebook, and the sidebar by the command in the palette."""
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
        for i, source in enumerate(CELLS)
    ]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    page = open_page({"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})
    page.page.evaluate("jupyterapp.commands.execute('nbkit:sidebar')")
    page.page.wait_for_selector("[data-key=lesson-00_quickstart]", timeout=SECONDS)
    return page


def appears(page: Any, selector: str) -> Any:
    return page.page.wait_for_selector(selector, timeout=SECONDS)


def test_the_sidebar_starts_a_cluster_with_a_visible_cell(page: Any) -> None:
    page.page.locator("#nbkit-options").fill("-n 2 --cpu --ttl 10min --name seen")
    page.page.keyboard.press("Enter")

    appears(page, ".nbkit-here[aria-label='cluster seen'] tbody tr:nth-of-type(2)")
    page.wait_for_idle()
    source = page.cell(1).locator(".cm-content").inner_text()
    assert source == "%load_ext nbkit\n%cluster start -n 2 --cpu --ttl 10min --name seen"


def test_a_training_is_in_the_status_bar_and_dashboard_and_panel_dock(page: Any, tmp_path: Path) -> None:
    page.run(2)
    appears(page, ".nbkit-status >> text=/2 ranks · dp=2 · .* tok.s/")
    appears(page, ".nbkit-here .nbkit-note >> text=/step \\d+ · dp=2/")

    page.page.locator("[data-key=dock-dashboard]").click()
    appears(page, ".nbkit-docked >> text=/2 ranks · (running|quiet)/")
    page.page.locator("[data-key=dock-panel]").click()
    appears(page, ".nbkit-docked >> text=/zero3/")
    docked = page.page.evaluate(
        "[...jupyterapp.shell.widgets('main')].filter(one => one.id.startsWith('nbkit-')).map(one => one.title.label)"
    )
    assert docked == ["Dashboard", "Panel"]
    assert page.page.locator(f"{PANEL} .jp-Notebook").bounding_box()["width"] > 300
    for theme in ("Dark", "Light"):
        change = "theme => jupyterapp.commands.execute('apputils:change-theme', { theme })"
        page.page.evaluate(change, f"JupyterLab {theme}")
        page.page.wait_for_timeout(500)
        page.picture(tmp_path / f"{theme}.png")


def test_a_run_is_listed_and_the_focus_stays_when_the_sidebar_changes(page: Any) -> None:
    appears(page, "[data-key^=run-]")
    page.page.locator("[data-key=stop-seen]").focus()
    before = page.page.locator(".nbkit-here").inner_text()
    page.page.wait_for_function(
        "before => document.querySelector('.nbkit-here').innerText !== before", arg=before, timeout=SECONDS
    )

    assert page.page.evaluate("document.activeElement.dataset.key") == "stop-seen"


def test_the_switch_follows_the_kernel_and_is_off_in_a_new_kernel(page: Any) -> None:
    page.run(3)
    page.page.locator(f"{PANEL} .nbkit-switch").click()
    appears(page, f"{PANEL}.nbkit-all-ranks .nbkit-switch[aria-checked=true]")
    assert "Out[0-1]: 42" in page.run(4)

    page.reload()
    appears(page, f"{PANEL} .nbkit-switch[aria-checked=true]")
    page.restart_kernel()
    appears(page, f"{PANEL} .nbkit-switch[aria-checked=false]")
    assert "Out[0-1]" not in page.run(4) and "42" in page.output(4)


def test_the_switch_says_why_it_stays_off_without_a_cluster(page: Any) -> None:
    page.page.locator(f"{PANEL} .nbkit-switch").click()
    shown = appears(page, ".jp-Dialog").inner_text()
    page.page.keyboard.press("Escape")

    assert "%cluster attach" in shown
    assert page.page.locator(f"{PANEL} .nbkit-switch").get_attribute("aria-checked") == "false"


def test_attach_and_stop_work_with_the_keyboard(page: Any) -> None:
    page.page.evaluate("jupyterapp.commands.execute('nbkit:sidebar')")
    attach = appears(page, "[data-key=attach-seen]:enabled")
    attach.press("Enter")
    appears(page, ".nbkit-here[aria-label='cluster seen']")
    page.wait_for_idle()
    appears(page, "[data-key=stop-seen]").press("Enter")
    appears(page, ".jp-Dialog >> text=/Its 2 ranks end/")
    page.page.keyboard.press("Enter")

    appears(page, ".nbkit-live >> text=/None runs/")
    appears(page, ".nbkit-status >> text=/no cluster/")


def test_ipyparallels_own_tab_refers_to_the_tab_of_nbkit(page: Any) -> None:
    page.page.evaluate("jupyterapp.shell.activateById('ipp-cluster-launcher')")

    assert "Those of nbkit are in the tab nbkit." in appears(page, "#ipp-cluster-launcher .nbkit-other").inner_text()


def test_a_lesson_opens_as_the_users_own_copy(page: Any, lab: dict[str, str]) -> None:
    page.page.evaluate("jupyterapp.commands.execute('nbkit:sidebar')")
    appears(page, "[data-key=lesson-01_all_reduce]").click()
    appears(page, ".lm-TabBar-tabLabel >> text=/01_all_reduce.ipynb/")

    assert (Path(lab["root"]) / "nbkit-lessons" / "01_all_reduce.ipynb").is_file()
    assert page.problems == []
