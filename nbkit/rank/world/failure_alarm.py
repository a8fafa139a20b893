"""One rank's failure within a step, told to all ranks through the store of the world, so that all of them end it.

A rank that fails leaves the others waiting in a collective. Between `begin` and `end` a thread of each rank looks into
the store, and wakes this rank from what it waits in when another has called `ring`. Then all `meet`, which takes no
process group, and `mend` the groups: what was on its way in them is lost.

See where this rank is while it is stuck, and break it out of a collective that it waits in.

Everything here may be called from a thread while the main thread blocks in a collective.
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

# Frames of the machinery between a user's cell and the interpreter; by folder name, nothing of it is imported here.
_MACHINERY = ("IPython", "ipykernel", "ipyparallel", "jupyter_client", "tornado", "traitlets", "zmq", "torch")

_dump_file: IO[str] | None = None


def break_out(reason: str, error: Exception | None = None) -> None:
    """Release this process from whatever operation of a process group it waits in, and from the forming of one.

    The waiting call raises `error`, or an error of its own; the world is marked dirty with `reason` and is of use again
    after `World.reform`. Returns within about 4 s, mostly within 0.2; harmless when repeated or when nothing waits.
    """
    if (here := world.current()) is not None and not here.dirty:
        here.dirty = reason
    wake(reason, error)


def wake(reason: str, error: Exception | None = None) -> None:
    """As `break_out`, for who forms the groups again by itself (see `Alarm`): the world is not marked dirty.

    gloo: the connections of our groups are shut (nothing else wakes gloo; on Linux only), and who waits for the rest of
    a message, which even that does not wake, leaves a second later. nccl: the communicators are
    aborted; who waits for peers in the first use of one waits in Python.
    """
    background_creation.forming.broken = background_creation.forming.broken or reason
    for tell in group_creation.breaking_off:
        tell()
    group_creation.shut_all()
    interruptible_wait.interrupt(reason, error)
    # Aborting may itself wait for the device; the caller may not.
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
    """Return one line: the user's innermost line, and the operation issued last. Empty when there is neither."""
    stack, issued = main_thread_stack(), delegating_group.where()
    return "; ".join(part for part in (stack[-1] if stack else "", issued and f"last issued {issued}") if part)


def dump_on_signal(path: str | os.PathLike[str]) -> None:
    """On SIGUSR1 append the stack of the main thread to the file `path`; works while a C call holds the GIL.

    Not those of all threads: Python reads them while they run, and ends with SIGSEGV when one of them ends meanwhile.
    The system gives the signal to the main thread.
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
_MEET_SECONDS = 300.0  # a rank that computes comes when it next waits for another one
_MEND_SECONDS = 60.0
_RUNG = "rung"


class AlarmHeard(RuntimeError):
    """Another rank has failed."""


class Alarm:
    """Of one step of all ranks. name: the same on every rank, another one for every step of a world that is mended.

    heard: this rank was woken.
    """

    def __init__(self, name: str) -> None:
        here = world.current()
        assert here is not None
        self.world, self.heard = here, False
        self._name, self._over = f"{here.key}/alarm/{name}", threading.Event()
        self._waking = threading.Lock()

    @staticmethod
    def possible() -> bool:
        """Return True if the groups of this process can be formed again: its world is ours."""
        here = world.current()
        return here is not None and not here.dirty and isinstance(dist.group.WORLD, DelegatingGroup)

    def begin(self) -> None:
        """Listen."""
        if self.world.place.world_size > 1:
            threading.Thread(target=self._listen, name="nbkit-alarm", daemon=True).start()

    def end(self) -> None:
        """Do not listen any more: nobody is woken after this. Harmless twice."""
        # The thread itself is not waited for: it tries for minutes to reach a store whose rank has died.
        with self._waking:
            self._over.set()

    def check(self) -> None:
        """Raises AlarmHeard when another rank has failed: on a GPU a collective that was broken off raises nothing."""
        if self.heard:
            raise AlarmHeard("another rank has failed")

    def ring(self) -> None:
        """Tell the others that this rank has failed."""
        self._store().set(_RUNG, str(self.world.place.rank))

    def rung(self) -> bool:
        """Return True if any rank has told so."""
        return self.world.place.world_size > 1 and bool(self._store().check([_RUNG]))

    def meet(self, said: str) -> list[str]:
        """Return what each rank says, by rank, when all have come. Collective, without a group.

        Raises ClusterError when the world is broken from outside meanwhile (a rank died, the user's Stop), and when a
        rank does not come.
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
        """Form all groups again, in this generation of the world. Collective; the alarm has ended.

        Raises ClusterError when the ranks do not come together, and when the world is broken from outside meanwhile.
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
            # A connection of its own: nccl waits in the world's.
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
            return  # the store is gone, and rank 0 with it: that is told in other ways
