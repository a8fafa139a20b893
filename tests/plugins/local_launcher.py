"""A launcher from outside of nbkit, in one class: agents as plain processes of this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import nbkit


class LocalLauncher(nbkit.Launcher):
    """`-- fail` makes its command fail at once, `-- raise` the class itself, and `-- flaky` what is called later."""

    def __init__(self, n: int, **more: Any) -> None:
        super().__init__(n, **more)
        self.started: list[subprocess.Popen[bytes]] = []
        self.polls = 0

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        if "raise" in self.options:
            raise RuntimeError("no machine is free")
        if "fail" in self.options:
            command = ["sh", "-c", "echo the queue is closed; exit 3"]
        for host in range(self.nodes):
            with open(self.folder / "logs" / "launcher.log", "ab") as log:
                variables = {**os.environ, **environment, "NBKIT_HOST_INDEX": str(host)}
                self.started.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))

    def poll(self) -> str | None:
        self.polls += 1
        if "flaky" in self.options and self.polls > 1:
            raise TimeoutError("the batch system is away")
        codes = [process.poll() for process in self.started]
        return f"it exited with code {codes[0]}" if codes and None not in codes else None

    def stop(self) -> None:
        for process in self.started:
            process.terminate()
        for process in self.started:
            process.wait(10)
        if "flaky" in self.options:
            raise TimeoutError("the batch system is away")
