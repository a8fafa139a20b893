"""A real JupyterLab on loopback with its own folders, in a real Chromium, used as a person uses it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clusters import end_clusters

PANEL = ".jp-NotebookPanel:not(.lm-mod-hidden)"
IDLE = f"{PANEL} .jp-Notebook-ExecutionIndicator[data-status='idle']"
POLL_MS = 100  # each poll is work for the browser
DONE = re.compile(r"\[\d+\]:?")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # This replaces Playwright's own list, and adds two features of the address bar, which no test needs. They take half
    # a second of a core for each page.
    "--disable-features=AvoidUnnecessaryBeforeUnloadCheckSync,DestroyProfileOnBrowserClose,HttpsUpgrades,LensOverlay,"
    "MediaRouter,OptimizationHints,PaintHolding,WebUIOmniboxPopup,WebUIOmniboxAimPopup",
]
# LAB leaves out a grammar of addresses, whose import takes two seconds. jsonschema does not need it here.
OURS = Path(__file__).resolve().parents[2] / "nbkit" / "notebook" / "lab"
"""nbkit's part of JupyterLab, as it is in this tree; what is installed may be older."""
LAB = """
import sys
sys.modules["rfc3987_syntax"] = None
from jupyterlab.labapp import main
main()
"""
SETTINGS = {
    # Keep cells in the page that are scrolled out of sight.
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "apputils-extension/themes": {"theme": "JupyterLab Light"},
}


@contextmanager
def chromium() -> Iterator[Any]:
    """Run a headless Chromium, as a browser of Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def jupyter_lab(home: Path) -> Iterator[dict[str, str]]:
    """Run a server: url, token, root (its folder of notebooks), clusters (the folder of its clusters)."""
    environment = {**os.environ, "IPYTHONDIR": str(home / "ipython"), "NBKIT_HOME": str(home / "clusters")}
    for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
        environment[f"JUPYTER_{name}"] = str(home / name)
    for name, values in SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    environment["JUPYTERLAB_SETTINGS_DIR"] = str(home / "settings")
    environment["JUPYTERLAB_WORKSPACES_DIR"] = str(home / "workspaces")
    (home / "notebooks").mkdir()
    enabled = home / "CONFIG_DIR" / "jupyter_server_config.d" / "nbkit-train.json"
    enabled.parent.mkdir(parents=True)
    shutil.copy(OURS / "server.json", enabled)
    command = [sys.executable, "-c", LAB, "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=18888"]
    command += ["--ServerApp.port_retries=100", "--IdentityProvider.token=lesson", "--expose-app-in-browser"]
    command += [f"--LabApp.extra_labextensions_path={OURS}"]
    with (home / "lab.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, f"--ServerApp.root_dir={home / 'notebooks'}"],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = _url_of(server, home)
        yield {"url": url, "token": "lesson", "root": str(home / "notebooks"), "clusters": str(home / "clusters")}
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        end_clusters(home / "clusters")


def _url_of(server: subprocess.Popen[bytes], home: Path) -> str:
    """Return the address of the server, from the file in which it writes its port."""
    record = home / "RUNTIME_DIR" / f"jpserver-{server.pid}.json"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        if record.exists() and (text := record.read_text()).endswith("}"):  # the file may be incomplete
            return str(json.loads(text)["url"])
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{(home / 'lab.log').read_text()[-3000:]}")


class LabPage:
    """A browser page that shows one notebook at a time. server: {"url", "token"} of a running JupyterLab."""

    def __init__(self, page: Any, server: dict[str, str]) -> None:
        self.page, self.server, self.path = page, server, ""
        self.problems: list[str] = []
        # A detached cell keeps printing, so that something is always unsaved. Leave the page anyway.
        page.on("dialog", lambda dialog: dialog.accept())
        page.on("pageerror", lambda error: self.problems.append(str(error)))

    def open(self, path: str) -> None:
        """Open the notebook, in a workspace of this page, and wait until its kernel is idle and connected."""
        if self.path:
            self.page.evaluate("path => jupyterapp.commands.execute('docmanager:open', { path })", path)
        else:
            workspace = f"{self.server['url']}lab/workspaces/nbkit{time.monotonic_ns()}"
            self.page.goto(f"{workspace}/tree/{path}?token={self.server['token']}&reset")
        self.path = path
        self.problems.clear()
        self.wait_for_idle()

    def close_all(self) -> None:
        """Close the notebook without a question about unsaved output."""
        self.page.evaluate("[...jupyterapp.shell.widgets('main')].forEach(one => one.dispose())")

    def beside(self) -> LabPage:
        """Open the same notebook and kernel in Notebook 7, in a second page."""
        other = LabPage(self.page.context.new_page(), self.server)
        other.path = self.path
        other.page.goto(f"{self.server['url']}notebooks/{self.path}?token={self.server['token']}")
        other.page.wait_for_selector(f"{PANEL} .jp-Notebook .jp-CodeCell", timeout=60_000)
        return other

    def reload(self, *, idle: bool = True) -> None:
        """Save, then load the page again, as a person does after a break. idle: wait until the kernel is."""
        stored = Path(self.server["root"]) / self.path
        before = stored.stat().st_mtime_ns
        self.cell(0).locator(".jp-InputPrompt").click()  # a widget's panel would take the keys
        self.page.keyboard.press("Control+s")
        deadline = time.monotonic() + 30
        while stored.stat().st_mtime_ns == before:
            assert time.monotonic() < deadline, "Lab did not save the notebook"
            self.page.wait_for_timeout(POLL_MS)
        self.page.reload()
        if idle:
            self.wait_for_idle()

    def restart_kernel(self) -> None:
        """Restart the kernel as the menu does, and wait until the new one is idle."""
        kernel = next(s["kernel"]["id"] for s in self.ask("api/sessions") if s["path"] == self.path)
        self._request(f"api/kernels/{kernel}/restart", "POST", 60).close()
        try:
            self.wait_for_idle(20, restarted=True)
        except TimeoutError:
            self.page.reload()  # page and server can both miss the new kernel's first message
            self.wait_for_idle(restarted=True)

    def end_kernels(self) -> None:
        """Shut down all kernels that the server has."""
        for session in self.ask("api/sessions"):
            self._request(f"api/sessions/{session['id']}", "DELETE", 60).close()

    def wait_for_idle(self, seconds: float = 120, *, restarted: bool = False) -> None:
        """Wait until no cell runs and the kernel is connected. A page opened while a cell ran shows nothing of it.

        restarted: the server may have missed the new kernel's first message, and still say busy.
        """
        self.page.wait_for_selector(f"{PANEL} .jp-Notebook .jp-CodeCell", timeout=60_000)
        # Lab says idle before the kernel is connected, and loses a cell that is run then.
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            kernels = [s["kernel"] for s in self.ask("api/sessions") if s["path"] == self.path]
            idle = kernels and (
                kernels[0]["execution_state"] == "idle" or (restarted and self.page.query_selector(IDLE))
            )
            if idle and kernels[0]["connections"] > 0:
                self.page.wait_for_timeout(300)
                return
            self.page.wait_for_timeout(100)
        raise TimeoutError(f"the kernel of {self.path} is not idle: {kernels}")

    def ask(self, what: str) -> Any:
        """Return the answer of the server's API."""
        with self._request(what, "GET", 10) as answer:
            return json.load(answer)

    def _request(self, what: str, method: str, seconds: float) -> Any:
        address = f"{self.server['url']}{what}?token={self.server['token']}"
        return urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=seconds)

    def cell(self, number: int) -> Any:
        return self.page.locator(f"{PANEL} .jp-Notebook .jp-Cell").nth(number)

    def prompt(self, number: int) -> str:
        return str(self.cell(number).locator(".jp-InputPrompt").inner_text()).strip()

    def output(self, number: int) -> str:
        area = self.cell(number).locator(".jp-Cell-outputArea")
        return str(area.inner_text()) if area.count() else ""

    def start(self, number: int) -> None:
        """Start a cell and return at once. Repeat a key press that the busy page has lost."""
        if self.prompt(number) == "[*]:":  # left by a test that failed before
            self.interrupt()
            self.wait_done(number)
        before, deadline, press_at = self.prompt(number), time.monotonic() + 40, 0.0
        while self.prompt(number) == before:
            assert time.monotonic() < deadline, f"cell {number} did not start"
            if time.monotonic() > press_at:
                press_at = time.monotonic() + 10
                self.cell(number).locator(".jp-InputArea-editor").click(timeout=20_000)
                self.page.keyboard.press("Control+Enter")
            self.page.wait_for_timeout(POLL_MS)

    def run(self, number: int, seconds: float = 60) -> str:
        """Run a cell, and wait until it has ended. Return what it shows."""
        self.start(number)
        self.wait_done(number, seconds)
        return self.output(number)

    def is_done(self, number: int) -> bool:
        return DONE.fullmatch(self.prompt(number)) is not None

    def wait_done(self, number: int, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not self.is_done(number):
            assert time.monotonic() < deadline, f"cell {number} is not over: {self.output(number)[-500:]}"
            self.page.wait_for_timeout(POLL_MS)

    def wait_for_output(self, number: int, text: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.output(number):
            assert time.monotonic() < deadline, f"{text!r} is not in cell {number}: {self.output(number)[-500:]!r}"
            self.page.wait_for_timeout(POLL_MS)

    def interrupt(self) -> None:
        """Press the stop button of the toolbar, or use the menu if the toolbar has no room for it."""
        button = self.page.locator(f"{PANEL} [data-jp-item-name='interrupt'] >> visible=true").first
        if button.is_visible():
            button.click()
            return
        self.page.locator(".lm-MenuBar-item", has_text="Kernel").click()
        self.page.locator(".lm-Menu-item", has_text="Interrupt Kernel").first.click()

    def calm(self) -> None:
        """Stop what a failed test left running."""
        if any(s["kernel"]["execution_state"] != "idle" for s in self.ask("api/sessions") if s["path"] == self.path):
            self.interrupt()
            self.wait_for_idle()

    def picture(self, path: Path) -> None:
        self.page.screenshot(path=str(path))
