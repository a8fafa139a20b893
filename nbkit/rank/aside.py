"""Runs an inspection of a model while the model trains, isolated from the training.

An inspection runs the model, the loss or the optimizer, for example to fill the panel or to prepare a switch. This is
user code, which may reach more than the copy that it gets. A lambda in a list may call blocks of the original model,
and a forward may count its calls in a global. So the inspection runs in a fork of this process, and only its result
comes back. A fork of a process that has used an accelerator cannot run a backward pass. In that case the inspection
stays in its thread, and every operation on the memory of the training raises. Then the inspection is made between two
steps.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from nbkit.rank.device import accelerator
from nbkit.rank.parallel.proof.observe import Memory, memory_of, tensors_in
from nbkit.rank.watching_mode import WatchingMode

T = TypeVar("T")

STILL_SECONDS = 10.0
"""If a fork uses no CPU for this time, it waits for a lock that a thread of this process held during the fork."""


_NICE = 5
"""Added to the niceness of a fork. If ranks share cores, the training then gets three times the share of the fork."""


class NotAside(Exception):
    """The inspection could not run beside the training. This says nothing about the inspected model."""


def aside(work: Callable[[], T], *, device: torch.device, live: Callable[[], Iterable[Tensor]]) -> T:
    """Return the result of `work`, or raise its error. `work` has no other effect on this process.

    Results and errors must be picklable. live: returns the tensors that train. It is called only if `work` cannot run
    in its own process. Raises NotAside if `work` used a live tensor, or if its process was killed or got stuck.
    """
    if not accelerator().holds(device):
        return _in_a_fork(work)
    with _Apart(live()):
        return work()


class _Apart(WatchingMode):
    """A mode that raises NotAside before an operation on the memory of `live`, also in backward passes."""

    def __init__(self, live: Iterable[Tensor]) -> None:
        super().__init__()
        self._live: set[Memory] = {memory_of(tensor) for tensor in live}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(memory_of(tensor) in self._live for tensor in tensors_in((args, kwargs or {}))):
            raise NotAside(f"{func} on a tensor that trains")
        return func(*args, **(kwargs or {}))


def _in_a_fork(work: Callable[[], T]) -> T:
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks of processes with threads
        pid = os.fork()
    if not pid:
        _answer(work, writer)
    os.close(writer)
    try:
        packed = _read(reader, pid)
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    if not packed:
        raise NotAside("the process of the look ended without an answer")
    done, value = pickle.loads(packed)
    if not done:
        raise value
    return value  # type: ignore[no-any-return]


def _read(reader: int, pid: int) -> bytes:
    packed, used, since = b"", -1, time.monotonic()
    while True:
        if select.select([reader], [], [], 1.0)[0]:
            if not (part := os.read(reader, 1 << 20)):
                return packed
            packed += part
        elif (now := _ticks(pid)) != used:
            used, since = now, time.monotonic()
        elif time.monotonic() - since > STILL_SECONDS:
            raise NotAside("the process of the look waited for a lock")


def _ticks(pid: int) -> int:
    """Return the CPU time of a process so far, in clock ticks; 0 if it is unknown."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as text:
        fields = text.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


def _answer(work: Callable[[], object], writer: int) -> NoReturn:
    """Run `work` in the fork, and write its result. The fork has one thread, no connections and no output.

    The fork ends when its parent ends.
    """
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _end_with_parent()
        _close_all_but(writer)
        os.nice(_NICE)
        gc.disable()  # the finaliser of a live object may wait for a thread that the fork does not have
        sys.stdout = sys.stderr = open(os.devnull, "w")
        torch.set_num_threads(1)  # a fork does not have the threads of torch's pool
        try:
            packed = pickle.dumps((True, work()))
        except BaseException as error:
            try:
                packed = pickle.dumps((False, error))
                pickle.loads(packed)
            except Exception:
                packed = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
        with os.fdopen(writer, "wb") as stream:
            stream.write(packed)
    finally:
        os._exit(0)


def _end_with_parent() -> None:
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _close_all_but(kept: int) -> None:
    """Close all sockets and pipes except `kept`. With copies in the fork, others would not notice the parent's end."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        fd = int(name)
        with suppress(OSError):
            mode = os.fstat(fd).st_mode
            if fd not in (0, 1, 2, kept) and (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)):
                os.close(fd)
