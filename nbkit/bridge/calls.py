"""Functions that the notebook calls on a rank by name, in its main thread. See nbkit/wire/rank_functions.py.

The rank's side of push and pull.

The rank's side of `%cluster sync`: a project's files on a host that does not see the notebook's.

They lie in the cluster's own folder of the host, which is removed when the ranks have ended: nothing of the user's
there is written over. One rank of each host writes them, and every rank imports from them. A rank that is new has them
from another one (replacing/brought_files.py).
"""

from __future__ import annotations

import hashlib
import importlib
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
address = ""  # of this host, where its ranks may listen
hosts: tuple[str, ...] = ()  # every address of every host of the cluster; () where there is this one alone
dead: set[int] = set()  # ranks of this cluster that have died; only a restart brings them back
_listener: socket.socket | None = None


def hello() -> dict[str, Any]:
    """Proof that this rank runs code, and where; generation 0 says that it has no world yet."""
    assert place is not None
    here = world.current()
    process = asdict(Process.of(os.getpid()))
    return {"process": process, "rank": place.rank, "generation": here.generation if here else 0}


def run_cell(request: CellRequest) -> CellRecord:
    assert runner is not None
    return runner.run(request)


def open_store() -> tuple[str, int]:
    """On rank 0, before a new generation: listen for its store. Returns address and port; all ranks reach them."""
    global _listener
    _listener = world.open_listener(address)
    if hosts and not admit_only(_listener, hosts):
        print("The store of the world is open to other hosts too: no filter on sockets here.", file=sys.__stderr__)
    return address, int(_listener.getsockname()[1])


def take_listener() -> socket.socket | None:
    """Return what `open_store` has opened, for who serves the store in it."""
    global _listener
    listener, _listener = _listener, None
    return listener


def reform(generation: int, address: str, port: int) -> int:
    """Join generation `generation` of the world, whose store is at address:port. Returns it."""
    assert place is not None
    if dead:
        raise ClusterError(f"Rank {min(dead)} has died, and a world has all ranks.", hint="%cluster restart")
    listener = take_listener() if place.rank == 0 else None
    if (here := world.current()) is None:
        world.World.join(place, listen=listener, address=address, port=port, generation=generation)
    else:
        here.reform(generation, listen=listener, address=address, port=port)
    return generation


T = TypeVar("T")


def put(path: str) -> str:
    """Assign the names in a parcel. The notebook unlinks it when every rank has it mapped. Returns why not, or ""."""
    return _assign(lambda: parcel.read(path, unlink=False))


def put_parts(parts: list[bytes]) -> str:
    """`put` for a rank that may be on another host than the notebook."""
    return _assign(lambda: parcel.unpack(parts))


def _assign(read: Callable[[], dict[str, Any]]) -> str:
    assert runner is not None
    values, why = _served(read)
    runner.shell.user_ns.update(values or {})
    return why


def _served(act: Callable[[], T]) -> tuple[T | None, str]:
    """Return what act() returns, or why not: values have code of their own, which may fail, exit, or never end."""
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
    """Return the value of an expression as a parcel: {"path", "bytes"}; or {"bytes"} alone if it is over `limit` bytes;
    or {"error": text}. token: where the parcel lies, so that the notebook can discard it whatever happens; "" for a
    notebook that may be on another host: then the answer has "parts" in place of "path"."""
    assert runner is not None
    shell = runner.shell
    packed, why = _served(lambda: parcel.pack(eval(expression, shell.user_global_ns, shell.user_ns)))
    if packed is None:
        return {"error": why}
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
    """What was brought last. root: the notebook's directory. digests: of each file, by its name relative to that."""

    root: str
    digests: Mapping[str, str]


brought: BroughtProject | None = None
_used = Path()  # where this rank imports it from


def look(path: str, digests: Mapping[str, str]) -> dict[str, Any]:
    """Return what this host has of the files `digests` names (relative to the notebook's directory `path`).

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

    root, digests: see BroughtProject. shared: whether this host sees the notebook's directory; else they were brought
    here.
    """
    global brought, _used
    home = root if shared else str(_home())
    brought, _used = BroughtProject(root, digests), Path(home)
    if home not in sys.path:
        sys.path.insert(0, home)
    importlib.invalidate_caches()
    files = {os.path.realpath(Path(home) / name) for name in changed}
    loaded = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return sorted(name for name, file in loaded if file and os.path.realpath(file) in files)


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
