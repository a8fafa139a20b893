"""Pickle objects for a process of the same program that was forked later, with definitions of cells by value.

Objects that can be imported are pickled by name, as in pickle. Functions of `__main__`, lambdas, and definitions inside
functions are pickled by value: code, defaults, closure and body. So are classes of `__main__`, unless the other process
has them. A function uses the globals of the module with the same name in the other process, so it sees values that
later cells assign. Equal definitions give equal pickles on all ranks, wherever the files of their cells are.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import importlib
import io
import marshal
import pickle
import sys
import types
import weakref
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch

from nbkit.rank.device import accelerator

_MARSHAL = 2  # later versions write which objects are shared, and that differs between processes
_CACHED = type(functools.lru_cache(lambda: None))
# Python 3.13 has the last two. Their order and presence vary between processes.
_OF_THE_CLASS_ITSELF = (
    "__dict__", "__weakref__", "_abc_impl", "__slotnames__", "__static_attributes__", "__firstlineno__",
)  # fmt: skip


class TooLarge(pickle.PicklingError):
    """The value is larger than the limit."""


def dumps(
    value: Any,
    *,
    classes: bool = False,
    foreign: Collection[int] = (),
    parts: Mapping[int, str] = MappingProxyType({}),
    limit: int = sys.maxsize,
) -> bytes:
    """Return the pickle of `value`.

    classes: also pickle classes of `__main__` by value, because the other process does not have them yet. foreign: ids
    of objects that must not be in the pickle. parts: id of an object -> its name in the `parts` of `loads`, for objects
    that the other process has itself.

    Raises TooLarge above `limit` bytes, and errors of pickle.
    """
    stream = _Limited(limit)
    _Pickler(stream, classes, foreign, parts, limit).dump(value)
    return stream.getvalue()


def loads(packed: bytes, parts: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return the value of `packed`, a result of `dumps` on a rank of the same world. parts: name -> own object."""
    return _Unpickler(io.BytesIO(packed), parts).load()


class _Limited(io.BytesIO):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._limit:
            raise TooLarge(f"more than {self._limit} bytes")
        return super().write(data)


class _Pickler(pickle.Pickler):
    def __init__(
        self, stream: io.BytesIO, classes: bool, foreign: Collection[int], parts: Mapping[int, str], limit: int
    ) -> None:
        super().__init__(stream, protocol=5)
        self._classes, self._foreign, self._parts, self._limit = classes, foreign, parts, limit
        self._texts: dict[str, str] = {}
        self._storages: dict[int, torch.Tensor] = {}

    def persistent_id(self, value: Any) -> str | tuple[str, ...] | None:
        if type(value) is str:  # one object for equal strings: which ones are identical differs between processes
            return self._texts.setdefault(value, value)
        if id(value) in self._parts:
            return "part", self._parts[id(value)]
        if id(value) in self._foreign:
            raise pickle.PicklingError("it holds objects that are not sent")
        # Pickle the globals of a function as the name of their module.
        name = value.get("__name__") if type(value) is dict else None
        return (name,) if isinstance(name, str) and value is getattr(sys.modules.get(name), "__dict__", 0) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > self._limit:
            raise TooLarge(f"a tensor of {value.untyped_storage().nbytes()} bytes")
        kind = type(value)
        if kind is torch.Tensor and _is_carried(value):
            return self._reduced_tensor(value)
        if kind is torch.device and value == accelerator().own():
            return _own_device, ()
        if kind is types.ModuleType or isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if kind is types.FunctionType and not _can_be_imported(value):
            return _reduced_function(value)
        if isinstance(value, type) and not _can_be_imported(value, main=not self._classes):
            return _reduced_class(value)
        if kind is types.CodeType:
            return _code, (marshal.dumps(_anywhere(value), _MARSHAL),)
        if kind is types.CellType:
            held = (value.cell_contents,) if _is_filled(value) else ()
            return _cell, (), held, None, None, _fill
        if kind is types.MethodType and not _is_of_its_class(value):
            return _method, (value.__func__, value.__self__)
        if kind in (weakref.ReferenceType, weakref.WeakMethod):
            # Pickle a dead reference as one to a new set. Nothing else holds the set, so it is dead after loading.
            return (kind, (alive,)) if (alive := value()) is not None else (weakref.ref, (set(),))
        if kind is weakref.WeakSet:
            return kind, (list(value),)
        if kind in (weakref.WeakKeyDictionary, weakref.WeakValueDictionary):
            return kind, (dict(value),)
        if kind is _CACHED and not _can_be_imported(value):
            return _cached, (value.cache_parameters(), value.__wrapped__)
        if kind is property:
            return property, (value.fget, value.fset, value.fdel, value.__doc__)
        if kind in (classmethod, staticmethod):
            return kind, (value.__func__,)
        if kind is types.MappingProxyType:
            return _read_only, (dict(value),)
        if kind.__module__ == "dataclasses":  # its markers are compared by identity
            for name, known in vars(dataclasses).items():
                if known is value:
                    return name
        return NotImplemented

    def _reduced_tensor(self, tensor: torch.Tensor) -> Any:
        """Reduce a tensor to a view of its storage, which is pickled once.

        torch's own pickles of equal tensors differ between processes.
        """
        storage = tensor.untyped_storage()
        whole = self._storages.setdefault(storage.data_ptr(), torch.empty(0, dtype=torch.uint8).set_(storage))
        if whole is tensor:
            return _bytes, (whole.numpy().tobytes(),)
        where = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return _view, (whole, tensor.dtype, *where, tensor.requires_grad)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, parts: Mapping[str, Any]) -> None:
        super().__init__(stream)
        self._parts = parts

    def persistent_load(self, known: str | tuple[str, ...]) -> Any:
        if isinstance(known, str):
            return known
        return self._parts[known[1]] if len(known) == 2 else vars(importlib.import_module(known[0]))


def _can_be_imported(value: Any, *, main: bool = False) -> bool:
    module = sys.modules.get(value.__module__ or "")
    if module is None or (module.__name__ == "__main__" and not main):
        return False
    found: Any = module
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _reduced_function(function: types.FunctionType) -> Any:
    made = function.__code__, function.__globals__, function.__name__, function.__closure__
    state = {
        "__defaults__": function.__defaults__,
        "__kwdefaults__": function.__kwdefaults__,
        "__qualname__": function.__qualname__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
        "__annotations__": function.__annotations__,
    }
    return _function, made, (state, function.__dict__), None, None, _finish_function


def _function(code: types.CodeType, names: dict[str, Any], name: str, closure: tuple[Any, ...] | None) -> Any:
    return types.FunctionType(code, names, name, None, closure)


def _finish_function(function: Any, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for name, value in state[0].items():
        setattr(function, name, value)
    function.__dict__.update(state[1])


def _reduced_class(value: type) -> Any:
    if issubclass(value, enum.Enum) or "__slots__" in vars(value):
        raise pickle.PicklingError(f"nbkit does not send a class such as {value.__name__}")
    body = {name: held for name, held in sorted(vars(value).items()) if name not in _OF_THE_CLASS_ITSELF}
    body["__qualname__"] = value.__qualname__
    return _class, (type(value), value.__name__, value.__bases__), body, None, None, _finish_class


def _own_device() -> torch.device:
    """Return the device of the rank that loads the pickle, because each rank has another one."""
    return accelerator().own()


def _class(meta: type, name: str, bases: tuple[type, ...]) -> type:
    return types.new_class(name, bases, {"metaclass": meta} if meta is not type else {})


def _finish_class(made: type, body: dict[str, Any]) -> None:
    for name, held in body.items():
        setattr(made, name, held)
    if isinstance(made, abc.ABCMeta):
        abc.update_abstractmethods(cast(Any, made))


def _is_carried(tensor: torch.Tensor) -> bool:
    on_host = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return on_host and tensor.is_leaf and not tensor.is_conj() and not tensor.is_neg()


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _view(
    whole: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, grad: bool
) -> torch.Tensor:
    return whole.view(dtype).as_strided(shape, stride, offset).requires_grad_(grad)


def _code(data: bytes) -> types.CodeType:
    code = marshal.loads(data)
    assert isinstance(code, types.CodeType)
    return code


def _anywhere(code: types.CodeType) -> types.CodeType:
    """Return the code without the file name of its cell, because the name contains a process id."""
    inner = tuple(_anywhere(one) if isinstance(one, types.CodeType) else one for one in code.co_consts)
    return code.replace(co_filename="<cell>", co_consts=inner)


def _is_of_its_class(method: types.MethodType) -> bool:
    """Return True if the method can be found by its name in the class of its object."""
    owner = method.__self__ if isinstance(method.__self__, type) else type(method.__self__)
    found = getattr(owner, method.__name__, None)
    return found is method.__func__ or getattr(found, "__func__", None) is method.__func__


def _method(function: Any, owner: Any) -> types.MethodType:
    return types.MethodType(function, owner)


def _cached(settings: dict[str, Any], function: Any) -> Any:
    return functools.lru_cache(**settings)(function)


def _read_only(held: dict[Any, Any]) -> types.MappingProxyType[Any, Any]:
    return types.MappingProxyType(held)


def _cell() -> types.CellType:
    return types.CellType()


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _fill(cell: types.CellType, held: tuple[Any, ...]) -> None:
    if held:
        cell.cell_contents = held[0]
