"""A JupyterHub on this machine, with its proxy and one user, whose server runs this Python's packages.

PATH must have jupyterhub and configurable-http-proxy, each from its own installation; see `missing`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket

USER = "ann"
_SECONDS = 120.0
_CONFIG = """\
c.JupyterHub.bind_url = "http://127.0.0.1:{port}/"
c.JupyterHub.hub_port = {hub_port}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy_port}"
c.JupyterHub.authenticator_class = "dummy"
c.JupyterHub.spawner_class = "simple"
c.JupyterHub.services = [{{"name": "tests", "api_token": {token!r}}}]
c.JupyterHub.load_roles = [
    {{"name": "tests", "services": ["tests"], "scopes": ["admin:users", "admin:servers", "access:servers"]}}
]
c.Authenticator.allow_all = True
c.SimpleLocalProcessSpawner.home_dir_template = {home!r}
c.Spawner.args = ["--allow-root"]
c.Spawner.start_timeout = 120
c.Spawner.http_timeout = 120
c.Spawner.environment = {environment!r}
"""


def missing() -> str:
    """Return why there can be no Hub here, or ""."""
    absent = [name for name in ("jupyterhub", "configurable-http-proxy", "node") if not shutil.which(name)]
    if absent:
        where = "pip install jupyterhub jupyter-server-proxy, npm install configurable-http-proxy, each in PATH"
        return f"not installed: {', '.join(absent)} ({where})"
    return ""


class JupyterHub:
    """A Hub with one user. token: of a service that may do anything with the user's server."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.token = folder, secrets.token_hex(16)
        port, hub_port, proxy_port = _free_ports(3)
        self.address = f"http://127.0.0.1:{port}"
        # The server's own packages come first, so that those of the Hub do not hide them.
        packages = sysconfig.get_paths()["purelib"]
        given = environment | {"PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], packages])}
        config = folder / "jupyterhub_config.py"
        config.write_text(
            _CONFIG.format(
                port=port,
                hub_port=hub_port,
                proxy_port=proxy_port,
                token=self.token,
                home=str(folder / "home"),
                environment=given,
            )
        )
        config.chmod(0o600)
        (folder / "home").mkdir()
        with open(folder / "hub.log", "wb") as log:
            self._process = subprocess.Popen(
                ["jupyterhub", "-f", str(config)],
                cwd=folder,
                env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _until(lambda: self.answers("/hub/api/"), "the Hub")

    def get(self, path: str, method: str = "GET", body: dict[str, Any] | None = None) -> bytes:
        """Return the answer to a request to the Hub, or to the user's server behind its proxy. Raises HTTPError."""
        request = urllib.request.Request(
            self.address + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())

    def answers(self, path: str) -> bool:
        """Return True if a request for `path` succeeds."""
        try:
            self.get(path)
        except (urllib.error.URLError, OSError):
            return False
        return True

    def start_server(self) -> None:
        """Start the user's server, and wait until it answers."""
        with contextlib.suppress(urllib.error.HTTPError):  # the user exists already
            self.get(f"/hub/api/users/{USER}", "POST")
        self.get(f"/hub/api/users/{USER}/server", "POST")
        _until(lambda: self.answers(f"/user/{USER}/api/status"), "the user's server")

    def stop_server(self) -> None:
        """Stop the user's server, as a user does in the Hub's control panel, or as the Hub does with an idle server."""
        self.get(f"/hub/api/users/{USER}/server", "DELETE")
        _until(lambda: not json.loads(self.get(f"/hub/api/users/{USER}"))["servers"], "the end of the user's server")

    def kernel(self) -> Kernel:
        """Start a new kernel of the user's server."""
        made = json.loads(self.get(f"/user/{USER}/api/kernels", "POST", {}))
        return Kernel(self, made["id"])

    def close(self) -> None:
        """End the Hub, the server and the proxy."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()


class Kernel:
    """A kernel behind the Hub's proxy."""

    def __init__(self, hub: JupyterHub, name: str) -> None:
        address = f"{hub.address.replace('http', 'ws', 1)}/user/{USER}/api/kernels/{name}/channels"
        self._socket = websocket.create_connection(
            address, header=[f"Authorization: token {hub.token}"], timeout=_SECONDS
        )

    def run(self, source: str) -> str:
        """Run a cell. Return what it prints and shows, as text. Raises RuntimeError if it fails."""
        sent = secrets.token_hex(8)
        header = {"msg_id": sent, "msg_type": "execute_request", "username": "", "session": "tests", "version": "5.3"}
        content = {"code": source, "silent": False, "store_history": True, "allow_stdin": False}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        self._socket.send(json.dumps(message))
        text, ended = "", set[str]()
        while ended != {"reply", "idle"}:
            got = json.loads(self._socket.recv())
            if got["parent_header"].get("msg_id") != sent:
                continue
            kind, content = got["msg_type"], got["content"]
            if kind == "execute_reply":
                ended.add("reply")
                if content["status"] != "ok":
                    raise RuntimeError("\n".join([text, *content.get("traceback", [])]))
            elif kind == "status" and content["execution_state"] == "idle":
                ended.add("idle")
            elif kind == "stream":
                text += content["text"]
            elif "data" in content:
                text += "\n".join(part for part in content["data"].values() if isinstance(part, str))
        return text


@contextlib.contextmanager
def running(folder: Path, environment: dict[str, str]) -> Iterator[JupyterHub]:
    """Run a Hub. environment: of the user's server."""
    hub = JupyterHub(folder, environment)
    try:
        yield hub
    finally:
        hub.close()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as taken:
        made = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in made]


def _until(true: Any, what: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {_SECONDS:.0f} s")
        time.sleep(0.2)
