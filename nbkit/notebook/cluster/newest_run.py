"""Find the records of a cluster's newest training: the run's own directory, or a copy if it is on another disk."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import Any

import psutil

from nbkit.errors import NbkitError
from nbkit.notebook.cluster import site_settings
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.registry import ClusterEntry
from nbkit.records.record_file import newest_run, old_part, written
from nbkit.wire.messages import GetRecords

_PIECES = 8  # at most, of a megabyte each, of one file in a call


class NewestRun:
    """A callable that returns the current directory.

    mirror: copy the files even if they can be read directly.
    """

    def __init__(self, connection: Connection, *, mirror: bool = False) -> None:
        self._connection, self._mirror = connection, mirror
        self._known: Path | None = None
        self._copies: dict[str, _Copy] = {}

    def __call__(self) -> Path | None:
        """Return the directory, or None if there has been no training.

        While no rank answers, return the last directory found.
        """
        run = self._ask([0]).get(0, {}).get("run")
        if not run:
            return self._known
        if not self._mirror and (Path(run) / "telemetry").is_dir():
            self._known = Path(run)
        else:
            copy = self._copies[run] = self._copies.get(run) or _Copy(run)
            self._known = copy.bring(self._ask, self._connection.entry.n)
        return self._known

    def _ask(self, ranks: list[int], **content: Any) -> dict[int, dict[str, Any]]:
        connection = self._connection
        try:
            if connection.why_gone():
                return {}
            alive = [rank for rank in ranks if rank not in connection.deaths]
            answers: dict[int, dict[str, Any]] = {}
            for rank in alive:
                answers |= connection.client.ask([rank], GetRecords(rank, **content))
            return answers
        except (NbkitError, OSError):
            return {}


def recorded_by(entry: ClusterEntry) -> Path | None:
    """Return the newest run of a cluster on this host, or None, without asking its ranks.

    This is the run of the newest record file that rank 0 has open, else the newest run in its folder of runs.
    """
    try:
        rank = psutil.Process(entry.ranks[0].pid)
        files = [Path(file.path) for file in rank.open_files() if Path(file.path).parent.name == "telemetry"]
        newest = max(files, key=written, default=None)
        return newest.parents[1] if newest is not None else newest_run(Path(rank.cwd()) / site_settings.read().runs)
    except (psutil.Error, OSError, IndexError):
        return None


class _Copy:
    """A copy of the files of a run, made in pieces. run: its directory on the ranks' disk."""

    def __init__(self, run: str) -> None:
        self._run, self._home = run, tempfile.TemporaryDirectory(prefix="nbkit-run-")
        self.folder = Path(self._home.name) / Path(run).name
        (self.folder / "telemetry").mkdir(parents=True)
        self._heads: dict[str, str] = {}

    def bring(self, ask: Any, ranks: int) -> Path:
        """Copy the new data of all ranks' files. Return the directory of the copy."""
        for rank in range(ranks):
            self._follow(ask, rank, "records", f"rank{rank}.jsonl")
        self._follow(ask, 0, "plan", "plan.jsonl")
        return self.folder

    def _follow(self, ask: Any, rank: int, file: str, name: str) -> None:
        path = self.folder / "telemetry" / name
        for _ in range(_PIECES):
            size = path.stat().st_size if path.exists() else 0
            answer = ask([rank], file=file, offset=size).get(rank, {})
            if "head" not in answer or answer["run"] != self._run:
                return  # no answer, no such file now, or a newer training
            if not answer["data"] and answer["head"] == self._heads.get(name):
                return
            if size and file == "records" and answer["head"] != self._heads.get(name):
                self._end_part(ask, rank, path, self._heads.get(name, ""))
                self._heads[name] = answer["head"]
                continue
            self._heads[name] = answer["head"]
            with path.open("ab") as here:
                here.write(base64.b64decode(answer["data"]))

    def _end_part(self, ask: Any, rank: int, path: Path, head: str) -> None:
        """Copy the rest of the current part and rename the copy. Called when the rank has begun a new part."""
        with path.open("ab") as here:
            while True:
                answer = ask([rank], file="old", offset=here.tell()).get(rank, {})
                if answer.get("head") != head or not answer["data"]:
                    break
                here.write(base64.b64decode(answer["data"]))
        path.replace(old_part(path))
