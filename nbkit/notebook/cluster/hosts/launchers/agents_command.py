"""A command on the notebook's host that starts the agents of all hosts, and runs as long as they do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from nbkit.mpi_variables import without_mpi
from nbkit.notebook.cluster.hosts.start_request import last_lines


class AgentsCommand:
    """A command that starts all agents.

    folder: the cluster's folder. log: the name of the file for the command's output.
    """

    def __init__(self, folder: Path, log: str) -> None:
        self._path = folder / "logs" / log
        self._command: subprocess.Popen[bytes] | None = None

    def run(self, words: Sequence[str], payload: str) -> None:
        """Start it. payload: passed to the agents in the environment, which only the user can read."""
        with open(self._path, "ab") as log:
            self._command = subprocess.Popen(
                words,
                env={**without_mpi(os.environ), "NBKIT_AGENT": payload},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def has_ended(self) -> bool:
        """Return True if it was started and has ended."""
        return self._command is not None and self._command.poll() is not None

    def log(self) -> str:
        """Return the last lines of what it printed."""
        return last_lines(self._path)

    def end(self) -> None:
        """End it, together with the agents that have not joined."""
        if self._command is not None:
            self._command.terminate()
            try:
                self._command.wait(10)
            except subprocess.TimeoutExpired:
                self._command.kill()
