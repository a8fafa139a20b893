"""Where the records of a cluster's training lie: in its run directory, or, without a common disk, in a copy here."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbkit.errors import NbkitError, UsageError
from nbkit.notebook.cluster.presence import why_gone
from nbkit.records.record_file import check_format, old_part, written

if TYPE_CHECKING:
    from nbkit.notebook.cluster.cluster import Cluster

__all__ = ["ClusterRun", "FolderRun", "newest_run"]

_PIECES = 8  # of a megabyte, of one file at a time


class FolderRun:
    """A directory that was named: it stays the one."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()
        if not self.folder.is_dir():
            raise UsageError("There is no such run.", numbers=str(folder), hint="%dashboard runs/NAME")
        check_format(self.folder)

    def __call__(self) -> Path | None:
        return self.folder


class ClusterRun:
    """The newest training of a cluster. mirror: copy its files even where they could be read as they are."""

    def __init__(self, cluster: Cluster, *, mirror: bool = False) -> None:
        self._cluster, self._mirror = cluster, mirror
        self._known: Path | None = None
        self._copies: dict[str, _Copy] = {}

    def __call__(self) -> Path | None:
        told = self._ask([0]).get(0)
        if told is None:
            return self._known  # it does not answer just now, or is gone: what was written stays
        if told["run"]:
            folder = Path(told["run"])
            if not self._mirror and (folder / "telemetry").is_dir():
                self._known = folder
            else:
                self._known = self._copy_of(told["run"]).bring(self._ask, self._cluster.entry.n)
        return self._known

    def _copy_of(self, run: str) -> _Copy:
        if run not in self._copies:
            self._copies[run] = _Copy(run)
        return self._copies[run]

    def _ask(self, ranks: list[int], **content: Any) -> dict[int, dict[str, Any]]:
        cluster = self._cluster
        try:
            if why_gone(cluster):
                return {}
            alive = [rank for rank in ranks if rank not in cluster.post.deaths]
            answers: dict[int, dict[str, Any]] = {}
            for rank in alive:
                answers |= cluster.post.wire.ask([rank], "recorded", rank=rank, **content)
            return answers
        except (NbkitError, OSError):
            return {}


class _Copy:
    """The files of a run on another disk, brought here piece by piece. run: its directory there."""

    def __init__(self, run: str) -> None:
        self._run, self._home = run, tempfile.TemporaryDirectory(prefix="nbkit-run-")
        self.folder = Path(self._home.name) / Path(run).name
        (self.folder / "telemetry").mkdir(parents=True)
        self._heads: dict[str, str] = {}

    def bring(self, ask: Any, ranks: int) -> Path:
        """What is new of all ranks' files."""
        for rank in range(ranks):
            self._follow(ask, rank, "records", f"rank{rank}.jsonl")
        self._follow(ask, 0, "plan", "plan.jsonl")
        return self.folder

    def _follow(self, ask: Any, rank: int, file: str, name: str) -> None:
        path = self.folder / "telemetry" / name
        for _ in range(_PIECES):
            size = path.stat().st_size if path.exists() else 0
            told = ask([rank], file=file, offset=size).get(rank, {})
            if "head" not in told or told["run"] != self._run:
                return  # it does not answer, has no such file just now, or trains something newer
            if not told["data"] and told["head"] == self._heads.get(name):
                return
            if size and file == "records" and told["head"] != self._heads.get(name):
                self._end_part(ask, rank, path, self._heads.get(name, ""))
                self._heads[name] = told["head"]
                continue
            self._heads[name] = told["head"]
            with path.open("ab") as here:
                here.write(base64.b64decode(told["data"]))

    def _end_part(self, ask: Any, rank: int, path: Path, head: str) -> None:
        """A new part was begun: what was still written to the one that we have, and its new name."""
        with path.open("ab") as here:
            while True:
                told = ask([rank], file="old", offset=here.tell()).get(rank, {})
                if told.get("head") != head or not told["data"]:
                    break
                here.write(base64.b64decode(told["data"]))
        path.replace(old_part(path))


def newest_run(parent: Path) -> Path | None:
    """Of the runs in a directory, the one that made the newest step; the directory itself when it is a run."""
    folders = [parent, *sorted(parent.glob("*"))] if parent.is_dir() else []
    found = [(written(file), folder) for folder in folders for file in folder.glob("telemetry/rank*.jsonl")]
    return max(found)[1] if found else None
