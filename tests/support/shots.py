"""Take the pictures of docs/gallery.md: run the page's cells in JupyterLab, and make screenshots of their outputs.

python -m tests.support.shots                all of them: about 8 minutes on two cores
python -m tests.support.shots panel why      only these are written; the cells before them run too

The page is the source: its blocks marked py are the cells of one notebook, in order, and each picture shows the output
of the cell above it. _BEFORE says what a picture waits for, or does in the browser first.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_folder = Path(__file__).parent
if str(_folder) not in sys.path:
    sys.path.insert(0, str(_folder))

from jupyter_lab import LabPage, chromium, jupyter_lab  # noqa: E402

PAGE = _folder.parents[1] / "docs" / "gallery.md"
WIDTH, HEIGHT = 1250, 1500
CELL_SECONDS = 240.0
NUM_COLORS = 256  # of a picture; fewer change the colours of bars
LARGEST_BYTES = 120_000
MARGIN = 8  # pixels around what a picture shows


def cells_of(page: str) -> list[tuple[str, list[str]]]:
    """Return each cell of the page, with the names of the pictures that follow it."""
    cells: list[tuple[str, list[str]]] = []
    for source, picture in re.findall(r"^```py\n(.*?)\n```$|^!\[[^]]*\]\(pictures/(\w+)\.png\)$", page, re.M | re.S):
        if picture:
            cells[-1][1].append(picture)
        else:
            cells.append((source, []))
    return cells


def notebook_of(sources: Sequence[str]) -> dict[str, Any]:
    """Return a notebook with these cells."""
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
        for i, source in enumerate(sources)
    ]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def shown_by(lab: LabPage, number: int) -> Any:
    """Return what the cell displays, as an element of the page."""
    return lab.cell(number).locator(".jp-Cell-outputArea")


def _pause(seconds: float) -> Callable[[LabPage, int], Any]:
    """Return a step that waits while the training runs."""

    def pause(lab: LabPage, number: int) -> Any:
        lab.page.wait_for_timeout(seconds * 1000)
        return shown_by(lab, number)

    return pause


_REMOVE_LOGS = """area => {
  const notes = area.querySelector("small");
  notes.innerHTML = notes.innerHTML.split("<br>").filter(line => !line.startsWith("logs")).join("<br>");
}"""

_SHORTEN_PATHS = r"""area => area.querySelectorAll("pre").forEach(pre => {
  pre.innerHTML = pre.innerHTML.replace(/\/\S*\/runs\//g, "runs/");
})"""


def _start(lab: LabPage, number: int) -> Any:
    """Leave out the folder of logs, which differs between machines."""
    shown_by(lab, number).evaluate(_REMOVE_LOGS)
    return shown_by(lab, number)


def _breakpoint(lab: LabPage, number: int) -> Any:
    """Ask for a value at the prompt. Let the cell go on after the picture: see _AFTER."""
    _type(lab, number, "p loss")
    lab.wait_for_output(number, "tensor(", 60)
    return shown_by(lab, number)


def _panel(lab: LabPage, number: int) -> Any:
    """Wait until every strategy was examined, then measure those that fit."""

    def wait(over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + CELL_SECONDS
        while not over() and time.monotonic() < deadline:
            lab.page.wait_for_timeout(1000)

    wait(lambda: "not examined yet" not in lab.output(number))
    lab.cell(number).get_by_role("button", name=re.compile("^Measure")).click()
    for _ in range(2):  # strategies too close to compare are measured again
        wait(lambda: "Recommended" in lab.output(number) and "asked to measure" not in lab.output(number))
        lab.page.wait_for_timeout(5000)
    return shown_by(lab, number)


def _type(lab: LabPage, number: int, line: str) -> None:
    box = lab.cell(number).locator("input.jp-Stdin-input").last
    box.wait_for(timeout=60_000)
    box.fill(line)
    box.press("Enter")


def _dark(lab: LabPage, number: int) -> Any:
    _theme(lab, "Dark")
    return shown_by(lab, number)


def _theme(lab: LabPage, name: str) -> None:
    lab.page.evaluate(
        "name => jupyterapp.commands.execute('apputils:change-theme', { theme: name })", f"JupyterLab {name}"
    )
    lab.page.wait_for_timeout(3000)


def _pipeline(lab: LabPage, number: int) -> Any:
    lab.page.wait_for_timeout(20_000)
    return lab.cell(number).locator(".nbkit-dashboard section").nth(2)


def _replaced(lab: LabPage, number: int) -> Any:
    """Return the output of the cell that trains: the newest detached one before this one."""
    while "--detach" not in lab.cell(number).inner_text():
        number -= 1
    lab.wait_for_output(number, "was replaced", 120)
    lab.page.wait_for_timeout(3000)
    shown_by(lab, number).evaluate(_SHORTEN_PATHS)
    return shown_by(lab, number)


def _board(lab: LabPage, number: int) -> Any:
    frame = lab.cell(number).locator("iframe")
    frame.evaluate("frame => frame.scrollIntoView({ block: 'center' })")
    frame.element_handle().content_frame().wait_for_selector("text=/loss/", timeout=CELL_SECONDS * 1000)
    lab.page.wait_for_timeout(6000)
    return frame


def _communication(lab: LabPage, number: int) -> Any:
    frame = lab.cell(number).locator("iframe")
    frame.element_handle().content_frame().evaluate("location.hash = '#communication'")
    lab.page.wait_for_timeout(15_000)
    return frame


def _report(lab: LabPage, number: int) -> Any:
    page = lab.page.context.new_page()
    page.goto((Path(lab.server["root"]) / "run.html").as_uri())
    page.wait_for_timeout(3000)
    return page.locator("body")


def _until(text: str) -> Callable[[LabPage, int], Any]:
    """Return a step that waits until the cell shows a text."""

    def until(lab: LabPage, number: int) -> Any:
        lab.wait_for_output(number, text, CELL_SECONDS)
        lab.page.wait_for_timeout(1000)
        return shown_by(lab, number)

    return until


_BEFORE: dict[str, Callable[[LabPage, int], Any]] = {
    "start": _start,
    "breakpoint": _breakpoint,
    "panel": _panel,
    "dashboard": _pause(25),
    "dark": _dark,
    "pipeline": _pipeline,
    "replaced": _replaced,
    "board": _board,
    "communication": _communication,
    "report": _report,
    "memory": _until("to type"),
}
"""Picture -> what is done before it is taken: (page, number of the cell) -> the element to take."""
_AFTER: dict[str, Callable[[LabPage, int], Any]] = {
    "breakpoint": lambda lab, number: (_type(lab, number, "c"), lab.wait_done(number)),
    "dark": lambda lab, number: _theme(lab, "Light"),
}
_WHILE_IT_RUNS = {"breakpoint"}
"""Pictures that are taken while their cell runs."""


def take(element: Any) -> bytes:
    """Return the element as a PNG, without empty margins."""
    from PIL import Image, ImageChops

    # JupyterLab draws only what is visible, so the window is as high as the element.
    room = round(element.bounding_box()["height"]) + 300
    element.page.set_viewport_size({"width": WIDTH, "height": max(HEIGHT, room)})
    element.page.wait_for_timeout(500)
    element.evaluate("element => element.scrollIntoView({ block: 'center' })")
    element.page.mouse.move(0, 0)  # no tooltips
    shot = Image.open(io.BytesIO(element.screenshot())).convert("RGB")
    corner = Image.new("RGB", shot.size, shot.getpixel((shot.width - 1, 0)))
    left, top, right, bottom = ImageChops.difference(shot, corner).getbbox() or (0, 0, *shot.size)
    inner = (max(left - MARGIN, 0), max(top - MARGIN, 0), right + MARGIN, bottom + MARGIN)
    shot = shot.crop((*inner[:2], min(inner[2], shot.width), min(inner[3], shot.height)))
    small = io.BytesIO()
    shot.quantize(NUM_COLORS, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def main(wanted: Sequence[str]) -> int:
    """Take the wanted pictures, or all of them. Return 1 if a picture is too large or a name is unknown."""
    cells = cells_of(PAGE.read_text())
    names = [name for _, pictures in cells for name in pictures]
    if unknown := set(wanted) - set(names):
        print(f"docs/gallery.md has no picture {', '.join(sorted(unknown))}; it has {', '.join(names)}")
        return 1
    last = max(number for number, (_, pictures) in enumerate(cells) if not wanted or set(pictures) & set(wanted))
    large = []
    with tempfile.TemporaryDirectory() as home, chromium() as browser, jupyter_lab(Path(home)) as server:
        (Path(server["root"]) / "gallery.ipynb").write_text(json.dumps(notebook_of([source for source, _ in cells])))
        context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
        lab = LabPage(context.new_page(), server)
        lab.page.set_default_timeout(CELL_SECONDS * 1000)
        lab.open("gallery.ipynb")
        lab.page.evaluate("jupyterapp.shell.collapseLeft()")
        for number, (_, pictures) in enumerate(cells[: last + 1]):
            lab.start(number)
            if not any(name in _WHILE_IT_RUNS for name in pictures):
                lab.wait_done(number, CELL_SECONDS)
            lab.page.wait_for_timeout(500)  # the page draws
            for name in pictures:
                if wanted and name not in wanted and name not in _AFTER:
                    continue
                element = _BEFORE.get(name, shown_by)(lab, number)
                if not wanted or name in wanted:
                    picture = take(element)
                    (PAGE.parent / "pictures" / f"{name}.png").write_bytes(picture)
                    print(f"{name}: {len(picture):,} bytes", flush=True)
                    large += [name] * (len(picture) > LARGEST_BYTES)
                if name in _AFTER:
                    _AFTER[name](lab, number)
    if large:
        print(f"above {LARGEST_BYTES:,} bytes: {', '.join(large)}")
    return int(bool(large))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
