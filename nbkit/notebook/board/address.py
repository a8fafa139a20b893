"""The address of a port of this machine for the browser: direct, or through the notebook server in front of it."""

from __future__ import annotations

import getpass
import importlib.util
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path


def browser_url(port: int, environment: Mapping[str, str], base_url: str = "") -> str:
    """The address to open, always with a trailing slash: TensorBoard's page asks for the rest relative to it.

    environment: TENSORBOARD_PROXY_URL (with %PORT%), JUPYTERHUB_SERVICE_PREFIX, VSCODE_PROXY_URI (code-server's, with
    {{port}}) and CODESPACE_NAME are looked at, in that order. VS Code on a remote machine forwards the plain address.
    base_url: of the Jupyter server if it forwards ports, "" if not. Behind a server the address has no host, so that
    it is right under whatever name the user's browser knows the server.
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
    """The base URL of the Jupyter server that started this kernel, if it forwards ports; else ""."""
    if importlib.util.find_spec("jupyter_server_proxy") is None:
        return ""
    # Each server leaves this file, named by its pid, for the time that it runs.
    record = runtime_dir / f"jpserver-{environment.get('JPY_PARENT_PID', '')}.json"
    try:
        return str(json.loads(record.read_text())["base_url"])
    except (OSError, ValueError, KeyError):
        return ""


def runtime_dir() -> Path:
    """The folders where Jupyter servers of this user write that they run."""
    from jupyter_core.paths import jupyter_runtime_dir

    return Path(jupyter_runtime_dir())


def in_colab(environment: Mapping[str, str]) -> bool:
    """Whether this kernel runs in Google Colab, where only its own page knows the address of a port."""
    return "COLAB_RELEASE_TAG" in environment


def colab_html(port: int, height: int, page: str = "") -> str:
    """A link and a frame for Colab: the browser asks Colab for the address of `port`. page: what follows the slash.

    After TensorBoard's own notebook extension (tensorboard/notebook.py).
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
    """What to do where the address of `browser_url` does not open. environment: as there."""
    if "JUPYTERHUB_SERVICE_PREFIX" in environment:
        return "if the Hub does not find it: pip install jupyter-server-proxy   where the server is, then start it anew"
    return f"from another machine: {_ssh_line(port)}   then open http://127.0.0.1:{port}/"


def _ssh_line(port: int) -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user id has no name
        user = os.environ.get("USER", "USER")
    return f"ssh -L {port}:127.0.0.1:{port} {user}@{socket.gethostname()}"
