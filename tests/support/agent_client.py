"""A client of `nbkit mcp` without a model. It starts the server as an agent's program does, and calls its tools."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_START = "{before}\nimport sys\nfrom nbkit.commands import main\nsys.exit(main({words!r}))"


class AgentClient:
    """`with AgentClient(home, "code") as agent: agent.call("status")`. before: source that the server runs first."""

    def __init__(self, home: Path, allow: str = "look", *, folder: Path | None = None, before: str = "") -> None:
        self.home = home
        words = ["mcp", "--allow", allow, "--dir", str(folder or home)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START.format(before=before, words=words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "NBKIT_HOME": str(home)},
        )
        self._ids = itertools.count(1)
        self._early: dict[Any, dict[str, Any]] = {}

    def __enter__(self) -> AgentClient:
        client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
        self.hello = self.ask("initialize", client)["result"]
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()

    def send(self, message: Any) -> None:
        """Write a message, or any bytes, on a line."""
        line = message if isinstance(message, bytes) else json.dumps(message).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def ask(self, method: str, params: Any = None) -> dict[str, Any]:
        """Send a request, and return its whole answer."""
        return self.answer(self.begin(method, params))

    def begin(self, method: str, params: Any = None) -> int:
        """Send a request, and return its id."""
        id = next(self._ids)
        self.send({"jsonrpc": "2.0", "id": id, "method": method, "params": params or {}})
        return id

    def answer(self, id: int | None) -> dict[str, Any]:
        """Return the answer to a request. Answers to others may come before it."""
        assert self.process.stdout is not None
        while id not in self._early:
            line = self.process.stdout.readline()
            assert line, f"the server has ended: {self.process.wait()}"
            answer: dict[str, Any] = json.loads(line)
            self._early[answer["id"]] = answer
        return self._early.pop(id)

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Return what a tool returns. Fails if it is an error."""
        result = self.ask("tools/call", {"name": tool, "arguments": arguments})["result"]
        assert not result["isError"], result["content"][0]["text"]
        told: dict[str, Any] = result["structuredContent"]
        assert json.loads(result["content"][0]["text"]) == told
        return told

    def refused(self, tool: str, **arguments: Any) -> str:
        """Return why a tool refuses. Fails if it does not."""
        answer = self.ask("tools/call", {"name": tool, "arguments": arguments})
        if "error" in answer:
            return str(answer["error"]["message"])
        assert answer["result"]["isError"], answer["result"]
        return str(answer["result"]["content"][0]["text"])

    @property
    def log(self) -> list[dict[str, Any]]:
        """Return the lines of the log, of all servers with this home."""
        return [json.loads(line) for line in (self.home / "mcp.jsonl").read_text().splitlines()]
