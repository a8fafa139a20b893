"""A real IPython kernel, driven over zmq like a front end does. Every message gets a time when it arrives."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import zmq
from jupyter_client.manager import KernelManager

READY_SECONDS = 60.0


@dataclass(frozen=True)
class Message:
    """An iopub message. at: time.time() when it arrived."""

    at: float
    kind: str
    content: dict[str, Any]


@dataclass
class Cell:
    """The output of a cell. seconds: from sending until both reply and idle have arrived."""

    seconds: float = 0.0
    status: str = ""
    messages: list[Message] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return all text that a person could read."""
        pieces = []
        for message in self.messages:
            content = message.content
            pieces.append(content.get("text") or content.get("data", {}).get("text/plain") or "")
            pieces.append("\n".join(content.get("traceback", ())))
        return "".join(pieces)


class Kernel:
    """A kernel that starts on entry of `with`. On exit it is shut down, with all processes that it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The queue is unbounded, so that no message is lost in this process.
        self.context: zmq.Context[Any] = zmq.Context()
        self.context.setsockopt(zmq.RCVHWM, 0)
        self.manager = KernelManager(context=self.context, kernel_name="python3")

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "kernel.log", "ab") as log:
            self.manager.start_kernel(env=environment(self.folder), cwd=str(self.folder), stdout=log, stderr=log)
        self.shell = self.manager.connect_shell()
        self.iopub = self.manager.connect_iopub()
        self.poller = zmq.Poller()
        self.poller.register(self.shell, zmq.POLLIN)
        self.poller.register(self.iopub, zmq.POLLIN)
        self._wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.shell.close(0)
        self.iopub.close(0)
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self.context.destroy(0)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.process.pid)  # type: ignore[union-attr, attr-defined]

    def run(self, source: str, timeout: float = 120.0, *, may_fail: bool = False) -> Cell:
        """Run one cell and return its output.

        Raises RuntimeError with the output if the cell fails (unless `may_fail`), TimeoutError if it does not end.
        """
        session = self.manager.session
        cell = Cell()
        content = {"code": source, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": False}
        began = time.perf_counter()
        asked = session.send(self.shell, "execute_request", content)["header"]["msg_id"]
        replied = idle = False
        while not (replied and idle):
            left = timeout - (time.perf_counter() - began)
            ready = dict(self.poller.poll(max(0.0, left) * 1000))
            if not ready:
                raise TimeoutError(f"no end after {timeout:.0f} s: {source[:200]}\n{cell.text[-2000:]}")
            if self.iopub in ready:
                at, message = time.time(), self._receive(self.iopub)
                if message["parent_header"].get("msg_id") == asked:
                    cell.messages.append(Message(at, message["msg_type"], message["content"]))
                    idle |= message["content"].get("execution_state") == "idle"
            if self.shell in ready:
                message = self._receive(self.shell)
                if message["parent_header"].get("msg_id") == asked:
                    replied, cell.status = True, message["content"]["status"]
        cell.seconds = time.perf_counter() - began
        if cell.status != "ok" and not may_fail:
            raise RuntimeError(f"the cell failed: {source[:200]}\n{cell.text[-3000:]}")
        return cell

    def _receive(self, socket: Any) -> dict[str, Any]:
        _, message = self.manager.session.recv(socket, 0)
        assert message is not None
        return message

    def _wait_until_ready(self) -> None:
        """Wait until the kernel answers and its broadcasts arrive. A subscription takes effect only after a while."""
        deadline = time.monotonic() + READY_SECONDS
        seen: set[Any] = set()
        while len(seen) < 2:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the kernel is not ready after {READY_SECONDS:.0f} s: {self.folder / 'kernel.log'}")
            self.manager.session.send(self.shell, "kernel_info_request", {})
            for socket in dict(self.poller.poll(100)):
                self._receive(socket)
                seen.add(socket)
        while ready := dict(self.poller.poll(50)):
            for socket in ready:
                self._receive(socket)


def environment(folder: Path) -> dict[str, str]:
    """Return environment variables for a kernel that neither reads nor writes the user's own folders."""
    return {
        **os.environ,
        # nbdistributed starts its workers with the first `python` on the path.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "NBKIT_HOME": str(folder / "clusters"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
