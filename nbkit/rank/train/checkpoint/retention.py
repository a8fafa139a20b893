"""The checkpoints in a directory: their names, which of them stay, and which is the newest."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nbkit.rank.train.runs_dir import runs_named

_NAMED = re.compile(r"step-\d+")
_MANIFEST = ".metadata"


@dataclass(frozen=True)
class Keep:
    """Limits on the checkpoints that stay: their number and their age in seconds. None: no limit.

    The newest always stays.
    """

    number: int | None
    seconds: float | None

    def prune(self, folder: Path, newest: Path) -> None:
        """Delete the checkpoints of `folder` that exceed the limits, and remains of saves that were broken off."""
        number = 1
        for path in found([folder]):
            if path == newest or not _NAMED.fullmatch(path.name):
                continue
            whole = (path / _MANIFEST).exists()
            number += whole
            old = self.seconds is not None and time.time() - _written(path) > self.seconds
            if old or not whole or (self.number is not None and number > self.number):
                with suppress(OSError):
                    (path / _MANIFEST).unlink(missing_ok=True)  # first, so that nobody takes it for whole meanwhile
                shutil.rmtree(path, ignore_errors=True)


def place(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`, if `folder` holds several."""
    return folder / f"step-{step}"


def found(folders: Iterable[Path]) -> list[Path]:
    """Return all possible checkpoints: `folders` and the directories in them, whole or not, the newest first."""
    paths = [
        path
        for folder in folders
        for path in (folder, *(folder.glob("step-*") if folder.is_dir() else ()))
        if (path / _MANIFEST).exists() or (_NAMED.fullmatch(path.name) and path.is_dir())
    ]
    return sorted(paths, key=_written, reverse=True)


def of_runs(log_dir: Path, name: str) -> list[Path]:
    """Return the checkpoint directories of the runs called exactly `name`."""
    return [run / "checkpoint" for run in runs_named(log_dir, name)]


def _written(path: Path) -> float:
    for one in (path / _MANIFEST, path):
        with suppress(OSError):
            return one.stat().st_mtime
    return 0.0
