"""Waits for operations on gloo that another thread can end.

gloo wakes nobody who waits for the rest of a message when its connection ends: what is half received is on none of the
lists of those that it tells. So no thread of ours stands in a wait that cannot be left.

A collective is made by a thread of gloo's, and waited for in slices: a time-out of that wait ends nothing but the wait.
If the rest never comes, gloo's thread and the tensors stay until the process ends. A message is waited for in gloo
itself, where a time-out shuts every connection of the group.

Nobody here knows which operation is half done. After `interrupt` those that were issued before it have a moment to end
by themselves, as they do with gloo's own error, and are left then.

Ends gloo's own wait for a message, of a send or a receive, from another thread.

c10d has `Work::abort` for that in C++, and does not give it to Python: it is called by its name in torch's library. The
object behind a Python handle comes from pybind11's own interface for other modules, and is touched only if its first
word is the table of virtual functions of the class that the function belongs to.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import perf_counter_ns as now
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nbkit.rank.background_threads import started

_CLASSES = ("N4c10d16ProcessGroupGloo8SendWorkE", "N4c10d16ProcessGroupGloo8RecvWorkE")
_BASE = "N4c10d4WorkE"
_TYPE_INFO = b"St9type_info"
_TABLE_BEGIN = 2 * ctypes.sizeof(ctypes.c_void_p)  # of the Itanium ABI: an offset and a type come before the functions


class Abort:
    """What is known of torch's library: `tables` maps a class' table of virtual functions to its `abort`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.tables: dict[int, Callable[[int], None]] = {}
        for name in _CLASSES:
            function = getattr(library, f"_Z{name.removesuffix('E')}5abortEv")
            function.argtypes, function.restype = [ctypes.c_void_p], None
            self.tables[_address(library, f"_ZTV{name}") + _TABLE_BEGIN] = function
        self._type = _capsule(_address(library, f"_ZTI{_BASE}"))
        self._abi = _abi_of_pybind11()

    def __call__(self, work: Any) -> bool:
        """Have `work`.wait() return False in whichever thread stands in it; False: it is no message of gloo's."""
        found = work._pybind11_conduit_v1_(self._abi, self._type, b"raw_pointer_ephemeral")
        if found is None:
            return False
        at = _pointer(found, _BASE.encode())
        function = self.tables.get(ctypes.c_void_p.from_address(at).value or 0)
        if function is not None:
            function(at)
        return function is not None


@functools.cache
def known() -> Abort | None:
    """None where torch's library is another one than those this was written for: then such a wait cannot be ended."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return Abort(ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW))
    except (OSError, AttributeError, ValueError, LookupError):
        return None


def _address(library: ctypes.CDLL, symbol: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, symbol))


def _capsule(address: int) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, _TYPE_INFO, None)


def _pointer(capsule: Any, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(get(capsule, name))


def _abi_of_pybind11() -> bytes:
    """Return what torch's pybind11 calls the ABI that it was built with: a part of the name that its own data have."""
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    # The reference is borrowed. As py_object it would be taken for our own and given up, and the dict with it.
    api.PyInterpreterState_GetDict.restype = ctypes.c_void_p
    api.PyInterpreterState_GetDict.argtypes = [ctypes.c_void_p]
    found = ctypes.cast(api.PyInterpreterState_GetDict(api.PyInterpreterState_Get()), ctypes.py_object).value
    begin, end = "__pybind11_internals_v", "__"
    for name in found:
        if isinstance(name, str) and name.startswith(begin):
            return name.removeprefix(begin).removesuffix(end).partition("_")[2].encode()
    raise LookupError("pybind11's data")


_SLICE = timedelta(seconds=0.5)
_PATIENCE_SECONDS = 0.5
_UNTIL_DONE = timedelta(0)  # as torch has it
_OF_BACKEND = dist.Work


class _Interrupts:
    """The newest interrupt. at: ns of perf_counter; it ends all that was issued before. error: what the waits raise."""

    def __init__(self) -> None:
        self.at, self.reason, self.left = 0, "", False
        self.error: Exception | None = None
        self.lock = threading.Lock()
        self.futures: weakref.WeakSet[_Gate] = weakref.WeakSet()


_interrupts = _Interrupts()

causes: list[Callable[[], Exception | None]] = []
"""Functions that are called when a gloo operation has failed. Each returns the error to raise instead, or None."""


def interrupt(reason: str, error: Exception | None = None) -> None:
    """End every wait, in this process, for what was issued before; call it when the connections have been shut.

    Waits raise `error`, or RuntimeError, within about a second. Returns at once.
    """
    _interrupts.reason, _interrupts.error = reason, error
    _interrupts.at = now()
    _after_patience(_end_what_is_left)


def has_left() -> bool:
    """Return True if a collective was left in this process: a thread of gloo's then waits for it for ever."""
    return _interrupts.left


def wait(work: Any, issued: int, *timeout: timedelta) -> Any:
    """Return what `work`.wait() gives, of a collective. issued: ns of perf_counter.

    Raises RuntimeError when the collective fails, and when it was interrupted.
    """
    if type(work) is not _OF_BACKEND:
        return work.wait(*timeout)  # made of others, in Python
    if timeout and timeout[0] > _UNTIL_DONE:
        return _wait_until(work, issued, time.monotonic() + timeout[0].total_seconds())
    try:
        return work.wait(_SLICE)
    except RuntimeError:
        return _wait_until(work, issued, None)


def wait_for_message(work: Any, issued: int, *timeout: timedelta) -> Any:
    """The same of a send or a receive."""
    # Looked at before the wait begins; `interrupt` looks for those who stand in it after it has told so.
    if issued < _interrupts.at:
        _after_patience(_end_what_is_left)
    arrived = _outcome(work.wait, *timeout)
    if arrived is False and issued < _interrupts.at:
        _aborted()
    return arrived


def future(work: Any, issued: int) -> torch.futures.Future[Any]:
    """Return the future of a collective; what C++ waits in for it, such as the backward pass of DDP, is ended too."""
    gate = _Gate(work, issued)
    with _interrupts.lock:
        _interrupts.futures.add(gate)
    return gate.future


class Interruptible(dist.Work):
    """Stands before the handle of a group on gloo; gives its every answer.

    issued: ns of perf_counter. message: it is a send or a receive.
    """

    def __init__(self, inner: Any, issued: int, message: bool) -> None:
        dist.Work.__init__(self)  # by its name: super() takes as long again, in every collective
        self.inner, self.issued, self.message = inner, issued, message

    def wait(self, *timeout: Any) -> Any:
        return (wait_for_message if self.message else wait)(self.inner, self.issued, *timeout)

    def get_future(self) -> Any:
        return future(self.inner, self.issued) if type(self.inner) is dist.Work else self.inner.get_future()


def _delegated(name: str) -> Callable[[Interruptible], Any]:
    return lambda work: getattr(work.inner, name)()


# What dist.Work has itself, no __getattr__ would be asked for.
for _name in (
    "synchronize", "block_current_stream", "is_completed", "is_success", "exception", "result", "source_rank",
    "_source_rank", "get_future_result", "_get_op_type", "_get_duration",
):  # fmt: skip
    setattr(Interruptible, _name, _delegated(_name))


def _wait_until(work: Any, issued: int, deadline: float | None) -> Any:
    """In slices, until it is done, is interrupted, or the deadline (seconds of time.monotonic) has passed."""
    while True:
        try:
            return work.wait(_SLICE if deadline is None else _slice_before(deadline))
        except RuntimeError:
            if work.is_completed():
                if issued < _interrupts.at and _interrupts.error is not None:
                    _aborted()
                return _outcome(work.wait)  # raises what has failed; it may have ended since
            if deadline is not None and time.monotonic() >= deadline:
                raise
        if issued < _interrupts.at and now() - _interrupts.at > _PATIENCE_SECONDS * 1e9:
            _interrupts.left = True
            _aborted()


def _slice_before(deadline: float) -> timedelta:
    return min(_SLICE, timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))


def _end_what_is_left() -> None:
    abort = known()
    for frame in sys._current_frames().values():
        inner: FrameType | None = frame
        while inner is not None and abort is not None:
            if inner.f_code is wait_for_message.__code__ and inner.f_locals["issued"] < _interrupts.at:
                abort(inner.f_locals["work"])
            inner = inner.f_back
    with _interrupts.lock:
        gates = list(_interrupts.futures)
    for gate in gates:
        if gate.issued < _interrupts.at:
            gate.open()


def _after_patience(act: Callable[[], None]) -> None:
    # Where the interpreter ends nobody waits.
    started(act, "nbkit-interrupt", after_s=_PATIENCE_SECONDS)


def _outcome(of: Callable[..., Any], *given: Any) -> Any:
    """Return what `of` does. Where it fails, raise the cause, if that is known."""
    try:
        return of(*given)
    except RuntimeError:
        for ask in causes:
            if (cause := ask()) is not None:
                raise cause from None
        raise


def _aborted() -> NoReturn:
    if _interrupts.error is not None:
        raise _interrupts.error from None
    raise RuntimeError(f"An operation of a process group was aborted: {_interrupts.reason}")


class _Gate:
    """A future that follows another one, and ends with an error when it is opened before that has ended."""

    def __init__(self, work: Any, issued: int) -> None:
        self.issued, self._lock = issued, threading.Lock()
        self._opened: torch.futures.Future[None] = torch.futures.Future()
        inner = work.get_future()

        def outcome(_: Any) -> Any:
            if not inner.done():
                _interrupts.left = True
                _aborted()
            return _outcome(inner.value)

        self.future: torch.futures.Future[Any] = self._opened.then(outcome)
        inner.add_done_callback(lambda _: self.open())

    def open(self) -> None:
        """Harmless twice."""
        with self._lock:
            if not self._opened.done():
                self._opened.set_result(None)
