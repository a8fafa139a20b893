"""Tells all ranks that one rank has failed in a step, so that all of them end the step. Releases a stuck rank.

A rank that fails leaves the others waiting in a collective. Between `Alarm.begin` and `Alarm.end`, a thread of each
rank watches the store of the world. When another rank has called `ring`, the thread wakes this rank from its wait. Then
all ranks `meet`, which uses no process group, and `mend` the groups. Messages under way in the groups are lost.

`break_out` and `wake` release this rank from a collective. `where` says where a stuck rank is. A thread may call them
while the main thread blocks in a collective.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import sysconfig
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from nbkit.errors import ClusterError
from nbkit.rank.comm import background_creation, delegating_group, group_creation
from nbkit.rank.comm.background_creation import forming
from nbkit.rank.comm.delegating_group import DelegatingGroup, registered
from nbkit.rank.comm.gloo import interruptible_wait
from nbkit.rank.world import world

# Packages between a user's cell and the interpreter. They are matched by folder name, so none is imported here.
_MACHINERY = ("IPython", "ipykernel", "ipyparallel", "jupyter_client", "tornado", "traitlets", "zmq", "torch")

_dump_file: IO[str] | None = None


def break_out(reason: str, error: Exception | None = None) -> None:
    """Release this process from the operation of a process group that it waits in, and from the forming of a group.

    The waiting call raises `error`, or an error of its own. The world is marked dirty with `reason`, and can be used
    again after `World.reform`. Returns within about 4 s, mostly within 0.2 s. A second call, or a call when nothing
    waits, does no harm.
    """
    if (here := world.current()) is not None and not here.dirty:
        here.dirty = reason
    wake(reason, error)


def wake(reason: str, error: Exception | None = None) -> None:
    """Release this process like `break_out`, but do not mark the world dirty. The caller forms the groups again.

    `Alarm` uses this. For gloo it shuts the connections of our groups (on Linux only), since nothing else wakes gloo.
    A wait for the rest of a message does not notice that, and ends a second later. For nccl it aborts the
    communicators. A wait for peers in the first use of a communicator is in Python, and ends too.
    """
    background_creation.forming.broken = background_creation.forming.broken or reason
    for tell in group_creation.breaking_off:
        tell()
    group_creation.shut_all()
    interruptible_wait.interrupt(reason, error)
    # Aborting may wait for the device, and the caller must not.
    group_creation.abort(delegating_group.live())


def main_thread_stack() -> list[str]:
    """Return the main thread's frames in the user's own code, outermost first, as "file:line in name"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = []
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_machinery(file):
            lines.append(f"{file}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines[::-1]


def where() -> str:
    """Return one line with the user's innermost line and the operation issued last; "" if there is neither."""
    stack, issued = main_thread_stack(), delegating_group.where()
    return "; ".join(part for part in (stack[-1] if stack else "", issued and f"last issued {issued}") if part)


def dump_on_signal(path: str | os.PathLike[str]) -> None:
    """Append the stack of the main thread to the file `path` on SIGUSR1. This works while a C call holds the GIL.

    Only this stack is written. Python would read the stacks of other threads while they run, and would crash with
    SIGSEGV if one of them ended meanwhile. The system sends the signal to the main thread.
    """
    global _dump_file
    previous, _dump_file = _dump_file, Path(path).open("a")
    faulthandler.register(signal.SIGUSR1, file=_dump_file, all_threads=False)
    if previous is not None:
        previous.close()


def _is_machinery(file: str) -> bool:
    path = Path(file)
    if path.is_relative_to(_OWN) or file.startswith("<frozen"):
        return True
    if "site-packages" in path.parts:
        return path.parts[path.parts.index("site-packages") + 1] in _MACHINERY
    return path.is_relative_to(_STDLIB)


_OWN = Path(__file__).parents[2]
_STDLIB = Path(sysconfig.get_path("stdlib"))


_LOOK_SECONDS = 0.05
_MEET_SECONDS = 300.0  # a rank that computes comes only when it next waits for another rank
_MEND_SECONDS = 60.0
_RUNG = "rung"


class AlarmHeard(RuntimeError):
    """Another rank has failed."""


class Alarm:
    """The alarm for one step on all ranks.

    name: equal on every rank, and different for every step of a world that is mended. heard: True if this rank was
    woken.
    """

    def __init__(self, name: str) -> None:
        here = world.current()
        assert here is not None
        self.world, self.heard = here, False
        self._name, self._over = f"{here.key}/alarm/{name}", threading.Event()
        self._waking = threading.Lock()

    @staticmethod
    def possible() -> bool:
        """Return True if nbkit made the groups of this process, and so can form them again."""
        here = world.current()
        return here is not None and not here.dirty and isinstance(dist.group.WORLD, DelegatingGroup)

    def begin(self) -> None:
        """Start to watch the store."""
        if self.world.place.world_size > 1:
            threading.Thread(target=self._listen, name="nbkit-alarm", daemon=True).start()

    def end(self) -> None:
        """Stop watching. After this call nothing wakes this rank. May be called twice."""
        # Do not wait for the thread: it may try for minutes to reach a store whose rank has died.
        with self._waking:
            self._over.set()

    def check(self) -> None:
        """Raise AlarmHeard if another rank has failed. On a GPU, a collective that was broken off raises no error."""
        if self.heard:
            raise AlarmHeard("another rank has failed")

    def ring(self) -> None:
        """Tell the others that this rank has failed."""
        self._store().set(_RUNG, str(self.world.place.rank))

    def rung(self) -> bool:
        """Return True if any rank has called `ring`."""
        return self.world.place.world_size > 1 and bool(self._store().check([_RUNG]))

    def meet(self, said: str) -> list[str]:
        """Wait for all ranks, and return the text `said` of each rank, by rank. Collective, without a group.

        Raises ClusterError if a rank does not come, or if the world is broken from outside meanwhile (a rank died, or
        the user pressed Stop).
        """
        store, ranks = self._store(), range(self.world.place.world_size)
        store.set(f"said/{self.world.place.rank}", said)
        deadline, pause = time.monotonic() + _MEET_SECONDS, 0.001
        while not store.check([f"said/{rank}" for rank in ranks]):
            if self.world.dirty:
                raise ClusterError("The ranks do not come together.", numbers=self.world.dirty)
            if time.monotonic() > deadline:
                raise ClusterError("The ranks do not come together.", numbers=f"within {_MEET_SECONDS:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return [store.get(f"said/{rank}").decode() for rank in ranks]

    def mend(self) -> None:
        """Form all groups again, in this generation of the world. Collective. Call it after `end`.

        Raises ClusterError if the ranks do not come together, or if the world is broken from outside meanwhile.
        """
        here = self.world
        here.key += "+"
        if here.place.world_size > 1:
            forming.stop("the groups are formed again")
            here._require_store().set_timeout(timedelta(seconds=_MEND_SECONDS))
            with here._forming(_MEND_SECONDS):
                here._form_groups(registered())
        if here.dirty:
            raise ClusterError("The world was broken again.", numbers=here.dirty)

    def _store(self) -> Store:
        return PrefixStore(self._name, self.world._require_store())

    def _listen(self) -> None:
        try:
            # Use a separate connection, because nccl may block the world's.
            own: Any = self.world._require_store()
            store = PrefixStore(self._name, own.clone())
            while not self._over.wait(_LOOK_SECONDS):
                if store.check([_RUNG]):
                    with self._waking:
                        if not self._over.is_set():
                            self.heard = True
                            wake("another rank has failed")
                    return
        except Exception:
            return  # the store is gone because rank 0 has died; that is reported in another way
