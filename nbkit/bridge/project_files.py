"""The rank's side of `%cluster sync`: a project's files on a host that does not see the notebook's.

They lie in the cluster's own folder of the host, which is removed when the ranks have ended: nothing of the user's
there is written over. One rank of each host writes them, and every rank imports from them. A rank that is new has them
from another one (replacing/brought_files.py).
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from nbkit.bridge import calls


@dataclass(frozen=True)
class Project:
    """What was brought last. root: the notebook's directory. digests: of each file, by its name relative to that."""

    root: str
    digests: Mapping[str, str]


brought: Project | None = None
_used = Path()  # where this rank imports it from


def look(path: str, digests: Mapping[str, str]) -> dict[str, Any]:
    """What this host has of the files `digests` names (relative to the notebook's directory `path`).

    {"shared": whether it sees the same files under the same path, "lacks": those that were not brought here yet}.
    """
    there = Path(path)
    if digests and all(_digest(there / name) == digest for name, digest in digests.items()):
        return {"shared": True, "lacks": []}
    return {"shared": False, "lacks": [name for name, digest in digests.items() if _digest(_home() / name) != digest]}


def write(files: Sequence[tuple[str, int, bytes]]) -> None:
    """Write each file (name, mode, content), whole or not at all."""
    for name, mode, content in files:
        target = _inside(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")  # ranks that are new write beside each other
        part.write_bytes(content)
        part.chmod(mode & 0o700)
        os.replace(part, target)
        if target.suffix == ".py":
            # What was compiled of a file of the same second and size would be taken for this one's.
            Path(cache_from_source(target)).unlink(missing_ok=True)


def keep(names: Sequence[str]) -> int:
    """Remove what was brought earlier and is not among `names`; how many files that were."""
    kept = {_inside(name) for name in names}
    gone = [path for path in _home().rglob("*") if path.is_file() and path not in kept and path.suffix != ".pyc"]
    for path in gone:
        path.unlink()
    return len(gone)


def read(names: Iterable[str]) -> list[tuple[str, int, bytes]]:
    """Of each file that is here still (name, mode, content), as `write` takes them."""
    there = [(name, _used / name) for name in names]
    return [(name, path.stat().st_mode, path.read_bytes()) for name, path in there if path.is_file()]


def use(root: str, digests: Mapping[str, str], shared: bool, changed: Sequence[str]) -> list[str]:
    """Import from the files from now on; the modules of `changed` that were imported before, and are the old ones.

    root, digests: see Project. shared: whether this host sees the notebook's directory; else they were brought here.
    """
    global brought, _used
    home = root if shared else str(_home())
    brought, _used = Project(root, digests), Path(home)
    if home not in sys.path:
        sys.path.insert(0, home)
    importlib.invalidate_caches()
    files = {os.path.realpath(Path(home) / name) for name in changed}
    loaded = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return sorted(name for name, file in loaded if file and os.path.realpath(file) in files)


def _home() -> Path:
    assert calls.runner is not None
    return calls.runner.capture.folder.parent / "project"


def _inside(name: str) -> Path:
    target = Path(os.path.normpath(_home() / name))
    if not target.is_relative_to(_home()) or target == _home():
        raise ValueError(f"{name!r} lies outside of the project")
    return target


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
