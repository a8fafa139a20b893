"""Start TensorBoard for a notebook, check that it answers, show it and end it.

TensorBoard's own notebook extension may reuse the process of another notebook, with another log directory. Here each
notebook has its own TensorBoard, which is shown only after it has answered.

This module also finds the address of a local port for the browser: directly, or through the notebook server.
"""

from __future__ import annotations

import getpass
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

from nbkit.errors import BoardError
from nbkit.notebook.cluster import site_settings
from nbkit.notebook.cluster.registry import notebook_shell
from nbkit.quoting import shell_words, user_path
from nbkit.records import tags
from nbkit.wire.user_code import OWN_MODULES


def browser_url(port: int, environment: Mapping[str, str], base_url: str = "") -> str:
    """Return the address to open. It has a trailing slash, because TensorBoard's page uses relative URLs.

    environment: these variables are checked in this order: TENSORBOARD_PROXY_URL (with %PORT%),
    JUPYTERHUB_SERVICE_PREFIX, VSCODE_PROXY_URI (of code-server, with {{port}}) and CODESPACE_NAME. VS Code on a remote
    machine forwards the plain address. base_url: the base URL of the Jupyter server if it forwards ports, else "".
    Behind a server the address has no host, so it works with every host name of the server.
    """
    if template := environment.get("TENSORBOARD_PROXY_URL"):
        return template.replace("%PORT%", str(port)).rstrip("/") + "/"
    if prefix := environment.get("JUPYTERHUB_SERVICE_PREFIX") or base_url:
        return f"{prefix.rstrip('/')}/proxy/{port}/"
    if template := environment.get("VSCODE_PROXY_URI"):
        return template.replace("{{port}}", str(port)).rstrip("/") + "/"
    if (name := environment.get("CODESPACE_NAME")) and (
        domain := environment.get("GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN")
    ):
        return f"https://{name}-{port}.{domain}/"
    return f"http://127.0.0.1:{port}/"


def server_base_url(environment: Mapping[str, str], runtime_dir: Path) -> str:
    """Return the base URL of the Jupyter server that started this kernel, if it forwards ports; else ""."""
    if importlib.util.find_spec("jupyter_server_proxy") is None:
        return ""
    # Each running server has this file, with its pid in the name.
    record = runtime_dir / f"jpserver-{environment.get('JPY_PARENT_PID', '')}.json"
    try:
        return str(json.loads(record.read_text())["base_url"])
    except (OSError, ValueError, KeyError):
        return ""


def runtime_dir() -> Path:
    """Return the folder with the records of this user's running Jupyter servers."""
    from jupyter_core.paths import jupyter_runtime_dir

    return Path(jupyter_runtime_dir())


def in_colab(environment: Mapping[str, str]) -> bool:
    """Return True if this kernel runs in Google Colab, where only Colab's page knows the address of a port."""
    return "COLAB_RELEASE_TAG" in environment


def colab_html(port: int, height: int, page: str = "") -> str:
    """Return a link and a frame for Colab. The browser asks Colab for the address of `port`.

    page: the part of the address after the slash. Based on the module tensorboard.notebook of TensorBoard.
    """
    return (
        f"<div id='nbkit-board-{port}'></div><script>(async () => {{"
        f"const url = new URL({json.dumps(page or '.')}, await google.colab.kernel.proxyPort({port}, {{cache: true}}));"
        f"const host = document.getElementById('nbkit-board-{port}');"
        "const link = document.createElement('a'); link.href = url; link.target = '_blank';"
        "link.textContent = 'Open TensorBoard in a tab';"
        "const frame = document.createElement('iframe'); frame.src = url; frame.width = '100%';"
        f"frame.height = {height};"
        "host.append(link, frame);})()</script>"
    )


def other_way(port: int, environment: Mapping[str, str]) -> str:
    """Return another way for the user if the address of `browser_url` does not open. environment: as there."""
    if "JUPYTERHUB_SERVICE_PREFIX" in environment:
        return "if the Hub does not find it: pip install jupyter-server-proxy   where the server is, then start it anew"
    return f"from another machine: {_ssh_line(port)}   then open http://127.0.0.1:{port}/"


def _ssh_line(port: int) -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user has no name, as in some containers
        user = os.environ.get("USER", "USER")
    return f"ssh -L {port}:127.0.0.1:{port} {user}@{socket.gethostname()}"


_current: Board | None = None
_LOG_LINES = 12
# Pin the important charts to the top, because TensorBoard sorts its groups by name.
_PINNED = [{"plugin": "scalars", "tag": tag} for tag in (tags.LOSS, tags.TOKENS_PER_SECOND)]


class Board:
    """The TensorBoard of this notebook, created by `Board.start`. A notebook shows its page, a terminal shows a text.

    logdir: the absolute path of the runs. port: the port on 127.0.0.1. url: the address to open in a browser. height:
    the height of the frame in pixels.
    """

    def __init__(self, logdir: Path, height: int) -> None:
        self.logdir, self.height = logdir, height
        self._outputs: list[Any] = []  # cells' outputs that show it
        # It needs its own session, because an interrupt of the notebook goes to the kernel's whole process group.
        self._log: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, *OWN_MODULES, "nbkit.notebook.board.serve", str(os.getpid()), str(logdir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        try:
            self.port = self._read_port()
            self._check_answer()
        except BaseException:
            self.stop()
            raise
        environment = os.environ
        base_url = server_base_url(environment, runtime_dir())
        self.url = browser_url(self.port, environment, base_url)

    @classmethod
    def start(cls, logdir: str | Path | None = None, *, height: int = 700) -> Board:
        """Start TensorBoard on `logdir`, or reuse this notebook's TensorBoard there. Another logdir replaces it.

        logdir: by default runs, or the one in nbkit.toml.

        Return when it has answered over HTTP. If it does not, raise BoardError and leave nothing running.
        """
        global _current
        if importlib.util.find_spec("tensorboard") is None:
            raise BoardError("TensorBoard is not installed.", hint="pip install tensorboard")
        if height < 1:
            raise BoardError("The frame has no height.", numbers=f"height {height} pixels", hint="--height 700")
        folder = user_path(logdir or site_settings.read().runs).absolute()
        if folder.exists() and not folder.is_dir():
            raise BoardError(
                "The log directory is a file.", numbers=str(folder), hint=f"%board {shell_words(folder.parent)}"
            )
        if _current is not None and (not _current.is_alive() or _current.logdir != folder):
            _current.stop()
            _current = None
        if _current is None:
            _current = cls(folder, height)
        _current.height = height
        return _current

    @staticmethod
    def end() -> str:
        """Stop this notebook's TensorBoard, if there is one. Return a sentence about it."""
        global _current
        if _current is None or not _current.is_alive():
            return "This notebook has no TensorBoard."
        _current.stop()
        stopped, _current = _current, None
        return f"TensorBoard on {stopped.logdir} has ended."

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Return True if the process runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
        for output in self._outputs:  # a saved notebook must not keep a frame for a dead port
            output.update(self._bundle(), raw=True)
        self._outputs.clear()

    def _read_port(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()  # empty when the process has ended
        port = urlsplit(line.strip()).port
        if port is None:
            self._process.wait()
            raise BoardError("TensorBoard did not start.", numbers=self._log_tail(), hint="nbkit doctor")
        return port

    def _check_answer(self) -> None:
        """Raise BoardError unless the server on the port names our log directory."""
        where = f"http://127.0.0.1:{self.port}/data/environment"
        # Use no proxy: it would connect to the port on its own machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + 20
        problem = ""
        while time.monotonic() < deadline and self.is_alive():
            try:
                with opener.open(where, timeout=5) as answer:
                    location = json.load(answer)["data_location"]
            except (urllib.error.URLError, OSError, ValueError) as error:
                problem = str(error)
                time.sleep(0.1)
                continue
            if location == str(self.logdir):
                return
            raise BoardError("Another TensorBoard answers on this port.", numbers=f"port {self.port} serves {location}")
        raise BoardError(
            f"TensorBoard does not answer: {problem or 'it has ended'}.", numbers=self._log_tail(), hint="nbkit doctor"
        )

    def _log_tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-_LOG_LINES:]) or f"it wrote nothing; exit status {self._process.poll()}"

    @property
    def _empty(self) -> str:
        return "" if self.logdir.is_dir() else " (not there yet: what trains into it appears by itself)"

    def _ipython_display_(self) -> None:
        if getattr(notebook_shell(), "kernel", None) is None:
            raise NotImplementedError
        from IPython.display import display

        self._outputs.append(display(self._bundle(), raw=True, display_id=True))

    def _bundle(self) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self._repr_html_()}

    def __repr__(self) -> str:
        if not self.is_alive():
            return f"TensorBoard on {self.logdir}: ended"
        return f"TensorBoard on {self.logdir}{self._empty}: {self.url}\n{other_way(self.port, os.environ)}"

    def _repr_html_(self) -> str:
        if not self.is_alive():
            return f"<code>{escape(repr(self))}</code>"
        page = f"?pinnedCards={quote(json.dumps(_PINNED))}#timeseries"
        if in_colab(os.environ):
            return colab_html(self.port, self.height, page)
        url = escape(self.url + page, quote=True)
        tab = escape(f"{self.url}#communication", quote=True)
        return (
            "<div style='font-size:var(--jp-ui-font-size1,13px);margin:4px 0'>"
            f"<a href='{url}' target='_blank' rel='noopener'>Open TensorBoard in a tab</a>"
            f" · <a href='{tab}' target='_blank' rel='noopener'>Communication</a>"
            f" · runs in <code>{escape(str(self.logdir))}</code>{self._empty}"
            " · ends with this kernel: then <code>%board</code> again"
            f"<br>{escape(other_way(self.port, os.environ))}</div>"
            f"<iframe src='{url}' title='TensorBoard' width='100%' height='{self.height}' "
            "style='border:1px solid var(--jp-border-color2,#ccc)'></iframe>"
        )
