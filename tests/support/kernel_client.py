"""A real Jupyter kernel, driven as a front end does, with every message of every cell."""

from __future__ import annotations

import os
import queue
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusters import end_clusters
from forked_parents import forked_parents_of_kernels
from jupyter_client.manager import KernelManager


@dataclass
class Cell:
    """The result of one cell. messages: (seconds since it was sent, type, content)."""

    status: str = ""
    seconds: float = 0.0
    messages: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text that a reader sees, without colours."""
        parts = []
        for _, kind, content in self.messages:
            if kind == "stream":
                parts.append(content["text"])
            elif kind in ("display_data", "execute_result", "update_display_data"):
                parts.append(f"<{'|'.join(sorted(content['data']))}>{content['data'].get('text/plain', '')}\n")
            elif kind == "error":
                parts.append("\n".join(content["traceback"]) + "\n")
        return re.sub(r"\x1b\[[0-9;]*m", "", "".join(parts))

    def said(self, line: str) -> bool:
        """Return True if ranks 0 and 1 have printed this: see the function `said`."""
        return said(self.text, line)

    @property
    def prompts(self) -> list[str]:
        """The prompts of the cell's requests for input."""
        return [content["prompt"] for _, kind, content in self.messages if kind == "input_request"]

    def when(self, text: str) -> float:
        """Return the seconds after which `text` was on screen."""
        return next(at for at, kind, content in self.messages if kind == "stream" and text in content["text"])


def said(text: str, line: str) -> bool:
    """Return True if ranks 0 and 1 have printed this: in one line, or in one each if one rank was slower."""
    return f"[0-1] {line}" in text or all(f"[{rank}] {line}" in text for rank in (0, 1))


class Kernel:
    """A kernel with `home` for its clusters; use it as a context manager."""

    def __init__(self, home: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        environment["NBKIT_HOME"] = str(home)
        environment["IPYTHONDIR"] = str(home / "ipython")
        self.manager = KernelManager(kernel_name="python3")
        self.environment = environment
        self.others: dict[str, list[tuple[float, str, dict[str, Any]]]] = {}
        self.opened = ExitStack()
        self.opened.enter_context(forked_parents_of_kernels(home / "ipython"))
        self.manager.start_kernel(env=environment, cwd=str(home))
        self._connect()

    def _connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.opened.close()
        # A failed test leaves its cluster running.
        end_clusters(Path(self.environment["NBKIT_HOME"]))

    def restart(self, *, kill: bool) -> None:
        """Restart the kernel as the restart button does. kill: kill it first, as if it ran out of memory."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=kill)
        self._connect()

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def send(self, source: str) -> str:
        """Send a cell and do not wait."""
        return str(self.client.execute(source))

    def run(
        self,
        source: str,
        *,
        timeout: float = 90,
        at: dict[float, Callable[[], object]] | None = None,
        typed: Iterable[str | Callable[[], str | None]] = (),
    ) -> Cell:
        """Run a cell to its end. at: what to do after so many seconds. typed: see `collect`."""
        return self.collect(self.send(source), timeout=timeout, at=at, typed=typed)

    def complete(self, source: str) -> list[str]:
        """Return the completions that Tab offers at the end of `source`."""
        message = self.client.complete(source)
        while True:
            reply = self.client.get_shell_msg(timeout=30)
            if reply["parent_header"].get("msg_id") == message:
                return [str(match) for match in reply["content"]["matches"]]

    def collect(
        self,
        message: str,
        *,
        timeout: float = 90,
        at: dict[float, Callable[[], object]] | None = None,
        typed: Iterable[str | Callable[[], str | None]] = (),
    ) -> Cell:
        """Collect all messages of a cell until it has ended.

        typed: answers from the keyboard, one for each time that the cell asks. A function is called for its answer; if
        that is None, nothing is typed.
        """
        cell, began, idle, lines = Cell(), time.monotonic(), False, iter(typed)
        actions = sorted((at or {}).items())
        while not (idle and cell.status):
            now = time.monotonic() - began
            if now > timeout:
                raise TimeoutError(f"still running after {timeout} s; so far:\n{cell.text}")
            while actions and now >= actions[0][0]:
                actions.pop(0)[1]()
            idle |= self._listen(message, cell, began)
            self._type(cell, began, lines)
            cell.status = cell.status or self._reply(message)
        cell.seconds = time.monotonic() - began
        return cell

    def _type(self, cell: Cell, began: float, lines: Iterator[str | Callable[[], str | None]]) -> None:
        try:
            asked = self.client.get_stdin_msg(timeout=0)
        except queue.Empty:
            return
        cell.messages.append((time.monotonic() - began, "input_request", asked["content"]))
        line = next(lines, None)
        assert line is not None, f"nobody types at {asked['content']['prompt']!r}; so far:\n{cell.text}"
        if (line := line if isinstance(line, str) else line()) is not None:
            self.client.input(line)

    def late(self, message: str, seconds: float) -> Cell:
        """Return the messages of a cell that arrived after its end, or that arrive within so many seconds."""
        cell, began = Cell(), time.monotonic()
        cell.messages += self.others.pop(message, [])
        while time.monotonic() - began < seconds:
            self._listen(message, cell, began)
        return cell

    def _listen(self, message: str, cell: Cell, began: float) -> bool:
        try:
            received = self.client.get_iopub_msg(timeout=0.02)
        except queue.Empty:
            return False
        parent = received["parent_header"].get("msg_id")
        if parent != message:
            self.others.setdefault(parent, []).append((0.0, received["msg_type"], received["content"]))
            return False
        kind, content = received["msg_type"], received["content"]
        cell.messages.append((time.monotonic() - began, kind, content))
        return kind == "status" and content["execution_state"] == "idle"

    def _reply(self, message: str) -> str:
        try:
            reply = self.client.get_shell_msg(timeout=0)
        except queue.Empty:
            return ""
        return str(reply["content"]["status"]) if reply["parent_header"].get("msg_id") == message else ""
