"""Functions that the notebook calls on a rank by name, in its main thread. See `Remote` in nbkit/wire/cells.py.

They run cells, form the world, and are the rank's side of push, pull and `%cluster sync`.

`%cluster sync` copies a project's files to hosts that do not see the notebook's files. The copies are in the cluster's
own folder on each host, so no file of the user is overwritten. The folder is removed when the ranks have ended. One
rank of each host writes the files, and every rank imports from them. A new rank finds them on its host.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, TypeVar

from nbkit.bridge.runner import Runner
from nbkit.errors import ClusterError
from nbkit.rank.world import world
from nbkit.rank.world.rank_place import RankPlace
from nbkit.rank.world.sockets import admit_only
from nbkit.wire import parcel
from nbkit.wire.cells import CellRecord, CellRequest
from nbkit.wire.processes import Process

runner: Runner | None = None  # these four are set once, by the engine
place: RankPlace | None = None
address = ""  # the address of this host at which its ranks may listen
hosts: tuple[str, ...] = ()  # every address of every host of the cluster; () if this is the only host
dead: set[int] = set()  # ranks of this cluster that have died; only a restart brings them back
_listener: socket.socket | None = None


def hello() -> dict[str, Any]:
    """Return the process, rank and world generation of this rank. Generation 0 means that it has no world yet."""
    assert place is not None
    here = world.current()
    process = asdict(Process.of(os.getpid()))
    return {"process": process, "rank": place.rank, "generation": here.generation if here else 0}


def run_cell(request: CellRequest) -> CellRecord:
    assert runner is not None
    return runner.run(request)


def open_store() -> tuple[str, int]:
    """Listen for the store of a new generation, on rank 0. Returns an address and port that all ranks can reach."""
    global _listener
    _listener = world.open_listener(address)
    if hosts and not admit_only(_listener, hosts):
        print("The store of the world is open to other hosts too: no filter on sockets here.", file=sys.__stderr__)
    return address, int(_listener.getsockname()[1])


def take_listener() -> socket.socket | None:
    """Return the socket that `open_store` has opened, and forget it. The caller serves the store on it."""
    global _listener
    listener, _listener = _listener, None
    return listener


def reform(generation: int, address: str, port: int) -> int:
    """Join generation `generation` of the world, whose store is at address:port. Returns the generation."""
    assert place is not None
    if dead:
        raise ClusterError(f"Rank {min(dead)} has died, and a world needs all ranks.", hint="%cluster restart")
    listener = take_listener() if place.rank == 0 else None
    if (here := world.current()) is None:
        world.World.join(place, listen=listener, address=address, port=port, generation=generation)
    else:
        here.reform(generation, listen=listener, address=address, port=port)
    return generation


T = TypeVar("T")


def put(path: str) -> str:
    """Assign the names in a parcel. Returns why that failed, or "".

    The notebook unlinks the parcel when every rank has mapped it.
    """
    return _assign(lambda: parcel.read(path, unlink=False))


def put_parts(parts: list[bytes]) -> str:
    """Do the same as `put` with the bytes of a parcel, since the rank may be on another host than the notebook."""
    return _assign(lambda: parcel.unpack(parts))


def _assign(read: Callable[[], dict[str, Any]]) -> str:
    assert runner is not None
    values, why = _served(read)
    runner.shell.user_ns.update(values or {})
    return why


def _served(act: Callable[[], T]) -> tuple[T | None, str]:
    """Return (what act() returns, ""), or (None, why it failed).

    Evaluating or pickling a value can run user code, which may fail, exit, or never end.
    """
    assert runner is not None
    try:
        with runner.open_to_stop():
            try:
                return act(), ""
            except BaseException as error:
                return None, f"{type(error).__name__}: {runner.said(error)}"
    except KeyboardInterrupt:
        return None, "stopped"


def get(expression: str, limit: int, token: str) -> dict[str, Any]:
    """Return the value of an expression as a parcel: {"path", "bytes"}.

    Returns only {"bytes"} if the value is larger than `limit` bytes, {"error": text} if there is no value, and
    {"error": text, "type": name} if the value cannot be pickled.

    token: the folder of the parcel, so that the notebook can discard it in any case. "" for a notebook that may be on
        another host: then the answer has "parts" instead of "path".
    """
    assert runner is not None
    shell = runner.shell
    value, why = _served(lambda: eval(expression, shell.user_global_ns, shell.user_ns))
    if why:
        return {"error": why}
    packed, why = _served(lambda: parcel.pack(value))
    if packed is None:
        return {"error": why} if why == "stopped" else {"error": why, "type": type(value).__name__}
    size = parcel.size_of(packed)
    if size > limit:
        return {"bytes": size}
    if not token:
        return {"bytes": size, "parts": parcel.packed_bytes(packed)}
    try:
        return {"bytes": size, "path": parcel.write(packed, f"{token}/{runner.rank}")}
    except FileNotFoundError:
        return {"error": "nobody waits for it any more"}


@dataclass(frozen=True)
class BroughtProject:
    """The project files that were copied here last.

    root: the notebook's directory. digests: the digest of each file, by its name relative to `root`.
    """

    root: str
    digests: Mapping[str, str]


brought: BroughtProject | None = None


def look(path: str, digests: Mapping[str, str]) -> dict[str, Any]:
    """Return which of the files in `digests` this host has. Names are relative to the notebook's directory `path`.

    "shared": True if this host sees the same files at the same path. "lacks": names of files to copy here.
    """
    there = Path(path)
    if digests and all(_digest(there / name) == digest for name, digest in digests.items()):
        return {"shared": True, "lacks": []}
    return {"shared": False, "lacks": [name for name, digest in digests.items() if _digest(_home() / name) != digest]}


def write(files: Sequence[tuple[str, int, bytes]]) -> None:
    """Write each file (name, mode, content) atomically."""
    for name, mode, content in files:
        target = _inside(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        part.write_bytes(content)
        part.chmod(mode & 0o700)
        os.replace(part, target)
        if target.suffix == ".py":
            # Python would use an old compiled file if the old source had the same size and second of modification.
            Path(cache_from_source(target)).unlink(missing_ok=True)


def keep(names: Sequence[str]) -> int:
    """Remove copied files that are not in `names`. Returns how many were removed."""
    kept = {_inside(name) for name in names}
    gone = [path for path in _home().rglob("*") if path.is_file() and path not in kept and path.suffix != ".pyc"]
    for path in gone:
        path.unlink()
    return len(gone)


def use(root: str, digests: Mapping[str, str], shared: bool, changed: Sequence[str]) -> list[str]:
    """Import from the project's files from now on. Returns the names of imported modules whose file is in `changed`.

    Those modules still have their old code. root, digests: see BroughtProject. shared: True if this host sees the
    notebook's directory, False if the files were copied here.
    """
    global brought
    home = root if shared else str(_home())
    brought = BroughtProject(root, digests)
    if home not in sys.path:
        sys.path.insert(0, home)
    importlib.invalidate_caches()
    files = {os.path.realpath(Path(home) / name) for name in changed}
    loaded = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return sorted(name for name, file in loaded if file and os.path.realpath(file) in files)


def use_as_others(project: BroughtProject) -> None:
    """Import from the same files as the other ranks of this host. Called on a new rank."""
    shared = look(project.root, project.digests)["shared"] or not _home().is_dir()  # shared, but changed since
    use(project.root, project.digests, shared, [])


def _home() -> Path:
    assert runner is not None
    return runner.capture.folder.parent / "project"


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
