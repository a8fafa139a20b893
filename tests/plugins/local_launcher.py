"""A launcher from outside of nbkit, in one class: agents as plain processes of this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import nbkit

QUEUE_SECONDS = 4


class LocalLauncher(nbkit.Launcher):
    """A launcher on this machine. `-- fail` makes its command fail, `-- raise` its start, and `-- flaky` later calls.

    With `-- queue` they start some seconds later, as in a batch system.
    """

    began = 0.0

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        if "raise" in self.options:
            raise RuntimeError("no machine is free")
        if "fail" in self.options:
            command = ["sh", "-c", "echo the queue is closed; exit 3"]
        if "queue" in self.options:
            command = ["sh", "-c", f'sleep {QUEUE_SECONDS}; exec "$@"', "sh", *command]
        self.began = time.monotonic()
        for host in range(self.nodes):
            self.run(command, {**environment, "NBKIT_HOST_INDEX": str(host)})

    def poll(self) -> nbkit.LauncherStatus | str | None:
        left = QUEUE_SECONDS - (time.monotonic() - self.began)
        if "queue" in self.options and left > 0:
            return nbkit.LauncherStatus("pending", f"{left:.0f} s in the queue")
        if "flaky" in self.options and left < -1:
            raise TimeoutError("the batch system is away")
        return super().poll()

    def stop(self) -> None:
        super().stop()
        if "flaky" in self.options:
            raise TimeoutError("the batch system is away")
