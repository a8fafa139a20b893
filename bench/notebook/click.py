"""Measure a click on Apply in a real browser, until the ranks begin their first step under the new strategy.

JupyterLab runs in headless Chromium. One cell trains, another shows the panel. The times of steps come from the
records of rank 0; the time of the click comes from the clock of the same machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.rigs.kernel import environment
from bench.settings import Settings
from bench.stats import quantile
from bench.table import Row, absolute, skipped
from nbkit.records.record_file import START, read_since
from nbkit.records.records import Header, StepRecord

RANKS, ROUNDS = 4, 3
STRATEGIES = ("dp=4 zero=3", "tp=4", "pp=4 schedule=1f1b microbatches=8", "dp=4")
BAR = 1.0
WHAT = "click on Apply to the first step under the new strategy, beyond the step that was running"
WAIT_MS = 120_000
LAB = {
    # Keep cells in the page that are scrolled out of sight, and show no dialog over them.
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
CELLS = (
    "%load_ext nbkit",
    f"%cluster start -n {RANKS} --cpu --ttl 30",
    """%%distributed
torch.set_num_threads(1)
trainer = nbkit.Trainer(
    model=lambda: nbkit.GPT(nbkit.GPTConfig(block=32, layers=12, heads=8, width=WIDTH)),
    loss=lambda logits, target: torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    data=nbkit.TextDataset(block=32, limit=100_000), batch_size=8, name="click")""",
    "%strategy",
    "%%distributed\nrecords = trainer.fit(1_000_000)",
    "%cluster stop",
)
PANEL, TRAIN, END = 3, 4, 5


def run(settings: Settings) -> list[Row]:
    """Return one row about all clicks. After the first round, each strategy has been used before."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None or find_spec("playwright") is None or find_spec("jupyterlab") is None:
        return [skipped(WHAT, "the step that was running", "no Chromium, Playwright or JupyterLab here")]
    from playwright.sync_api import sync_playwright

    width = 64 if settings.quick else 256
    with _lab(settings.folder, width) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 1500})
        page.goto(address)
        clicks = _clicks(page, settings.count(ROUNDS))
        browser.close()
    (records,) = settings.folder.glob("runs/click*/telemetry/rank0.jsonl")
    made = _steps(records)
    beyond = [_beyond(made, at, strategy) for at, strategy in clicks]
    what = f"{WHAT}, {RANKS} ranks, the slowest of {len(beyond)} clicks"
    middle = quantile(beyond).middle
    step = quantile([stop - start for start, stop, _ in made]).middle
    return [absolute(what, [max(beyond)], BAR, "s", peer=f"median {middle:.3g} s; a step takes {step:.3g} s")]


def _clicks(page: Any, rounds: int) -> list[tuple[float, str]]:
    """Apply each strategy in turn while the cell trains; return (when Apply was pressed, strategy) of each click."""
    for number in range(TRAIN):
        _start(page, number)
        _until(page, lambda at=number: _prompt(page, at).strip("[]: ").isdigit())
    _start(page, TRAIN)
    panel = page.locator(".jp-Notebook .jp-CodeCell").nth(PANEL).locator(".nbkit-panel")
    _until(page, lambda: panel.locator(".headline").inner_text().startswith("training"))
    found = []
    for strategy in STRATEGIES * rounds:
        panel.locator(f'tr[data-strategy="{strategy}"]').click(timeout=WAIT_MS)
        page.wait_for_timeout(700)  # a person would read the cost of the switch here
        found.append((time.time(), strategy))
        panel.get_by_role("button", name="Apply", exact=True).click(timeout=WAIT_MS)
        _until(page, lambda to=strategy: panel.locator("tbody tr.now").get_attribute("data-strategy") == to)
        page.wait_for_timeout(3000)
    panel.get_by_role("button", name="Stop", exact=True).click(timeout=WAIT_MS)
    _until(page, lambda: _prompt(page, TRAIN).strip("[]: ").isdigit())
    _start(page, END)
    _until(page, lambda: _prompt(page, END).strip("[]: ").isdigit())
    return found


def _start(page: Any, number: int) -> None:
    """Start a cell and return when it runs. Press again every 10 s: until the kernel is connected, presses are lost."""
    before, press_at = _prompt(page, number), 0.0

    def started() -> bool:
        nonlocal press_at
        if time.monotonic() > press_at:
            press_at = time.monotonic() + 10
            page.locator(".jp-Notebook .jp-CodeCell").nth(number).locator(".jp-InputArea-editor").click(timeout=WAIT_MS)
            page.keyboard.press("Control+Enter")
        return _prompt(page, number) != before

    _until(page, started)


def _prompt(page: Any, number: int) -> str:
    """Return a cell's prompt: "[ ]:" before it runs, "[*]:" while it runs, then its number."""
    return str(page.locator(".jp-Notebook .jp-CodeCell").nth(number).locator(".jp-InputPrompt").inner_text())


def _until(page: Any, happened: Any) -> None:
    deadline = time.monotonic() + WAIT_MS / 1000
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the page shows: {page.locator('.jp-Notebook').inner_text()[-2000:]}")
        page.wait_for_timeout(50)


def _steps(path: Path) -> list[tuple[float, float, str]]:
    """Return (beginning, end, strategy) of every recorded step but the last, in seconds since 1970."""
    records, _ = read_since(path, START)
    head = next(one for one in records if isinstance(one, Header))
    steps = [one for one in records if isinstance(one, StepRecord)]
    found = []
    for step, after in pairwise(steps):
        stop = head.unix(after.start_ns)
        # A record begins where the one before it ended. Work outside of steps, such as a switch, comes before the step.
        found.append((stop - step.seconds, stop, str(step.numbers.get("strategy"))))
    return found


def _beyond(steps: list[tuple[float, float, str]], clicked: float, strategy: str) -> float:
    """Return the seconds from the end of the step that ran at `clicked` to the first step under `strategy`."""
    running = next(stop for _, stop, _ in steps if stop > clicked)
    return next(start for start, stop, under in steps if stop > clicked and under == strategy) - running


@contextmanager
def _lab(folder: Path, width: int) -> Iterator[str]:
    """Run a JupyterLab with its own folders and yield the address at which it shows the notebook."""
    sources = [source.replace("WIDTH", str(width)) for source in CELLS]
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
        for i, source in enumerate(sources)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "click.ipynb").write_text(json.dumps(notebook))
    for name, values in LAB.items():
        path = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    own = {"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces"}
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--IdentityProvider.token=bench"]
    with open(folder / "lab.log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options, f"--ServerApp.root_dir={folder}"],
            env=environment(folder) | {name: str(folder / place) for name, place in own.items()},
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        yield f"{_url(server, folder)}lab/tree/click.ipynb?token=bench&reset"
    finally:
        server.terminate()
        server.wait(20)


def _url(server: subprocess.Popen[bytes], folder: Path) -> str:
    record = folder / "runtime" / f"jpserver-{server.pid}.json"
    deadline = time.monotonic() + 60
    while not record.exists():
        if time.monotonic() > deadline or server.poll() is not None:
            raise RuntimeError(f"JupyterLab did not start: {(folder / 'lab.log').read_text()[-2000:]}")
        time.sleep(0.1)
    return str(json.loads(record.read_text())["url"])
