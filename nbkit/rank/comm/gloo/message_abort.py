"""Ends gloo's own wait for a message, of a send or a receive, from another thread.

c10d has `Work::abort` for that in C++, and does not give it to Python: it is called by its name in torch's library. The
object behind a Python handle comes from pybind11's own interface for other modules, and is touched only if its first
word is the table of virtual functions of the class that the function belongs to.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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
    """What torch's pybind11 calls the ABI that it was built with: a part of the name that its own data have."""
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
