"""A real jupyter_server with its default limits, and a kernel behind its websocket, as a browser sees it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any, Self

import websocket

from bench.rigs.kernel import Cell, Message, environment

TOKEN = "bench"
UP_SECONDS = 60.0


class ServedKernel:
    """A server, a kernel in it and a websocket to the kernel, for a `with` statement."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        options = ["--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--IdentityProvider.token={TOKEN}"]
        with open(self.folder / "server.log", "wb") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "jupyter_server", *options, f"--ServerApp.root_dir={self.folder}"],
                env=environment(self.folder),
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        self.port = self._port()
        self.kernel = self._ask("POST", "/api/kernels", {"name": "python3"})["id"]
        self.session = uuid.uuid4().hex
        address = (
            f"ws://127.0.0.1:{self.port}/api/kernels/{self.kernel}/channels?session_id={self.session}&token={TOKEN}"
        )
        self.socket = websocket.create_connection(address, timeout=UP_SECONDS)
        self.run("1")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.socket.close()
            self._ask("DELETE", f"/api/kernels/{self.kernel}")
        finally:
            self.server.terminate()
            self.server.wait(20)

    def run(self, source: str, timeout: float = 180.0) -> Cell:
        """Run one cell and return its output.

        Raises RuntimeError if it fails, websocket.WebSocketTimeoutException if nothing arrives for `timeout` seconds.
        """
        asked = uuid.uuid4().hex
        header = {"msg_id": asked, "msg_type": "execute_request", "username": "", "session": self.session}
        content = {"code": source, "silent": False, "store_history": True, "allow_stdin": False}
        request = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        cell = Cell()
        began = time.perf_counter()
        self.socket.settimeout(timeout)
        self.socket.send(json.dumps(request))
        idle = False
        while not (idle and cell.status):
            message = json.loads(self.socket.recv())
            if message["parent_header"].get("msg_id") != asked:
                continue
            if message["channel"] == "iopub":
                cell.messages.append(Message(time.time(), message["msg_type"], message["content"]))
                idle |= message["content"].get("execution_state") == "idle"
            elif message["msg_type"] == "execute_reply":
                cell.status = message["content"]["status"]
        cell.seconds = time.perf_counter() - began
        if cell.status != "ok":
            raise RuntimeError(f"the cell failed: {source[:200]}\n{cell.text[-3000:]}")
        return cell

    def _port(self) -> int:
        """Return the port from the file that the server writes when it listens. Raises RuntimeError without one."""
        deadline = time.monotonic() + UP_SECONDS
        while time.monotonic() < deadline and self.server.poll() is None:
            for path in (self.folder / "runtime").glob("jpserver-*.json"):
                try:
                    return int(json.loads(path.read_text())["port"])
                except ValueError:
                    continue  # it is being written
            time.sleep(0.05)
        raise RuntimeError(f"jupyter_server did not start:\n{(self.folder / 'server.log').read_text()[-2000:]}")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, method=method)
        request.add_header("Authorization", f"token {TOKEN}")
        with urllib.request.urlopen(request, timeout=UP_SECONDS) as answer:
            text = answer.read()
        return json.loads(text) if text else None
