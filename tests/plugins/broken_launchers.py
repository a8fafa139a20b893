"""Launchers with mistakes."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

import nbkit


class WithoutStart(nbkit.Launcher):
    """A launcher without `start`."""


class NotDerived:
    """A launcher that does not derive from `nbkit.Launcher`."""

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start nothing."""


class WithoutPoll(nbkit.Launcher):
    """A launcher that starts its agents without `run`, so it cannot tell whether they run."""

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        subprocess.Popen(["true"]).wait()


class WithoutProgram(nbkit.Launcher):
    """A launcher whose program is not installed here."""

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.run(["no-such-program", *command], environment)


class Leaves(nbkit.Launcher):
    """A launcher whose program returns at once."""

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.run(["sh", "-c", "exit 0", *command], environment)
