"""The folder of a job: of a program that called `nbkit.listen`. It lists the ranks, and has the secret for requests.

    ~/.local/share/nbkit/.jobs/NAME/   (NBKIT_HOME changes the first part); only its owner may enter
      token           the secret, which only its owner may read
      rankN.json      a ListeningRank
      audit.jsonl     every request, and its outcome
      telemetry/      what the ranks measure: see nbkit.records

The ranks of one host find each other here. If the folder is shared between hosts, each rank still answers on its own
host only.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nbkit.errors import ClusterError
from nbkit.quoting import path_part, shell_words, user_path
from nbkit.wire.processes import Process, node_name


@dataclass(frozen=True)
class ListeningRank:
    """A rank of a program that listens for requests.

    host: the name of its host. port: its port on loopback. launch: an id that all ranks of one start share. program:
    its command. begun: its start, as time.time(). cells: True if it runs live cells.
    """

    rank: int
    world_size: int
    host: str
    process: Process
    port: int
    launch: str
    program: str
    begun: float
    cells: bool

    @property
    def is_here(self) -> bool:
        return self.host == node_name()

    def is_alive(self) -> bool:
        """Return True if its process runs. A process of another host is assumed to run."""
        return not self.is_here or self.process.is_alive()


def jobs() -> Path:
    """Return the folder that holds the folders of all jobs. No cluster can have its name, which begins with a dot."""
    if home := os.environ.get("NBKIT_HOME"):
        return user_path(home) / ".jobs"
    return Path(os.environ.get("XDG_DATA_HOME") or user_path("~/.local/share")) / "nbkit" / ".jobs"


def names() -> list[str]:
    """Return the names of all jobs that have a folder. Jobs that have ended are included."""
    with suppress(OSError):
        return sorted(path.name for path in jobs().iterdir() if path.is_dir())
    return []


def folder_of(name: str) -> Path:
    return jobs() / path_part(name)


def make(name: str) -> Path:
    """Return the folder of a job. Make it if needed. Raises ClusterError if other users may enter it."""
    folder = folder_of(name)
    try:
        jobs().parent.mkdir(parents=True, exist_ok=True)
        for path in (jobs(), folder):
            path.mkdir(mode=0o700, exist_ok=True)
            check_private(path)
    except OSError as error:
        raise ClusterError(
            "There is no folder for a program that listens.",
            numbers=f"{folder}: {error.strerror or error}",
            hint="export NBKIT_HOME=/tmp/nbkit   or another folder of yours",
        ) from None
    return folder


def check_private(path: Path) -> None:
    """Raise ClusterError unless this user owns the file or folder, and nobody else may read, write or enter it."""
    found = path.lstat()
    kind = stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)
    if found.st_uid != os.getuid() or not kind:
        raise ClusterError(
            "This file of a job is not yours." if kind else "This file of a job is a link.",
            numbers=f"{path} belongs to user {found.st_uid}, you are user {os.getuid()}",
            hint=shell_words("ls", "-ld", path),
        )
    if open_to := stat.S_IMODE(found.st_mode) & 0o077:
        wanted = "700" if path.is_dir() else "600"
        raise ClusterError(
            "Other users may use this file of a job.",
            numbers=f"{path} has mode {stat.S_IMODE(found.st_mode):o}, which gives others {open_to:o}",
            hint=shell_words("chmod", wanted, path),
        )


def secret_of(folder: Path) -> str:
    """Return the secret of a job. Raises ClusterError if the file is missing, or is not private."""
    path = folder / "token"
    try:
        check_private(path)
        return path.read_text().strip()
    except OSError as error:
        raise ClusterError(
            f"There is no job called {folder.name!r}.",
            numbers=f"{path}: {error.strerror or error}; jobs: {', '.join(names()) or 'none'}",
            hint="nbkit jobs",
        ) from None


def made_secret(folder: Path) -> str:
    """Return the secret of a job. Make one if there is none. All ranks may call this at the same time."""
    path = folder / "token"
    if not path.exists():
        scratch = folder / f"token.{os.getpid()}"
        _write_private(scratch, secrets.token_hex(32))
        with suppress(FileExistsError):  # another rank was faster
            os.link(scratch, path)
        scratch.unlink()
    return secret_of(folder)


def save(folder: Path, rank: ListeningRank) -> None:
    """Write a rank's file, atomically."""
    scratch = folder / f"rank{rank.rank}.{os.getpid()}"
    _write_private(scratch, json.dumps(asdict(rank)))
    scratch.replace(folder / f"rank{rank.rank}.json")


def ranks_in(folder: Path) -> dict[int, ListeningRank]:
    """Return the ranks of a job's newest start, by number. Raises ClusterError for a file that is not private."""
    found = []
    for path in folder.glob("rank*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            check_private(path)
            values = json.loads(path.read_text())
            found.append(ListeningRank(**values | {"process": Process(**values["process"])}))
    newest = max(found, key=lambda rank: rank.begun, default=None)
    alike = [rank for rank in found if newest is not None and rank.launch == newest.launch]
    return {rank.rank: rank for rank in sorted(alike, key=lambda rank: rank.rank)}


def note(folder: Path, entry: dict[str, Any]) -> None:
    """Append a line to the job's audit log. Several processes may do so at the same time."""
    line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **entry}) + "\n"
    number = os.open(folder / "audit.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(number, line.encode())
    finally:
        os.close(number)


def _write_private(path: Path, text: str) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(number, "w") as file:
        file.write(text)
