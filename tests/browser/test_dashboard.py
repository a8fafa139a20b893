"""Test the dashboard in a real JupyterLab while a cell trains, and its saved page with four and 64 ranks."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbkit.notebook.run.reader import RunReader
from nbkit.notebook.widgets.javascript import joined, style
from nbkit.notebook.widgets.run_report import write_report
from nbkit.notebook.widgets.training_card import card_html
from nbkit.notebook.widgets.widget_output import STILL_SECONDS
from nbkit.records.record_file import OVERVIEW_LINES

SOURCE = Path(__file__).resolve().parents[1] / "support" / "fake_run.py"
CELLS = {
    "load": "%load_ext nbkit",
    "start": "%cluster start -n 2 --cpu --ttl 10min --name shown",
    "dashboard": "%dashboard",
    "trainer": (
        "%%distributed\nimport time\n"
        "trainer = nbkit.Trainer(\n"
        "    model=lambda: nbkit.GPT(nbkit.GPTConfig(block=32, layers=2, width=32)),\n"
        "    loss=lambda logits, target: torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()),\n"
        "    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),\n"
        "    data=nbkit.TextDataset(block=32, limit=100_000),\n"
        "    batch_size=4 * world_size,\n"
        "    callbacks=[lambda *_: time.sleep(0.12)],\n"  # leaves some CPU time for the browser
        ")"
    ),
    "fit": "%%distributed\ntrainer.fit(100_000)",
    "detached": "%%distributed --detach\nrecords = trainer.fit(100_000)",
    "trace": "%nbkit trace 2",
    "end": "handle.stop()",
    "report": "%nbkit report page.html",
    "attach": "%cluster attach shown",
    "stop": "%cluster stop",
}
NUMBER = {name: number for number, name in enumerate(CELLS)}
SHOWN = ".nbkit-dashboard .curves"


def notebook_of(sources: list[str]) -> dict[str, Any]:
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
        for i, source in enumerate(sources)
    ]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


@pytest.fixture(scope="module")
def page(open_page: Callable[[dict[str, Any]], Any]) -> Any:
    return open_page(notebook_of(list(CELLS.values())), "dashboard.ipynb", 1700)


def wait_for_step(page: Any, least: int, seconds: float = 30) -> int:
    """Wait until the loss curve has reached a step."""
    page.page.wait_for_function(
        f"() => Number(document.querySelector('{SHOWN}')?.dataset.step || 0) >= {least}", timeout=seconds * 1000
    )
    return int(page.page.eval_on_selector(SHOWN, "canvas => canvas.dataset.step"))


def test_the_dashboard_updates_while_a_cell_trains(page: Any, tmp_path: Path) -> None:
    page.run(NUMBER["load"])
    page.run(NUMBER["start"], seconds=120)
    page.run(NUMBER["dashboard"])
    page.page.wait_for_selector(".nbkit-dashboard", timeout=20_000)
    page.wait_for_output(NUMBER["dashboard"], "No finished step yet")
    page.run(NUMBER["trainer"])
    page.start(NUMBER["fit"])

    first = wait_for_step(page, 3, 60)
    assert page.prompt(NUMBER["fit"]) == "[*]:"
    wait_for_step(page, first + 5)
    page.page.wait_for_function("document.querySelector('.nbkit-dashboard .ranks canvas').dataset.rows === '2'")
    page.wait_for_output(NUMBER["dashboard"], "2 ranks · running")
    page.cell(NUMBER["dashboard"]).scroll_into_view_if_needed()
    page.page.click(".nbkit-dashboard button.trace")
    page.wait_for_output(NUMBER["dashboard"], "open it in ui.perfetto.dev")
    page.picture(tmp_path / "training.png")
    page.wait_for_output(NUMBER["fit"], "of 100,000 · ")  # the card that the cell shows automatically
    page.cell(NUMBER["fit"]).screenshot(path=str(tmp_path / "card.png"))
    assert page.prompt(NUMBER["fit"]) == "[*]:" and "of the step" in page.output(NUMBER["dashboard"])


def test_the_card_of_a_finished_cell_is_its_summary(page: Any, tmp_path: Path) -> None:
    page.interrupt()
    page.wait_done(NUMBER["fit"], seconds=30)
    page.wait_for_output(NUMBER["fit"], "tokens/s on average")
    # The progress line is only below the card.
    assert len(re.findall(r"step [\d,]+/[\d,]+ · loss", page.output(NUMBER["fit"]))) == 1
    page.cell(NUMBER["fit"]).screenshot(path=str(tmp_path / "ended.png"))


@pytest.mark.long
def test_the_dashboard_is_there_after_a_reload_of_the_page(page: Any) -> None:
    ended = wait_for_step(page, 1)
    page.run(NUMBER["detached"])
    before = wait_for_step(page, ended + 1)
    # The steps of the previous training count, and so does the last step of this one.
    page.wait_for_output(NUMBER["dashboard"], f" of {100_000 + ended:,} · ")
    assert "of 2 ranks: " in page.run(NUMBER["trace"])
    page.reload()
    page.page.wait_for_selector(SHOWN, timeout=60_000)
    wait_for_step(page, before + 1, 60)
    assert int(page.page.eval_on_selector(SHOWN, "canvas => canvas.dataset.points")) >= before
    page.run(NUMBER["end"], seconds=30)


def test_a_click_changes_the_axis_and_the_dark_theme_is_used(page: Any) -> None:
    page.page.click(".nbkit-dashboard button[data-along='time']")
    page.page.wait_for_function(f"document.querySelector('{SHOWN}').dataset.along === 'time'")
    page.page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    page.page.wait_for_function("document.querySelector('.nbkit-dashboard').classList.contains('dark')")
    page.page.evaluate("document.body.dataset.jpThemeLight = 'true'")
    page.page.wait_for_function("!document.querySelector('.nbkit-dashboard').classList.contains('dark')")


def test_the_report_of_a_run_is_a_saved_page(page: Any, lab: dict[str, str]) -> None:
    said = page.run(NUMBER["report"], seconds=30)
    assert "page.html" in said and "open it in a browser" in said and "PosixPath" not in said
    assert "nbkit-dashboard" in (Path(lab["root"]) / "page.html").read_text()
    assert page.problems == []


def saved_picture(page: Any, lab: dict[str, str]) -> str:
    """Save the notebook and return the picture of the dashboard in the file, as HTML."""
    page.page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    notebook = json.loads((Path(lab["root"]) / "dashboard.ipynb").read_text())
    pages = ["".join(one["data"].get("text/html", [])) for one in notebook["cells"][NUMBER["dashboard"]]["outputs"]]
    return next(page for page in pages if "nbkit-still" in page)


@pytest.mark.long
def test_the_dashboard_has_its_history_after_a_reload_and_a_restart(
    page: Any, lab: dict[str, str], tmp_path: Path
) -> None:
    before = wait_for_step(page, 1)
    page.start(NUMBER["fit"])
    page.wait_for_output(NUMBER["dashboard"], "2 ranks · running")
    page.reload(idle=False)
    page.page.wait_for_selector(SHOWN, timeout=60_000)
    saved = saved_picture(page, lab)
    before = wait_for_step(page, before + 5, 60)
    assert page.ask("api/kernels")[0]["execution_state"] == "busy"
    deadline = time.monotonic() + 3 * STILL_SECONDS
    while (newer := saved_picture(page, lab)) == saved and time.monotonic() < deadline:
        page.page.wait_for_timeout(1000)
    assert newer != saved, "a notebook that is saved after a reload has the picture of before"
    page.picture(tmp_path / "reloaded.png")

    page.restart_kernel()  # the cell goes on
    page.run(NUMBER["load"])
    assert "2 ranks" in page.run(NUMBER["attach"])
    page.run(NUMBER["dashboard"])
    last = wait_for_step(page, before + 1)
    wait_for_step(page, last + 5)
    # On a fast machine the run is long by now, and its oldest steps are means.
    points = int(page.page.eval_on_selector(SHOWN, "canvas => canvas.dataset.points"))
    assert points >= min(before, OVERVIEW_LINES // 2)
    page.picture(tmp_path / "restarted.png")
    page.run(NUMBER["stop"])
    assert page.problems == []


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("fake_run", SOURCE)
    assert spec is not None and spec.loader is not None
    fake = sys.modules.setdefault("fake_run", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(fake)
    folder = tmp_path_factory.mktemp("reports")
    for name, world, strategy, steps in (
        ("small", 4, "dp=4", 60),
        ("late", 4, "dp=4", 20),
        ("big", 64, "dp=16 pp=4 ep=4 schedule=1f1b", 6),
    ):
        run = fake.FakeRun(folder / name, world, strategy, late=2)
        run.of_rows = name == "big"
        for number in range(steps):
            if number == 30:
                run.now += int(4e8)
                run.switch("pp=4 schedule=zbv microbatches=8")
            if number == 45:
                run.event("failure", rank=2, error="NotFinite", what="The loss of step 46 is not finite on rank 2.")
            run.step()
        run.health()
        run.close()
        write_report(folder / name, folder / f"{name}.html")
    return folder


def test_a_late_rank_and_the_modules_of_the_peak_are_named(browser: Any, reports: Path) -> None:
    told, count = re.subn(
        r'"modules":\[\[.*?\]\]',
        '"modules":[["parameters","blocks.*",1000]]',
        (reports / "late.html").read_text(),
    )
    assert count == 4
    (reports / "parts.html").write_text(told)
    page = browser.new_page()
    page.goto(f"file://{reports / 'parts.html'}")
    page.wait_for_selector(".nbkit-dashboard .modules td")
    assert page.locator(".late").inner_text().startswith("· rank 2 is late: ")
    first, last = (line.split() for line in page.locator(".modules tr").all_inner_texts())
    assert first[:4] == ["blocks.*", "parameters", "1", "kB"] and last[:3] == ["all", "other", "modules"]


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.long), "dark"])
def test_a_saved_page_draws_all_pictures(browser: Any, reports: Path, tmp_path: Path, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 1200, "height": 1000}, color_scheme=scheme)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))

    def data(host: str, name: str) -> str:
        shown = ".curves" if host == "curves" else f".{host} canvas"
        return str(page.eval_on_selector(shown, f"shown => shown.dataset.{name}"))

    page.goto(f"file://{reports / 'small.html'}")
    page.wait_for_selector(".nbkit-dashboard .memory canvas[data-rows='4']")
    assert (data("curves", "points"), data("curves", "switches"), data("curves", "strategies")) == ("60", "1", "2")
    assert (data("ranks", "rows"), data("moments", "kind")) == ("4", "pipeline")
    assert page.is_hidden(".expert")
    page.click("button[data-pick='traffic']")
    page.wait_for_selector(".grid canvas[data-world='4']")
    page.mouse.move(*middle(page, ".ranks canvas", 0.3, 0.2))
    assert "compute" in page.inner_text(".tip")
    page.mouse.move(*middle(page, ".curves .u-over", 0.5, 0.3))
    assert "loss" in page.inner_text(".tip")
    page.screenshot(path=str(tmp_path / "small.png"), full_page=True)

    page.goto(f"file://{reports / 'big.html'}")
    page.wait_for_selector(".nbkit-dashboard .ranks canvas[data-ranks='64']")
    assert data("ranks", "rows") == "3"
    assert (data("experts", "rows"), data("experts", "steps")) == ("16", "6")
    page.mouse.move(*middle(page, ".experts canvas", 0.3, 0.05))
    assert "expert 7: 2,750" in page.inner_text(".tip")
    assert " rows/s" in page.inner_text(".figures") and page.inner_text("button[data-along='tokens']") == "rows"
    page.mouse.move(*middle(page, ".curves .u-over", 0.5, 0.3))
    assert " rows/s" in page.inner_text(".tip") and " rows" in page.inner_text(".tip").splitlines()[-1]
    page.mouse.click(*middle(page, ".ranks canvas", 0.3, 0.2))
    page.wait_for_selector(".ranks canvas[data-rows='64']")
    page.screenshot(path=str(tmp_path / "big.png"), full_page=True)
    assert page.evaluate("document.querySelector('.nbkit-dashboard').classList.contains('dark')") == (scheme == "dark")
    page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    page.wait_for_selector(".nbkit-dashboard" + (":not(.dark)" if scheme == "dark" else ".dark"), timeout=5000)
    assert problems == []
    context.close()


def test_curves_can_be_zoomed_hidden_smoothed_and_saved(browser: Any, reports: Path, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 1000})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"file://{reports / 'small.html'}")
    page.wait_for_selector(".curves[data-points='60']")

    def shown(name: str) -> str:
        return str(page.eval_on_selector(".curves", f"curves => curves.dataset.{name}"))

    def save(kind: str) -> str:
        with page.expect_download() as download:
            page.click(f"button[data-do='{kind}']")
        download.value.save_as(tmp_path / f"saved.{kind}")
        assert download.value.suggested_filename == f"small.{kind}"
        return (tmp_path / f"saved.{kind}").read_bytes().decode(errors="replace")

    assert shown("marks") == "switch failure"
    page.click(".marks summary")
    listed = page.inner_text(".marks ul")
    assert "switch after step 30: dp=4 → pp=4" in listed and "rank 2: NotFinite: The loss of step 46" in listed
    rows = save("csv").splitlines()
    assert len(rows) == 61 and rows[0].startswith("run,last_step,steps,") and rows[1].startswith("small,1,1,")
    drawn = save("svg")
    loss = re.findall(r'<path d="([^"]*)"', drawn)[0]
    assert loss.count("M") == 1 and loss.count("L") == 59  # the switch does not interrupt the line
    assert "⇄ pp=4" in drawn and "✕ rank 2: NotFinite" in drawn
    assert save("png").startswith("\ufffdPNG")

    page.mouse.move(*middle(page, ".curves .u-over", 0.25, 0.5))
    page.mouse.down()
    page.mouse.move(*middle(page, ".curves .u-over", 0.75, 0.5), steps=3)
    page.mouse.up()
    low, high = map(float, shown("zoom").split())
    assert (low, high) == (pytest.approx(15, abs=0.2), pytest.approx(45, abs=0.2))
    assert len(save("csv").splitlines()) == pytest.approx(31, abs=1)  # only the visible steps
    page.mouse.dblclick(*middle(page, ".curves .u-over", 0.5, 0.5))
    assert shown("zoom") == ""

    page.mouse.move(0, 0)
    page.focus(".curves")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".tip").startswith("step 2\ndp=4\nloss ")
    page.keyboard.press("+")
    assert shown("zoom") != ""
    page.keyboard.press("0")
    page.keyboard.press("l")
    assert page.get_attribute("button[data-do='log']", "aria-pressed") == "true"
    page.fill(".tools input", "0.9")
    page.click("button[data-line='raw']")
    # Only the smoothed line is left. It does not lag, so it ends near the last values.
    assert len(re.findall('stroke-width="2.2"', save("svg"))) == 2 and 'stroke-width="1.6"' not in save("svg")
    page.keyboard.press("Escape")
    page.click("button[data-along='time']")
    assert "time, s" in save("svg")
    page.keyboard.press("f")
    assert problems == []
    page.close()


WORDS = """
window.drawn = []; window.cut = [];
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const wide = this.measureText(text).width;
  const left = x - { left: 0, center: wide / 2, right: wide }[this.textAlign];
  window.drawn.push(text);
  if (left < -1 || left + wide > this.canvas.clientWidth + 1) window.cut.push(text);
  write.call(this, text, x, y);
};
"""


PIN = """
window.sent = [];
const heard = {};
window.model = {
  get: (name) => (name === "key" ? "one" : true),
  send: (message) => sent.push(message),
  on: (event, act) => { heard[event] = act; },
};
window.tell = (message) => heard["msg:custom"](message, []);
dashboard.widget.initialize({ model });
dashboard.widget.render({ model, el: document.getElementById("here") });
const points = Array.from({ length: 60 }, (_, i) => [i + 1, 1, i * 0.1, i * 100, 4 - i / 20, 1000, 0]);
tell({ kind: "state", state: { run: "first", world: 2, stands: "running", goal: 60, unit: "tokens" } });
tell({ kind: "curve", epoch: 0, keep: 0, events_keep: 0, events: [], strategies: ["dp=2"], points });
tell({ kind: "runs", runs: ["first"], pinned: "", beside: "", steps: null });
"""


def test_a_click_pins_the_run_and_its_visible_steps(browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    script = joined().replace("export const", "const").replace("export default", "void")
    page.set_content(f"<style>{style()}</style><div id='here'></div><script type='module'>{script}{PIN}</script>")
    page.wait_for_selector(f"{SHOWN}[data-points='60']")
    page.focus(SHOWN)
    page.keyboard.press("+")
    page.click("button.pin")
    assert page.evaluate("sent.at(-1)") == {"ask": "pin", "steps": [15, 45]}

    page.keyboard.press("0")
    page.evaluate("tell({ kind: 'runs', runs: ['first'], pinned: 'first', beside: '', steps: [10, 20] })")
    page.wait_for_selector(f"{SHOWN}[data-zoom='9 20']")
    assert page.inner_text("button.pin") == "pinned: steps 10 to 20"
    page.click("button.pin")
    assert page.evaluate("sent.at(-1)") == {"ask": "unpin"}
    page.close()


@pytest.mark.parametrize("width", [760, pytest.param(1300, marks=pytest.mark.long)])
def test_no_text_in_a_chart_is_cut_off(browser: Any, reports: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 1000})
    page.add_init_script(WORDS)
    page.goto(f"file://{reports / 'small.html'}")
    page.wait_for_selector(".nbkit-dashboard .memory canvas[data-rows='4']")
    page.wait_for_timeout(200)

    assert page.evaluate("cut") == []
    # A long strategy is shortened to its axes if there is no room for the rest.
    assert {"⇄ pp=4", "dp=4"} < set(page.evaluate("drawn"))
    assert any(words.startswith("planned: zbv, ") and "for all passes" in words for words in page.evaluate("drawn"))
    # The bubble of one step's passes would be next to that of the steps, which is another number.
    assert not any("bubble" in words for words in page.evaluate("drawn"))
    # These are the end of the axis of steps, the name of the axis of bars, and memory as numbers.
    assert {"60", "time"} < set(page.evaluate("drawn"))
    assert sum(" at rest, peak " in words for words in set(page.evaluate("drawn"))) > 0
    note = page.inner_text(".memorynote")
    assert "counted in step 2; under dp=4; a process has grown by " in note
    assert "a typical step" in page.inner_text(".whatnote")
    assert "CPU, of a core" in page.inner_text(".health")
    page.click("button[data-pick='traffic']")
    page.wait_for_selector(".grid canvas[data-world='4']")
    assert "MB" in page.evaluate("drawn") and page.evaluate("cut") == []
    page.close()


SIGNS = """
window.signs = charts.signWords;
const timeline = new paint.Picture(document.getElementById("here"), "time of steps");
window.above = (events, begun) => {
  drawn.length = 0;
  const points = Array.from({ length: 100 }, (_, i) => [i + 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, null, null, begun]);
  const other = { points: [] };
  charts.drawTimeline(timeline, points, events, { window: 0, chosen: 0, other, unit: "tokens", pick: () => {} });
  return drawn.filter((words) => "▸⇄✕■".includes(words[0]));
};
"""


def test_a_name_above_the_steps_covers_no_sign_and_the_signs_are_explained(browser: Any) -> None:
    page = browser.new_page(viewport={"width": 900, "height": 400})
    script = WORDS + joined().replace("export const", "const").replace("export default", "void")
    page.set_content(f"<div id='here'></div><script type='module'>{script}{SIGNS}</script>")
    page.wait_for_function("() => Boolean(window.above)")
    started, stopped = {"kind": "run_started", "step": 0}, {"kind": "run_stopped", "step": 100}
    failed = {"kind": "failure", "sign": "✕"}
    switch = {"kind": "switch", "sign": "⇄", "new": "dp=2 tp=2 zero=3"}

    def above(*events: dict[str, Any]) -> list[str]:
        return list(page.evaluate("events => above(events, 'dp=4')", list(events)))

    words = "⇄ switch · ■ run stopped · • looked at"
    assert page.evaluate("events => signs(events)", [switch, switch, stopped, {"kind": "looked_at"}]) == words
    assert above(started, switch | {"step": 50}, stopped) == ["▸ dp=4", "⇄ dp=2 tp=2 zero=3", "■"]
    # The name at the right end moves to the left, but not over another sign. Two signs at one place are one.
    assert above(started, failed | {"step": 60}, switch | {"step": 99}) == ["▸ dp=4", "✕", "⇄ dp=2 tp=2 zero=3"]
    assert above(started, failed | {"step": 95}, switch | {"step": 99}) == ["▸ dp=4", "✕", "⇄"]
    assert above(started, failed | {"step": 3}, switch | {"step": 3}) == ["▸", "✕"]
    assert page.evaluate("cut") == []
    page.close()


SPILT = """() => {
  const root = document.querySelector(".nbkit-dashboard");
  const sections = [...root.children].filter((one) => !one.hidden && one.textContent);
  const boxes = sections.map((one) => one.getBoundingClientRect());
  const named = (one) => one.className || one.querySelector("h3").textContent;
  const over = [];
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b, k) => {
    const before = (one, other) => one.right <= other.left + 0.5 || one.bottom <= other.top + 0.5;
    const apart = before(a, b) || before(b, a);
    if (!apart) over.push(`${named(sections[i])} over ${named(sections[i + 1 + k])}`);
  }));
  sections.forEach((section, i) => {
    const walk = document.createTreeWalker(section, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      if (!walk.currentNode.parentElement.checkVisibility()) continue; // a list that is shut
      const range = document.createRange();
      range.selectNodeContents(walk.currentNode);
      for (const box of range.getClientRects()) {
        const { left, right, bottom } = boxes[i];
        const inside = box.left >= left - 0.5 && box.right <= right + 0.5 && box.bottom <= bottom + 0.5;
        if (!inside) over.push(walk.currentNode.textContent);
      }
    }
  });
  return over;
}"""


def test_nothing_overlaps_or_is_cut_off_in_a_narrow_pane_of_a_wide_window(
    browser: Any, reports: Path, tmp_path: Path
) -> None:
    pane = (reports / "small.html").read_text().replace('<main id="run">', '<main id="run" style="width: 500px">')
    (tmp_path / "narrow.html").write_text(pane)
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    page.add_init_script(WORDS)
    page.goto(f"file://{tmp_path / 'narrow.html'}")
    page.wait_for_selector(".nbkit-dashboard.narrow .memory canvas[data-rows='4']")
    page.wait_for_timeout(200)

    assert page.evaluate("document.querySelector('.nbkit-dashboard').clientWidth") == 500
    assert page.evaluate(SPILT) == [] and page.evaluate("cut") == []
    page.click("button[data-pick='traffic']")
    page.wait_for_selector(".grid canvas[data-world='4']")
    assert page.evaluate(SPILT) == [] and page.evaluate("cut") == []
    page.screenshot(path=str(tmp_path / "narrow.png"), full_page=True)
    page.close()


def test_a_card_without_updates_says_so(browser: Any, reports: Path) -> None:
    seen = RunReader(reports / "small").snapshot()
    page = browser.new_page()
    page.set_content(card_html(seen))
    words = page.locator("text=has not changed for a minute")
    assert words.count() == 1 and not words.is_visible()
    page.evaluate("document.getAnimations().forEach((one) => one.finish())")  # as after a minute
    assert words.is_visible() and "%dashboard" in words.inner_text()
    page.set_content(card_html(seen, ended=True))
    assert words.count() == 0
    page.close()


def middle(page: Any, selector: str, x: float, y: float) -> tuple[float, float]:
    box = page.locator(selector).first.bounding_box()
    return box["x"] + x * box["width"], box["y"] + y * box["height"]
