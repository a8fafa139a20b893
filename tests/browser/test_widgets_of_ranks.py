"""Test widgets of ranks in a real JupyterLab: bars that move while the cell runs, and their final state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.test_lab import notebook_of

CELLS = {
    "load": "%load_ext nbkit",
    "start": "%cluster start -n 4 --cpu --ttl 10min",
    "widget": (
        "%%distributed\nfrom tqdm.notebook import tqdm\nimport os, time\n"
        "for i in tqdm(range(40), desc='epoch'):\n"
        "    while i == 20 and not os.path.exists('go'): time.sleep(0.05)\n"
        "    time.sleep(0.02)"
    ),
    "auto": (
        "%%distributed\nfrom tqdm.auto import tqdm\nimport os, time\n"
        "for epoch in tqdm(range(2), desc='epoch'):\n"
        "    for i in tqdm(range(40), desc='batch', leave=False):\n"
        "        while epoch == 1 and i == 20 and not os.path.exists('go'): time.sleep(0.05)\n"
        "        time.sleep(0.02)"
    ),
    "rich": (
        "%%distributed\nimport rich.progress, os, time\n"
        "for i in rich.progress.track(range(40)):\n"
        "    while i == 20 and not os.path.exists('go'): time.sleep(0.05)\n"
        "    time.sleep(0.02)"
    ),
    "button": (
        "%%rank 1\nimport ipywidgets\nbutton = ipywidgets.Button(description='Press')\n"
        "clicks = []\nbutton.on_click(clicks.append)\nbutton"
    ),
    "clicked": "%%rank 1\nlen(clicks)",
    "after": "%%distributed\nprint('still live'); time.sleep(3); print('to the end')",
    "stop": "%cluster stop",
}
NUMBER = {name: number for number, name in enumerate(CELLS)}


@pytest.fixture(scope="module")
def page(open_page: Callable[..., Any]) -> Iterator[Any]:
    page = open_page(notebook_of(list(CELLS.values())), "widgets.ipynb", height=1400)
    page.run(NUMBER["load"])
    assert "4 ranks" in page.run(NUMBER["start"], seconds=90)
    yield page
    page.run(NUMBER["stop"])


@pytest.fixture
def go(page: Any) -> Iterator[Path]:
    """Yield a path. Bars wait half-way until this file exists."""
    path = Path(page.server["root"]) / "go"
    path.unlink(missing_ok=True)
    yield path
    path.write_text("")


@pytest.fixture(autouse=True)
def pictures(page: Any, tmp_path: Path) -> Iterator[None]:
    """Take a screenshot after each test, in its temporary folder."""
    yield
    page.picture(tmp_path / "after.png")


@pytest.mark.long
def test_a_widget_bar_of_every_rank_moves_while_the_cell_runs(page: Any, go: Path, tmp_path: Path) -> None:
    number = NUMBER["widget"]
    page.start(number)
    for rank in range(4):
        page.wait_for_output(number, f"[{rank}]:")
    wait_for_bars(page, number, half=True)
    assert page.prompt(number) == "[*]:"
    page.picture(tmp_path / "half.png")

    go.write_text("")
    page.wait_done(number)
    wait_for_bars(page, number, half=False)


@pytest.mark.long
def test_bars_of_tqdm_auto_are_one_line_that_moves_and_stays(page: Any, go: Path, tmp_path: Path) -> None:
    number = NUMBER["auto"]
    page.start(number)
    page.wait_for_output(number, "epoch:  50%")
    page.wait_for_output(number, "batch:")
    assert page.prompt(number) == "[*]:"
    page.picture(tmp_path / "half.png")
    assert len(page.output(number).strip().splitlines()) == 1

    go.write_text("")
    page.wait_done(number)
    left = page.output(number)
    assert "epoch: 100%" in left and "batch" not in left


@pytest.mark.long
def test_bars_of_rich_each_move_in_their_own_place(page: Any, go: Path, tmp_path: Path) -> None:
    number = NUMBER["rich"]
    page.start(number)
    deadline = time.monotonic() + 40
    while page.output(number).count("50%") < 4:
        assert time.monotonic() < deadline, page.output(number)
        page.page.wait_for_timeout(100)
    assert page.prompt(number) == "[*]:"
    page.picture(tmp_path / "half.png")

    go.write_text("")
    page.wait_done(number)
    page.wait_for_output(number, "100%")


@pytest.mark.long
def test_a_click_reaches_the_rank_and_later_output_is_live(page: Any) -> None:
    page.run(NUMBER["button"])
    page.cell(NUMBER["button"]).locator("button.jupyter-button").click()
    page.page.wait_for_timeout(500)
    assert "Out[1]: 1" in page.run(NUMBER["clicked"])

    page.start(NUMBER["after"])
    page.wait_for_output(NUMBER["after"], "still live")
    assert "to the end" not in page.output(NUMBER["after"])
    page.wait_done(NUMBER["after"])
    assert page.problems == []


def wait_for_bars(page: Any, number: int, *, half: bool) -> None:
    """Wait until all four bars are half-way, or at their end."""
    deadline = time.monotonic() + 40
    wanted = "20/40" if half else "40/40"
    while page.output(number).count(wanted) < 4:
        if half and page.output(number).count("/40") == 4 and "0/40" not in page.output(number).replace("20/40", ""):
            return  # tqdm draws ten times a second, so some bars are a little before the middle
        assert time.monotonic() < deadline, page.output(number)
        page.page.wait_for_timeout(100)
