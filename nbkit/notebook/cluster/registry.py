"""The registry of clusters: one folder each, private to the user, with everything that belongs to the cluster.

    ~/.local/share/nbkit/NAME/     (NBKIT_HOME changes the first part, and so does home in nbkit.toml)
      cluster.json       the ClusterEntry: who and where its processes are
      spec.json          what its ranks were started with
      profile/           ipyparallel's own: connection files (0600), pids
      logs/              controller, parent, one per rank
      output/            what each rank has printed, as text (rankN.out) and as messages (rankN.jsonl)

A process is identified by its pid together with its start time (nbkit/wire/processes.py), so a pid that the system has
given to another process since then is never mistaken for one of ours.

Small helpers are here too: the ranks that a user means (`chosen_ranks`), and the name of a nameless cluster
(`made_up_name`).
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from nbkit.errors import ClusterError, ClusterNotFound, UsageError
from nbkit.notebook.cluster.hosts import progress
from nbkit.notebook.cluster.site_settings import home_here
from nbkit.quoting import path_part, shell_words, user_path
from nbkit.wire import cluster_end, parcel
from nbkit.wire.messages import protocol
from nbkit.wire.processes import STOP_SIGNAL, followers
from nbkit.wire.processes import Process as Process

DETACHED = "detached"  # among the options of one whose notebook has not waited for its ranks
SPREAD_PATIENCE = 20.0  # seconds; a launcher has to be asked
_ELSEWHERE = "%env NBKIT_HOME=/tmp/nbkit   or another folder of yours"
FORMAT = 1
"""The format of cluster.json. It grows by one when a release writes fields that older ones must know.

The file has the protocol of the cluster's messages too: a notebook of another protocol cannot attach.
"""


@dataclass(frozen=True)
class ClusterEntry:
    """A cluster as the registry knows it.

    host: where its processes run. ttl: seconds. born: time.time(). labels, reasons: what each rank is pinned to and
    why, in rank order. spares: the devices still in reserve.
    """

    name: str
    host: str
    n: int
    backend: str
    ttl: float
    born: float
    controller: Process
    parent: Process
    kernel: Process
    labels: tuple[str, ...]
    reasons: tuple[str, ...]
    options: dict[str, object] = field(default_factory=dict)
    ranks: tuple[Process, ...] = ()
    spares: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return home() / self.name

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_spread(self) -> bool:
        """Return True if its ranks may be on other hosts than its controller; `parent` is their coordinator then."""
        return "on" in self.options

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the host of each rank. In a cluster on several hosts, a label begins with the host."""
        if self.is_spread:
            return tuple(label.partition(":")[0] for label in self.labels)
        return (self.host,) * self.n

    def is_alive(self) -> bool:
        """Return True if ranks and controller run. A cluster of another host is assumed to be alive."""
        return not self.is_here or (self.parent.is_alive() and self.controller.is_alive())

    def left(self) -> list[Process]:
        """Return its processes that still run.

        A killed controller leaves its schedulers, which are found only by its session.
        """
        known = [process for process in (self.parent, self.controller, *self.ranks) if process.is_alive()]
        return [*known, *followers(self.controller.pid, self.folder)]

    @property
    def is_awaited(self) -> bool:
        """Return True if it was started with --detach and no notebook has attached to it since."""
        return bool(self.options.get(DETACHED)) and not self.ranks

    def is_attached(self) -> bool:
        return self.is_here and self.kernel.is_alive() and not self.is_awaited

    @property
    def state(self) -> str:
        """Return the state in a word or two. For a cluster that is being started, return how far it is."""
        if not self.is_alive():
            return "ended"
        if self.is_awaited:
            begun = progress.read(self.folder)
            return (begun and ("ranks are there" if begun.phase == "forked" else begun.words)) or "is being started"
        return "attached" if self.is_attached() else "no notebook"


def home() -> Path:
    """Return the folder that holds the folders of all clusters."""
    if base := os.environ.get("NBKIT_HOME") or home_here():
        return user_path(base)
    data = Path(os.environ.get("XDG_DATA_HOME") or user_path("~/.local/share"))
    if data.parts[:1] == ("~",):
        raise ClusterError("This user has no home directory.", numbers="HOME is not set", hint=_ELSEWHERE)
    return data / "nbkit"


def check_home() -> Path:
    """Return the folder of all clusters, and create it if needed. Raises ClusterError if that fails."""
    folder = home()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ClusterError(
            "There is no folder for the files of a cluster: keys, logs and output of ranks.",
            numbers=f"{folder}: {error.strerror or error}",
            hint=_ELSEWHERE,
        ) from None
    return folder


def save(entry: ClusterEntry) -> None:
    """Write an entry atomically."""
    path = entry.folder / "cluster.json"
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps({"format": FORMAT, "protocol": protocol(), **asdict(entry)}))
    scratch.replace(path)


def find(name: str) -> ClusterEntry | None:
    """Return the entry called `name`, or None. Raises ClusterError for one that this release cannot read."""
    if name != path_part(name):  # no cluster's: it might lead out of the folder of clusters
        return None
    try:
        saved = json.loads((home() / name / "cluster.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    saved = saved if isinstance(saved, dict) else {}
    written_in, spoken = saved.get("format", "none"), saved.get("protocol", "none")
    numbers = f"its cluster.json is of format {written_in}; this release reads {FORMAT}"
    if written_in == FORMAT and spoken != protocol():
        numbers = f"its processes have protocol {spoken}; this release has {protocol()}"
    elif written_in == FORMAT:
        try:
            return _entry(saved)
        except (TypeError, KeyError, AttributeError):
            numbers = f"its cluster.json is of format {FORMAT}, but not whole"
    raise ClusterError(
        f"Another release of nbkit has started the cluster {name!r}.",
        numbers=numbers,
        hint=f"nbkit stop {name}   with that release; where none of it runs any more: "
        f"{shell_words('rm', '-r', home() / name)}",
    )


def _entry(saved: dict[str, Any]) -> ClusterEntry:
    for role in ("controller", "parent", "kernel"):
        saved[role] = Process(**saved[role])
    saved["ranks"] = tuple(Process(**rank) for rank in saved["ranks"])
    saved |= {key: tuple(saved.get(key, ())) for key in ("labels", "reasons", "spares")}
    return ClusterEntry(**{known.name: saved[known.name] for known in fields(ClusterEntry)})


def entries() -> list[ClusterEntry]:
    """Return every cluster of this user that this release can read, by name."""
    found = []
    for name in _names():
        with suppress(ClusterError):
            found.append(find(name))
    return [entry for entry in found if entry is not None]


def unreadable() -> list[str]:
    """Return a line about each cluster that `entries` leaves out."""
    said = []
    for name in _names():
        try:
            find(name)
        except ClusterError as error:
            said.append(str(error))
    return said


def _names() -> list[str]:
    return sorted(path.parent.name for path in home().glob("*/cluster.json"))


def running(name: str) -> ClusterEntry:
    """Return the running cluster called `name`. Raises ClusterNotFound, naming the running ones."""
    entry = find(name)
    if entry and entry.is_alive():
        return entry
    alive = [other.name for other in entries() if other.is_alive()]
    how = how_ended(entry).rstrip(".") if entry else ""
    raise ClusterNotFound(
        f"The cluster {name!r} has ended{how and ': '}{how}." if entry else f"There is no cluster called {name!r}.",
        numbers=f"running: {', '.join(alive)}" if alive else "no cluster is running",
        hint=f"%cluster attach {alive[0]}" if alive else f"%cluster start --name {name}",
    )


def the_only_one() -> ClusterEntry:
    """Return the only running cluster. Raises ClusterNotFound if there is none, UsageError if there are several."""
    alive = [entry for entry in entries() if entry.is_alive()]
    if not alive:
        raise ClusterNotFound("No cluster is running.", hint="nbkit list")
    if len(alive) > 1:
        names = ", ".join(entry.name for entry in alive)
        raise UsageError("Several clusters are running: say which.", numbers=names, hint=f"nbkit why {alive[0].name}")
    return alive[0]


def how_ended(entry: ClusterEntry) -> str:
    """Return why a cluster ended without being stopped, and what was saved of a training in it; "" if unknown."""
    end = cluster_end.read(entry.folder)
    return end.words if end is not None and end.step >= 0 else progress.how_ended(entry.folder)


def end(entry: ClusterEntry, patience: float = 5.0) -> None:
    """End a cluster's processes, and only those: each is checked by pid and start time. Forgets the cluster."""
    if not entry.is_here:
        raise ClusterNotFound(
            f"The cluster {entry.name!r} runs on another host.",
            numbers=f"it is on {entry.host}, this is {socket.gethostname()}",
            hint=f"ssh {entry.host} nbkit stop {entry.name}",
        )
    entry.parent.end(signal.SIGTERM if entry.is_spread else STOP_SIGNAL)
    entry.controller.end(signal.SIGTERM)
    everything = (entry.parent, entry.controller, *entry.ranks)
    deadline = time.monotonic() + (SPREAD_PATIENCE if entry.is_spread else patience)
    while any(process.is_alive() for process in everything) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in everything:
        process.end(signal.SIGKILL, group=True)
    for scheduler in followers(entry.controller.pid, entry.folder):
        scheduler.end(signal.SIGKILL)
    deadline = time.monotonic() + patience
    while entry.left() and time.monotonic() < deadline:  # the system takes a moment
        time.sleep(0.02)
    forget(entry.name)


def forget(name: str) -> None:
    """Remove the folder of a cluster that has ended; its logs go with it."""
    shutil.rmtree(home() / name, ignore_errors=True)


def clean() -> list[str]:
    """End what half-dead clusters of this host have left, and forget them. Remove values that never arrived.

    Returns a line about each cluster, and one about the values.
    """
    done = []
    for entry in entries():
        if entry.is_here and not entry.is_alive():
            left = entry.left()
            end(entry)
            done.append(f"{entry.name}: ended, {len(left)} processes were left")
    if left_values := parcel.remove_left():
        done.append(f"values on their way to or from ranks, of notebooks that died: {left_values} removed")
    return done


_FIRST = ("amber", "brisk", "calm", "clear", "eager", "gentle", "lucid", "mellow", "quick", "quiet", "steady", "vivid")
_SECOND = ("brook", "cedar", "comet", "delta", "ember", "finch", "harbor", "lark", "maple", "otter", "ridge", "willow")


def chosen_ranks(ranks: Sequence[int] | str | int | None, n: int) -> tuple[int, ...]:
    """Return `"0,2-3"`, `[0, 2, 3]`, 2 or None (all of `n`) as sorted ranks.

    Raises UsageError for anything that is not a rank.
    """
    if ranks is None:
        return tuple(range(n))
    hint = f"--ranks 0-{n - 1}" if n > 1 else "--ranks 0"
    if isinstance(ranks, int):
        ranks, hint = [ranks], "--rank 0"
    elif isinstance(ranks, str):
        ranks = _parsed(ranks, n)
    chosen = tuple(sorted(set(ranks)))
    wrong = [rank for rank in chosen if not 0 <= rank < n]
    if wrong or not chosen:
        raise UsageError(
            f"There is no rank {wrong[0]}." if wrong else "No rank is chosen.",
            numbers=f"the cluster has {n} ranks: 0-{n - 1}",
            hint=hint,
        )
    return chosen


def _parsed(text: str, n: int) -> list[int]:
    ranks: list[int] = []
    for part in text.replace(" ", "").split(","):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise UsageError(
                f"{text!r} does not name ranks.", numbers=f"the cluster has ranks 0-{n - 1}", hint="--ranks 0,2-3"
            )
        ranks += range(int(low), int(high or low) + 1)
    return ranks


def made_up_name() -> str:
    """Return a name that no cluster of this user has."""
    while True:
        name = f"{random.choice(_FIRST)}-{random.choice(_SECOND)}"
        if not (home() / name).exists():
            return name


def notebook_number() -> int:
    """Return the number of the notebook cell that runs now; 0 outside of a notebook."""
    shell = notebook_shell()
    if shell is None:
        return 0
    # The shell's own counter is ahead by one while a cell runs, in some versions of IPython.
    running = getattr(shell.displayhook, "exec_result", None)
    return int(getattr(running, "execution_count", None) or shell.execution_count)


def names_of_notebook() -> frozenset[str]:
    """Return the names that are defined in the notebook's own namespace."""
    shell = notebook_shell()
    return frozenset(shell.user_ns) if shell is not None else frozenset()


def notebook_shell() -> Any:
    """Return IPython's shell; None outside of IPython. Never imports IPython."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module else None
