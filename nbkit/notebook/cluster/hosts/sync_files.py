"""`%cluster sync .`: copy the project's own files to hosts that do not share the notebook's file system.

Like cells, the files are sent signed and encrypted, in messages of some megabytes, to one rank of each host. A host
with the same file system gets none. A host that already has a copy gets only the changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbkit.errors import UsageError
from nbkit.figures import size
from nbkit.notebook.cluster.cells.client import Client
from nbkit.quoting import user_path

LIMIT_FILE, LIMIT = 16 << 20, 64 << 20
"""Limits in bytes for a file, and for all files. They are for code, not for data."""
_MESSAGE = 8 << 20
_NEVER = {".git", "__pycache__", ".ipynb_checkpoints", "node_modules"}
_NAMED = 5


@dataclass(frozen=True)
class ProjectFiles:
    """Files to copy.

    files: name relative to the notebook's directory -> bytes. left_out: files not copied, with reasons.
    """

    root: Path
    files: Mapping[str, int]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Synced:
    """The result of `%cluster sync`.

    hosts: name -> (number of files, bytes) sent to it, or None if it shares the file system. stale: changed modules
    that ranks had already imported.
    """

    files: int
    bytes: int
    hosts: Mapping[str, tuple[int, int] | None]
    left_out: tuple[str, ...]
    stale: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.files} files, {size(self.bytes)}"]
        for host, sent in self.hosts.items():
            lines.append(
                f"  {host} sees them itself" if sent is None else f"  {host}: {sent[0]} brought, {size(sent[1])}"
            )
        if self.left_out:
            more = f", and {len(self.left_out) - _NAMED} more" if len(self.left_out) > _NAMED else ""
            lines.append(f"  left out: {'; '.join(self.left_out[:_NAMED])}{more}")
        if self.stale:
            lines.append(
                f"  imported before, and still as they were: {', '.join(self.stale)}; importlib.reload(...) on ranks"
            )
        return "\n".join(lines)

    __repr__ = __str__


def project_at(path: str | os.PathLike[str], root: Path) -> ProjectFiles:
    """Return the files of `path`, a folder or file in the notebook's directory `root`, without those in .gitignore.

    Raises UsageError if there are no files, if `path` is outside of `root`, or if the files are larger than LIMIT.
    """
    folder = Path(os.path.normpath(root / user_path(path)))
    if not folder.exists() or not folder.is_relative_to(root):
        why = "is not there" if not folder.exists() else f"is not within {root}"
        raise UsageError(f"{path} cannot be brought to the hosts.", numbers=f"{folder} {why}", hint="%cluster sync .")
    files: dict[str, int] = {}
    left_out = []
    for name in sorted(_listed(folder, root) if folder.is_dir() else [folder]):
        said = str(name.relative_to(root))
        if name.is_symlink() or not name.is_file():
            if name.is_symlink():
                left_out.append(f"{said} (a link)")
            continue
        num_bytes = name.stat().st_size
        if num_bytes > LIMIT_FILE:
            left_out.append(f"{said} ({size(num_bytes)}, more than {size(LIMIT_FILE)})")
        else:
            files[said] = num_bytes
    if (total := sum(files.values())) > LIMIT:
        largest = sorted(files, key=lambda name: -files[name])[:3]
        raise UsageError(
            f"{path} is too large to be brought to every host.",
            numbers=f"{len(files)} files, {size(total)}; the limit is {size(LIMIT)}; the largest: "
            + ", ".join(f"{name} {size(files[name])}" for name in largest),
            hint=f"a folder in it, as   %cluster sync {_smaller(files)}   or name the data in .gitignore",
        )
    return ProjectFiles(root, files, tuple(left_out))


def sync(client: Client, host_of: Sequence[str], project: ProjectFiles) -> Synced:
    """Copy `project` to the hosts of the ranks. host_of: the host of each rank, from the cluster's entry."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(host_of):
        ranks.setdefault(name, []).append(rank)
    contents = {name: (project.root / name).read_bytes() for name in project.files}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    at, one_each = "nbkit.bridge.calls", [those[0] for those in ranks.values()]
    found = client.call_and_wait(one_each, f"{at}:look", str(project.root), digests)
    hosts: dict[str, tuple[int, int] | None] = {}
    stale: set[str] = set()
    for host, those in ranks.items():
        lacks: list[str] = found[those[0]]["lacks"]
        shared: bool = found[those[0]]["shared"]
        if not shared:
            for names in _messages(lacks, project.files):
                parts = [(name, (project.root / name).stat().st_mode, contents[name]) for name in names]
                client.call_and_wait(those[:1], f"{at}:write", parts)
            client.call_and_wait(those[:1], f"{at}:keep", sorted(digests))
        answers = client.call_and_wait(those, f"{at}:use", str(project.root), digests, shared, lacks)
        stale |= {name for names in answers.values() for name in names}
        hosts[host] = None if shared else (len(lacks), sum(project.files[name] for name in lacks))
    return Synced(len(digests), sum(project.files.values()), hosts, project.left_out, tuple(sorted(stale)))


def _listed(folder: Path, root: Path) -> Iterator[Path]:
    """Return every file of `folder` that git would not ignore in `root`.

    Without git, return all files except those in hidden folders.
    """
    if shutil.which("git"):
        asked = ["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", str(folder)]
        done = subprocess.run(["git", "--literal-pathspecs", "-C", str(root), *asked], capture_output=True, check=False)
        if done.returncode:  # outside of a repository, .gitignore is used too
            with tempfile.TemporaryDirectory() as empty:
                bare = ["git", "--literal-pathspecs", "-C", str(root), f"--git-dir={empty}", f"--work-tree={root}"]
                subprocess.run(["git", "init", "-q", "--bare", empty], capture_output=True, check=True)
                done = subprocess.run([*bare, *asked], capture_output=True, check=True)
        names = [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]
    else:
        names = [path.relative_to(root) for path in folder.rglob("*")]
        names = [name for name in names if not any(part.startswith(".") for part in name.parts[:-1])]
    return (root / name for name in dict.fromkeys(names) if not _NEVER & set(name.parts) and name.suffix != ".pyc")


def _messages(names: Sequence[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    message: list[str] = []
    for name in names:
        if message and sum(sizes[one] for one in message) + sizes[name] > _MESSAGE:
            yield message
            message = []
        message.append(name)
    if message:
        yield message


def _smaller(files: Mapping[str, int]) -> str:
    """Return the folder with the most Python files, which is probably the code."""
    tops = [name.partition(os.sep)[0] for name in files if name.endswith(".py") and os.sep in name]
    return max(sorted(set(tops)), key=tops.count, default="src")
