"""The report of a selftest: one Markdown file, with nothing in it that a stranger should not read."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

import nbkit
from nbkit.notebook.doctor import doctor
from nbkit.notebook.user_files import write_file
from nbkit.quoting import user_path

_PACKAGES = ("torch", "ipyparallel", "ipykernel", "jupyter_client", "numpy", "psutil")
_TELLING = ("TORCH", "PYTORCH", "NCCL", "CUDA")
TAIL = 60  # lines of what was printed before an item failed
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

State = Literal["ok", "FAILED", "left out"]


@dataclass(frozen=True)
class Outcome:
    """Of one item. tail: the last that was printed, and the error, where it failed."""

    name: str
    state: State
    seconds: float
    said: str
    tail: str = ""

    @property
    def line(self) -> str:
        """For the terminal, behind the name."""
        took = f"{self.seconds:6.1f} s" if self.state != "left out" else " " * 8
        return f"{self.state:<8} {took}  {self.said.partition(chr(10))[0]}"


@dataclass(frozen=True)
class Report:
    """on: which ranks, in words. devices: what the ranks say of theirs."""

    on: str
    devices: str
    outcomes: tuple[Outcome, ...]
    seconds: float
    began: float = field(default_factory=time.time)

    @property
    def failed(self) -> tuple[Outcome, ...]:
        return tuple(one for one in self.outcomes if one.state == "FAILED")

    @property
    def verdict(self) -> str:
        """How many of what, in one line."""
        counts = {state: sum(one.state == state for one in self.outcomes) for state in ("ok", "FAILED", "left out")}
        words = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        return f"{words or 'nothing tried'}, in {self.seconds:.0f} s on {self.on}"

    def write(self, path: Path) -> None:
        """As Markdown."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, self._text())

    def _text(self) -> str:
        rows = [f"| {one.name} | {one.state} | {one.seconds:.1f} | {_cell(one.said)} |" for one in self.outcomes]
        parts = [
            f"# nbkit selftest: {self.verdict}",
            time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.began)),
            "\n".join(["| item | result | seconds | found |", "|---|---|---|---|", *rows]),
            *(f"## {one.name} failed\n\n{_block(one.tail)}" for one in self.failed),
            f"## Versions\n\n{_block(_versions())}",
            f"## Ranks\n\n{_block(self.devices)}",
            f"## Environment\n\n{_block(_environment())}",
            f"## nbkit doctor\n\n{_block(str(doctor()))}",
        ]
        return _without_home("\n\n".join(parts)) + "\n"


def tail_of(text: str) -> str:
    """The last lines, without colours."""
    return "\n".join(_COLOURS.sub("", text).splitlines()[-TAIL:])


def _versions() -> str:
    found = {"nbkit": nbkit.__version__, "Python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return _columns(list(found.items()))


def _environment() -> str:
    """Variables of torch, NCCL and CUDA, and no other."""
    return _columns([(name, value) for name, value in sorted(os.environ.items()) if name.startswith(_TELLING)])


def _columns(rows: Sequence[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _block(text: str) -> str:
    # Longer than any fence within.
    return f"````text\n{text.strip() or '(nothing)'}\n````"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _without_home(text: str) -> str:
    home = str(user_path("~"))
    return text.replace(home, "~") if len(home) > 1 else text
