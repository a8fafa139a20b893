"""See where this rank is while it is stuck, and break it out of a collective that it waits in.

Everything here may be called from a thread while the main thread blocks in a collective.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import sysconfig
import threading
from pathlib import Path
from typing import IO

from nbkit.rank.comm import background_creation, delegating_group, group_creation
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
    """As `break_out`, for who forms the groups again by itself (see alarm.py): the world is not marked dirty.

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
    """The main thread's frames in the user's own code, outermost first, as "file:line in name"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = []
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_machinery(file):
            lines.append(f"{file}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines[::-1]


def where() -> str:
    """One line: the user's innermost line, and the operation issued last. Empty when there is neither."""
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
