"""A launcher from outside of nbkit, in one class: agents as plain processes of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import nbkit


class LocalLauncher(nbkit.Launcher):
    """A launcher on this machine. `-- fail` makes its command fail, `-- raise` its start, and `-- flaky` later calls.

    With `-- queue` it waits a moment, as a batch system does.
    """

    polls = 0

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        if "raise" in self.options:
            raise RuntimeError("no machine is free")
        if "fail" in self.options:
            command = ["sh", "-c", "echo the queue is closed; exit 3"]
        for host in range(self.nodes):
            self.run(command, {**environment, "NBKIT_HOST_INDEX": str(host)})

    def poll(self) -> nbkit.LauncherStatus | str | None:
        self.polls += 1
        if "queue" in self.options and self.polls < 4:
            return nbkit.LauncherStatus("pending", f"place {4 - self.polls} in the queue")
        if "flaky" in self.options and self.polls > 4:
            raise TimeoutError("the batch system is away")
        return super().poll()

    def stop(self) -> None:
        super().stop()
        if "flaky" in self.options:
            raise TimeoutError("the batch system is away")
