"""Waits for gloo's operations in ways that another thread can end.

When a connection ends, gloo does not wake a thread that waits for the rest of a half-received message. So our threads
use only waits that can be ended.

Collectives: one of gloo's threads runs a collective, and we wait for it in short slices. A time-out of a slice ends
only the wait. If the rest of a message never comes, gloo's thread and the tensors stay until the process ends.

Messages (send, receive): the wait is in gloo itself, where a time-out would shut every connection of the group. Another
thread ends this wait by `Work::abort`, which exists in c10d's C++ but not in its Python API. It is called by its symbol
name in torch's library. pybind11's interface for other modules gives the C++ object of a Python handle. The object is
used only if its first word is the virtual function table of the function's class.

Nobody knows which operation is half done. After `interrupt`, the operations that were issued before it have a moment to
end by themselves, with gloo's own error. Those that have not ended after that are abandoned.
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
_TABLE_BEGIN = 2 * ctypes.sizeof(ctypes.c_void_p)  # Itanium ABI: an offset and a type precede the functions in a table


class Abort:
    """A callable that ends gloo's wait for a message. tables: address of a class's virtual table -> its `abort`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.tables: dict[int, Callable[[int], None]] = {}
        for name in _CLASSES:
            function = getattr(library, f"_Z{name.removesuffix('E')}5abortEv")
            function.argtypes, function.restype = [ctypes.c_void_p], None
            self.tables[_address(library, f"_ZTV{name}") + _TABLE_BEGIN] = function
        self._type = _capsule(_address(library, f"_ZTI{_BASE}"))
        self._abi = _abi_of_pybind11()

    def __call__(self, work: Any) -> bool:
        """Make `work`.wait() return False in the thread that waits in it. Returns False if it is no gloo message."""
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
    """Return the Abort for torch's library; None if the library does not fit, so that such waits cannot be ended."""
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
    """Return the ABI name of torch's pybind11, which is part of the key of pybind11's internal data."""
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    # The reference is borrowed. With py_object, ctypes would treat it as owned and free the dict.
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
_UNTIL_DONE = timedelta(0)  # torch's value for no time-out
_OF_BACKEND = dist.Work


class _Interrupts:
    """The newest interrupt. at: its time, in ns of perf_counter; it ends earlier operations. error: for the waits."""

    def __init__(self) -> None:
        self.at, self.reason, self.left = 0, "", False
        self.error: Exception | None = None
        self.lock = threading.Lock()
        self.futures: weakref.WeakSet[_Gate] = weakref.WeakSet()
        self.ends_futures = True


_interrupts = _Interrupts()

causes: list[Callable[[], Exception | None]] = []
"""Functions that are called when a gloo operation fails. Each returns the error to raise instead, or None."""


def interrupt(reason: str, error: Exception | None = None) -> None:
    """End every wait in this process for operations issued before now. Call it after the connections have been shut.

    The waits raise `error`, or RuntimeError without one, within about a second. This function returns at once.
    """
    _interrupts.reason, _interrupts.error = reason, error
    _interrupts.at = now()
    _after_patience(_end_what_is_left)


def has_left() -> bool:
    """Return True if a collective was abandoned in this process. One of gloo's threads then waits for it forever."""
    return _interrupts.left


def wait(work: Any, issued: int, *timeout: timedelta) -> Any:
    """Wait for a collective and return the result of `work`.wait(). issued: ns of perf_counter.

    Raises RuntimeError if the collective fails. If it was interrupted, raises the error given to `interrupt`, or
    RuntimeError if none was given.
    """
    if type(work) is not _OF_BACKEND:
        return work.wait(*timeout)  # this work is written in Python and consists of several others
    if timeout and timeout[0] > _UNTIL_DONE:
        return _wait_until(work, issued, time.monotonic() + timeout[0].total_seconds())
    try:
        return work.wait(_SLICE)
    except RuntimeError:
        return _wait_until(work, issued, None)


def wait_for_message(work: Any, issued: int, *timeout: timedelta) -> Any:
    """Wait for a send or a receive, as `wait` does for a collective."""
    # Check before the wait begins. `interrupt` first sets the time, and then looks for threads in this wait.
    if issued < _interrupts.at:
        _after_patience(_end_what_is_left)
    arrived = _outcome(work.wait, *timeout)
    if arrived is False and issued < _interrupts.at:
        _aborted()
    return arrived


def end_futures(wanted: bool) -> None:
    """Choose whether an interrupt ends waits for later futures too. Such a future takes some 40 us more of CPU time."""
    _interrupts.ends_futures = wanted


def future(work: Any, issued: int) -> torch.futures.Future[Any]:
    """Return the future of a collective. An interrupt also ends waits for the future in C++, such as DDP's."""
    if not _interrupts.ends_futures:
        return work.get_future()  # type: ignore[no-any-return]
    gate = _Gate(work, issued)
    with _interrupts.lock:
        _interrupts.futures.add(gate)
    return gate.future


class Interruptible(dist.Work):
    """A wrapper around the handle of a gloo operation. Its waits can be ended. Other methods are passed on.

    issued: ns of perf_counter. message: True for a send or a receive.
    """

    def __init__(self, inner: Any, issued: int, message: bool) -> None:
        dist.Work.__init__(self)  # super() would double the time of this, in every collective
        self.inner, self.issued, self.message = inner, issued, message

    def wait(self, *timeout: Any) -> Any:
        return (wait_for_message if self.message else wait)(self.inner, self.issued, *timeout)

    def get_future(self) -> Any:
        return future(self.inner, self.issued) if type(self.inner) is dist.Work else self.inner.get_future()


def _delegated(name: str) -> Callable[[Interruptible], Any]:
    return lambda work: getattr(work.inner, name)()


# dist.Work defines these methods itself, so __getattr__ would not be called for them.
for _name in (
    "synchronize", "block_current_stream", "is_completed", "is_success", "exception", "result", "source_rank",
    "_source_rank", "get_future_result", "_get_op_type", "_get_duration",
):  # fmt: skip
    setattr(Interruptible, _name, _delegated(_name))


def _wait_until(work: Any, issued: int, deadline: float | None) -> Any:
    """Wait in slices until `work` is done or interrupted, or the deadline (seconds of time.monotonic) has passed."""
    while True:
        try:
            return work.wait(_SLICE if deadline is None else _slice_before(deadline))
        except RuntimeError:
            if work.is_completed():
                if issued < _interrupts.at and _interrupts.error is not None:
                    _aborted()
                return _outcome(work.wait)  # raises the work's error, if it failed; it may have succeeded meanwhile
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
    # At interpreter exit nothing waits for this thread.
    started(act, "nbkit-interrupt", after_s=_PATIENCE_SECONDS)


def _outcome(of: Callable[..., Any], *given: Any) -> Any:
    """Call `of` and return its result. If it fails, raise the cause if one of `causes` knows it, else the error."""
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
    """A future that follows the future of `work`. It ends with an error if `open` is called before `work` has ended."""

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
        """End the future now: with the result of `work` if it has ended, else with an error. May be called twice."""
        with self._lock:
            if not self._opened.done():
                self._opened.set_result(None)
