"""Test the tab "Communication" in a real browser, in TensorBoard and alone, while runs are written."""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from nbkit.notebook.board.board import Board

SOURCE = Path(__file__).resolve().parents[1] / "support" / "fake_run.py"
DRAWN = """
window.drawn = [];
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  window.drawn.push(text);
  write.call(this, text, x, y);
};
"""
BEFORE = 30  # steps that exist when the page opens


def fake_run() -> Any:
    spec = importlib.util.spec_from_file_location("fake_run", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_run"] = module
    spec.loader.exec_module(module)
    return module.FakeRun


class Training:
    """A run of four ranks in a thread, with five steps per second. It also writes a loss for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.fake = fake_run()(folder, 4, "ddp", late=2)
        self.writer = SummaryWriter(str(folder))
        self.over, self.switch_to = threading.Event(), ""
        for _ in range(BEFORE):
            self.step()
        self.fake.health()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def step(self) -> None:
        self.fake.step()
        self.writer.add_scalar("train/loss", 1.0 / self.fake.number, self.fake.number)
        self.writer.flush()

    def run(self) -> None:
        while not self.over.wait(0.2):
            if self.switch_to:
                self.fake.switch(self.switch_to)
                self.switch_to = ""
            self.step()

    def end(self) -> None:
        self.over.set()
        self.thread.join()
        self.fake.close()
        self.writer.close()


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    top = tmp_path_factory.mktemp("tab") / "runs"
    big = fake_run()(top / "big", 64, "dp=4 tp=4 pp=4")
    for _ in range(55):
        big.step()
    big.event("run_stopped", reason="done")
    big.close()
    training = Training(top / "small")
    yield training
    training.end()


@pytest.fixture(scope="module")
def board(training: Training) -> Iterator[Board]:
    yield Board.start(training.fake.folder.parent)
    Board.end()


@pytest.fixture(scope="module")
def page(browser: Any, board: Board) -> Iterator[Any]:
    """Yield TensorBoard, opened at the tab. problems: its errors; asked: every address that it requested."""
    context = browser.new_context(viewport={"width": 1400, "height": 1100}, color_scheme="light")
    context.add_init_script(DRAWN)
    page = context.new_page()
    page.problems, page.asked = [], []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(f"{board.url}#communication")
    yield page
    context.close()


@pytest.fixture(scope="module")
def tab(page: Any) -> Any:
    """Return the frame of the tab."""
    page.wait_for_selector("iframe[src*='communication']", timeout=30_000)
    frame = page.query_selector("iframe[src*='communication']").content_frame()
    frame.wait_for_selector("#table td", timeout=20_000)
    return frame


@pytest.fixture(autouse=True)
def pictures(page: Any, tmp_path: Path) -> Iterator[None]:
    """Take a screenshot after each test, in its temporary folder."""
    yield
    page.screenshot(path=str(tmp_path / "after.png"))


def data(frame: Any, host: str, name: str) -> str:
    return str(frame.eval_on_selector(f"#{host} canvas", f"canvas => canvas.dataset.{name}"))


def newest(frame: Any) -> int:
    return int(frame.input_value("#step"))


def hover(page: Any, frame: Any, host: str, x: float, y: float) -> str:
    """Return the text under the pointer at (x, y), given as fractions of a picture's width and height."""
    canvas = frame.locator(f"#{host} canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
    return str(frame.locator(".tip").inner_text())


SAID_OF = """(() => {
  const said = (id) => document.getElementById(id).textContent;
  return [document.getElementById("step").value, said("tableof"), said("trafficof")];
})()"""


def test_the_tab_shows_bars_cells_and_rows_with_explanations(page: Any, tab: Any) -> None:
    assert tab.input_value("#run") == "small"
    assert data(tab, "bars", "rows") == "4"
    assert data(tab, "traffic", "cells") == "4"
    assert data(tab, "memory", "rows") == "4"
    assert "thermal slowdown" in tab.inner_text("#health .slowed") and "of 1980 MHz" in tab.inner_text("#health")
    assert tab.inner_text("#live") == "4 ranks · running"
    row = tab.inner_text("#table tr:nth-child(2)")
    assert row.split("\t")[:5] == ["all reduce", "dp", "1", "25.2 MB", "25.2 MB (100 %)"]
    # Each names its steps.
    assert re.match(r"Steps \d+ to \d+, medians: .*for rank 2", tab.inner_text("#reading"))
    step, table, traffic = tab.evaluate(SAID_OF)
    assert (table, traffic) == (f"step {step}, all ranks", f"bytes, step {step}")
    assert "▸ dp=4" in tab.evaluate("drawn")
    assert "up to step" in tab.inner_text("#runs tr")
    assert "Rank 2 is late" in tab.inner_text("#late")
    assert "2" in tab.inner_text("#lateness td")
    assert "modelled" in tab.inner_text("main")
    assert "compute" in hover(page, tab, "bars", 0.3, 0.1)
    assert "modelled as a ring" in hover(page, tab, "traffic", *cell(tab, 0, 1))


def cell(tab: Any, i: int, j: int) -> tuple[float, float]:
    """Return (x, y) of the cell from rank i to rank j in the picture of four ranks, as fractions of its size."""
    size = tab.eval_on_selector("#traffic canvas", "c => [c.clientWidth, c.clientHeight]")
    return (64 + (j + 0.5) * 44) / size[0], (22 + (i + 0.5) * 44) / size[1]


def test_the_tab_follows_the_run_and_a_switch_without_a_click(tab: Any, page: Any, training: Training) -> None:
    before = newest(tab)
    assert "modelled as a ring" in hover(page, tab, "traffic", *cell(tab, 1, 2))
    training.switch_to = "pp"
    tab.wait_for_function(
        "document.querySelector('#timeline canvas').dataset.events.includes('switch')", timeout=15_000
    )
    tab.wait_for_function("document.querySelector('#timeline canvas').dataset.strategies === '2'", timeout=15_000)
    tab.wait_for_function("document.querySelector('#strategy').textContent.startsWith('pp=4')", timeout=15_000)

    assert newest(tab) > before
    assert tab.inner_text("#table tr:nth-child(2)").startswith("send\tpp")
    tab.wait_for_function("document.querySelector('.tip').textContent.includes('(exact)')", timeout=5000)  # mouse rests


def test_a_clicked_step_is_shown_and_stays(tab: Any, page: Any) -> None:
    canvas = tab.locator("#timeline canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.click(box["x"] + 70, box["y"] + 150)
    tab.wait_for_function("document.querySelector('#strategy').textContent === 'dp=4'", timeout=5000)
    chosen = tab.inner_text("#at")
    assert chosen in ("Step 1", "Step 2") and tab.get_attribute("#follow", "aria-pressed") == "false"
    assert "loss" in hover(page, tab, "timeline", 70 / box["width"], 150 / box["height"])
    page.wait_for_timeout(2200)
    assert tab.inner_text("#at") == chosen

    tab.click("#follow")
    tab.wait_for_function("Number(document.querySelector('#step').value) > 30", timeout=5000)


def test_the_tab_shows_sixty_four_ranks_and_their_pipelines(tab: Any, page: Any) -> None:
    tab.click("#runs button:has-text('big')")
    tab.wait_for_function("document.querySelector('#bars canvas').dataset.rows === '64'", timeout=15_000)
    assert data(tab, "traffic", "world") == "64"
    assert tab.inner_text("#live") == "64 ranks · ended"  # even though it was written a moment ago
    assert int(data(tab, "traffic", "cells")) > 200
    assert (data(tab, "moments", "kind"), data(tab, "moments", "rows")) == ("pipeline", "4")
    assert tab.locator("#momentshead option").count() == 16
    assert "micro-batch" in hover(page, tab, "moments", 0.075, 0.2)
    tab.select_option("#run", "small")
    tab.wait_for_function("document.querySelector('#bars canvas').dataset.rows === '4'", timeout=15_000)


def test_another_run_can_be_drawn_over_the_open_one(tab: Any, page: Any) -> None:
    tab.select_option("#other", "big")
    tab.wait_for_function("Number(document.querySelector('#timeline canvas').dataset.other) > 20", timeout=10_000)
    page.wait_for_timeout(300)  # for the screenshot
    tab.select_option("#other", "")
    tab.wait_for_function("document.querySelector('#timeline canvas').dataset.other === '0'", timeout=10_000)


def test_the_newest_steps_are_a_fixed_number_for_any_length_of_the_run(tab: Any, training: Training) -> None:
    long = fake_run()(training.fake.folder.parent / "long", 2, "ddp")
    for _ in range(727):
        long.step()
    long.event("run_stopped", reason="done")
    long.close()
    tab.select_option("#run", "long", timeout=20_000)
    tab.wait_for_function("document.querySelector('#step').value === '727'", timeout=15_000)
    assert data(tab, "timeline", "first") == "1"
    tab.click("#recent")
    assert data(tab, "timeline", "first") == str(727 - 200 + 1)
    tab.click("#whole")
    tab.select_option("#run", "small")
    tab.wait_for_function("document.querySelector('#bars canvas').dataset.rows === '4'", timeout=15_000)


LEGEND = "['exact', 'modelled'].map((id) => getComputedStyle(document.getElementById(id)).backgroundColor)"
CELL = """(() => {
  const pen = document.querySelector("#traffic canvas").getContext("2d");
  return `rgb(${[...pen.getImageData(64 + 44 + 4, 22 + 4, 1, 1).data.slice(0, 3)].join(", ")})`;
})()"""  # in the corner of the cell from 0 to 1, which has no text


def test_light_and_dark_follow_tensorboard(tab: Any, page: Any) -> None:
    assert not tab.evaluate("document.body.classList.contains('dark')")
    light = tab.evaluate(LEGEND)
    assert tab.evaluate(CELL) in light
    page.evaluate("document.body.classList.add('dark-mode')")
    tab.wait_for_function("document.body.classList.contains('dark')", timeout=5000)
    dark = tab.evaluate(LEGEND)
    assert tab.evaluate(CELL) in dark and not set(light) & set(dark)
    page.evaluate("document.body.classList.remove('dark-mode')")


def test_tensorboards_own_tabs_follow_the_run_too(page: Any, tab: Any) -> None:
    page.get_by_role("tab", name="Time Series").click()
    page.wait_for_selector("text=/loss/", timeout=30_000)
    asked = len([url for url in page.asked if "timeSeries" in url])
    for _ in range(60):
        page.wait_for_timeout(250)
        if len([url for url in page.asked if "timeSeries" in url]) >= asked + 2:
            return
    raise AssertionError("nobody pressed TensorBoard's reload button")


def test_the_page_requested_no_other_host_and_had_no_errors(page: Any, tab: Any) -> None:
    assert {urlsplit(url).hostname for url in page.asked if not url.startswith(("data:", "blob:"))} == {"127.0.0.1"}
    assert page.problems == []
