"""Test the strategy panel in a real JupyterLab: clicks switch, undo and stop a training while its cell runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CELLS = {
    "load": "%load_ext nbkit",
    "start": "%cluster start -n 2 --cpu --ttl 10min --name steered",
    "trainer": (
        "%%distributed\nimport time\n"
        "torch.set_num_threads(1)\n"
        "trainer = nbkit.Trainer(\n"
        "    model=lambda: nbkit.GPT(nbkit.GPTConfig(block=32, layers=2, heads=4, width=32)),\n"
        "    loss=lambda logits, target: torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()),\n"
        "    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),\n"
        "    data=nbkit.TextDataset(block=32, limit=100_000),\n"
        "    batch_size=16, log_dir=None,\n"
        "    callbacks=[lambda *_: time.sleep(0.12)])\n"  # leaves some CPU time for the browser
    ),
    "panel": "%strategy",
    "train": "%%distributed\nrecords = trainer.fit(1_000_000)",
    "detached": "%%distributed --detach\nrecords = trainer.fit(1_000_000)",
    # Some releases of ipykernel do not answer a page opened while a cell runs.
    "second": (
        "from nbkit.notebook.widgets import widget_output as support\n"
        "support.kernel_version = lambda: '7.3.0'\n%strategy"
    ),
    "end": "handle.stop()",
    "history": (
        "%%rank 0\n"
        "strategies = [record['strategy'] for record in trainer.history]\n"
        "steps = [record['step'] for record in trainer.history]\n"
        "print('in order', steps == list(range(1, len(steps) + 1)))\n"
        "print('seen', list(dict.fromkeys(strategies)))\n"
        "print('learns', trainer.history[-1]['loss'] < trainer.history[0]['loss'] - 0.2)\n"
    ),
    "attach": "%cluster attach steered",
    "stop": "%cluster stop",
}
NUMBER = {name: number for number, name in enumerate(CELLS)}
SECONDS = 40


def notebook_of(sources: list[str]) -> dict[str, Any]:
    cells = [
        {"cell_type": "code", "id": f"p{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
        for i, source in enumerate(sources)
    ]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


class PanelOnPage:
    """The panel in one cell, used as a person uses it."""

    def __init__(self, page: Any, cell: int) -> None:
        self.page, self.root = page, page.cell(cell).locator(".nbkit-panel")

    def trained(self) -> str:
        """Return the end of the output of the training cell."""
        return str(self.page.output(NUMBER["train"]))[-1000:]

    def wait(self, what: Callable[[], bool], why: str, seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, (
                f"{why}; the panel shows:\n{self.root.inner_text()}\nand the cell that trains:\n{self.trained()}"
            )
            self.page.page.wait_for_timeout(100)

    @property
    def strategy(self) -> str:
        row = self.root.locator("tbody tr.now")
        return str(row.get_attribute("data-strategy")) if row.count() else ""

    @property
    def headline(self) -> str:
        return str(self.root.locator(".headline").inner_text())

    @property
    def step(self) -> int:
        found = re.search(r"step (\d+)", self.headline)
        return int(found[1]) if found else 0

    @property
    def told(self) -> str:
        return str(self.root.locator(".told").inner_text())

    def press(self, label: str) -> None:
        self.root.get_by_role("button", name=label, exact=True).click(timeout=SECONDS * 1000)

    def choose(self, strategy: str) -> None:
        self.root.locator(f'tr[data-strategy="{strategy}"]').click()

    def apply(self, strategy: str) -> float:
        """Choose the row and press Apply. Return the seconds from the click until the panel shows the new strategy."""
        self.choose(strategy)
        began = time.monotonic()
        self.press("Apply")
        self.wait(lambda: self.strategy == strategy and f"→ {strategy}" in self.told, f"{strategy} was not applied")
        return time.monotonic() - began


@pytest.fixture(scope="module")
def page(open_page: Callable[..., Any]) -> Any:
    page = open_page(notebook_of(list(CELLS.values())), name="panel.ipynb", height=1500)
    page.run(NUMBER["load"])
    page.run(NUMBER["start"], seconds=90)
    page.run(NUMBER["trainer"], seconds=90)
    return page


@pytest.fixture(scope="module")
def panel(page: Any) -> PanelOnPage:
    page.run(NUMBER["panel"])
    panel = PanelOnPage(page, NUMBER["panel"])
    panel.root.wait_for(timeout=SECONDS * 1000)
    return panel


def test_clicks_switch_a_training_through_the_families_while_its_cell_runs(
    page: Any, panel: PanelOnPage, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if getattr(request.node, "execution_count", 1) > 1 and panel.strategy != "dp=2":
        panel.apply("dp=2")  # a failed first run has left the ranks under another strategy
    assert panel.strategy == "dp=2"
    page.start(NUMBER["train"])
    panel.wait(lambda: panel.step > 3, "the panel does not follow the training")

    for strategy in ("dp=2 zero=3", "tp=2", "pp=2 schedule=1f1b microbatches=4", "dp=2"):
        before = panel.step
        panel.apply(strategy)
        assert "bytes moved: predicted" in panel.told
        assert "measured" in panel.told
        assert "state identical" in panel.told
        panel.wait(lambda at=before: panel.step > at + 2, "no more steps")  # type: ignore[misc]
        page.picture(tmp_path / f"{strategy.split()[-1].partition('=')[0]}.png")
    assert page.prompt(NUMBER["train"]) == "[*]:"

    panel.press("Undo")
    panel.wait(lambda: panel.strategy.startswith("pp=2"), "Undo did not go back")
    panel.choose("dp=2 zero=1")
    page.picture(tmp_path / "choosing.png")


def test_a_pause_stops_the_steps_until_go_on(panel: PanelOnPage) -> None:
    panel.press("Pause")
    panel.wait(lambda: panel.headline.startswith("paused"), "it did not pause")
    held = panel.step
    panel.page.page.wait_for_timeout(600)
    assert panel.step == held

    panel.press("Resume")
    panel.wait(lambda: panel.step > held, "it did not go on")


def test_the_keys_that_run_and_edit_cells_switch_nothing(page: Any, panel: PanelOnPage) -> None:
    before, prompts = panel.strategy, [page.prompt(number) for number in range(len(CELLS))]
    told = panel.told
    panel.choose("tp=2")

    for keys in ("Shift+Enter", "Control+Enter", "Alt+Enter", "Meta+Enter", "Enter"):
        page.page.keyboard.press(keys)
    # The plain key moved the focus to Apply, where keys of a notebook press nothing either.
    assert page.page.evaluate("document.activeElement.textContent") == "Apply"
    for keys in ("Shift+Enter", "Control+Enter", "Alt+Enter", "Meta+Enter", "Shift+Space"):
        page.page.keyboard.press(keys)

    steps = panel.step
    panel.wait(lambda: panel.step > steps + 3, "no more steps")  # a switch would have happened by now
    assert (panel.strategy, panel.told) == (before, told)
    assert [page.prompt(number) for number in range(len(CELLS))] == prompts
    page.page.keyboard.press("Enter")
    panel.wait(lambda: panel.strategy == "tp=2", "Enter on Apply did not apply")


def test_buttons_use_the_font_of_the_panel(panel: PanelOnPage) -> None:
    own = panel.root.evaluate("panel => getComputedStyle(panel).fontFamily")
    for label in ("Apply", "Undo", "Pause", "Save", "Stop"):
        button = panel.root.get_by_role("button", name=label, exact=True)
        assert button.evaluate("button => getComputedStyle(button).fontFamily") == own, label


def test_an_impossible_strategy_is_refused_with_a_reason_and_nothing_ends(page: Any, panel: PanelOnPage) -> None:
    panel.root.locator("input").fill("dp=3")
    panel.wait(lambda: "the world has 2" in panel.root.inner_text(), "it does not say why")
    assert panel.root.get_by_role("button", name="Apply").is_disabled()
    panel.root.locator("input").press("Escape")
    assert page.prompt(NUMBER["train"]) == "[*]:"


def test_the_panel_can_be_used_in_the_dark_theme(page: Any, panel: PanelOnPage, tmp_path: Path) -> None:
    choose_theme(page, "Dark")
    panel.choose("dp=2 zero=1")
    page.picture(tmp_path / "dark.png")
    choose_theme(page, "Light")  # the server keeps the theme for the other files


def choose_theme(page: Any, theme: str) -> None:
    for name in ("Settings", "Theme", f"JupyterLab {theme}"):
        page.page.locator(f".lm-Menu-itemLabel:text-is('{name}'), .lm-MenuBar-itemLabel:text-is('{name}')").last.click()
    page.page.wait_for_selector(f"body[data-jp-theme-light='{str(theme == 'Light').lower()}']", state="attached")


def test_stop_ends_the_cell_at_a_step_boundary(page: Any, panel: PanelOnPage) -> None:
    panel.press("Stop")
    page.wait_done(NUMBER["train"], seconds=20)
    panel.wait(lambda: panel.headline.startswith("not training"), "the panel does not know")

    shown = page.run(NUMBER["history"])
    assert "in order True" in shown
    assert "learns True" in shown
    for strategy in ("dp=2", "dp=2 zero=3", "tp=2", "pp=2 schedule=1f1b microbatches=4"):
        assert f"'{strategy}'" in shown


@pytest.mark.long
def test_a_page_opened_while_the_cell_runs_has_a_working_panel(page: Any, panel: PanelOnPage, tmp_path: Path) -> None:
    page.start(NUMBER["train"])
    panel.wait(lambda: panel.headline.startswith("training"), "it does not train")
    # The steps of the previous training count, and so does the last step of this one.
    panel.wait(lambda: " of 1,000," in panel.headline, "it does not say how many steps")
    goal = re.search(r"step [\d,]+ of 1,000,(\d+)", panel.headline)
    assert goal is not None and 0 < int(goal[1]) <= panel.step, panel.headline
    page.reload(idle=False)
    panel.root.wait_for(timeout=SECONDS * 1000)
    before = panel.step
    panel.wait(lambda: panel.step > before, "after the reload the panel does not follow the training")
    other = page.beside()
    beside = PanelOnPage(other, NUMBER["panel"])
    beside.root.wait_for(timeout=SECONDS * 1000)
    others = list(other.problems)  # errors of Notebook 7 itself, about plugins of Lab that it does not have

    beside.apply("dp=2 zero=3")
    panel.wait(lambda: panel.told == beside.told, "Lab does not show what was done in Notebook 7")
    panel.apply("tp=2")
    beside.wait(lambda: beside.strategy == "tp=2", "Notebook 7 does not show what was done in Lab")
    other.picture(tmp_path / "notebook7.png")
    page.picture(tmp_path / "lab.png")
    for one in (panel, beside):  # each page must learn that its own click was received
        one.wait(lambda it=one: it.root.get_attribute("data-unheard") == "0", "a click was not heard")  # type: ignore[misc]

    beside.press("Stop")
    panel.wait(lambda: panel.headline.startswith("not training"), "Stop did not end the training")
    page.wait_for_idle()
    assert other.problems == others
    other.page.close()


@pytest.mark.long
def test_the_panel_is_there_after_a_reload_and_a_second_one_agrees(page: Any, panel: PanelOnPage) -> None:
    page.run(NUMBER["detached"])
    page.reload()
    panel.root.wait_for(timeout=SECONDS * 1000)
    before = panel.step
    panel.wait(lambda: panel.step > before, "after the reload the panel does not follow the training")
    page.run(NUMBER["second"])
    second = PanelOnPage(page, NUMBER["second"])
    second.root.wait_for(timeout=SECONDS * 1000)

    second.apply("dp=2 zero=3")

    panel.wait(lambda: panel.strategy == "dp=2 zero=3", "the first panel shows another strategy")
    panel.wait(lambda: panel.told == second.told, "the panels tell different things")
    picture = page.cell(NUMBER["second"]).locator(".nbkit-still")
    assert not picture.is_visible()
    second.root.evaluate("panel => panel.remove()")  # as in a page without widgets
    assert picture.is_visible()
    page.run(NUMBER["end"])


@pytest.mark.long
def test_the_panel_says_what_to_type_after_a_restart_of_the_kernel(page: Any, panel: PanelOnPage) -> None:
    page.restart_kernel()
    panel.wait(lambda: panel.root.get_attribute("data-phase") == "silent", "it does not notice")
    assert "%cluster attach steered" in panel.root.locator(".note").inner_text()
    assert panel.root.locator(".keys button:enabled").count() == 0
    page.run(NUMBER["load"])
    page.run(NUMBER["attach"])
    page.run(NUMBER["panel"])
    panel.wait(lambda: panel.headline.startswith("not training"), "the new one shows nothing")


def test_the_page_had_no_errors(page: Any) -> None:
    assert page.problems == []
    page.run(NUMBER["stop"])
