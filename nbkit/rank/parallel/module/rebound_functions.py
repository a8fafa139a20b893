"""Lets a deep copy of a model compute with its own parts alone, where functions in it hold parts of the original.

`copy.deepcopy` shares functions. So `self.mlpf = lambda x: mlp.down(mlp.up(x))`, a forward that was patched with a
closure over the old one, or a hook that looks at another layer would go on with the weights of the original. Here each
such function is made again, with cells and defaults that hold the copies. What no copy can reach, such as a model in a
global variable, is for `own_parts.py` to find.
"""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, MutableMapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_CACHED = type(functools.lru_cache(lambda: None))
_PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_HOLDERS = {OrderedDict, dict, list, tuple, set}
_CLOSED: tuple[type, ...] = (str, bytes, int, float, type, CodeType, ModuleType, Tensor)
_WEAK: Any = {weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary}
_CHANGED = {*_HOLDERS, deque}
_REGISTRIES = {"_parameters", "_buffers", "_modules"}
_MOST, _FARTHEST = 4096, 20_000
"""A container of more items is a vocabulary or a cache. Nobody looks at more objects from one function."""


def rebind(copied: nn.Module, original: nn.Module, memo: dict[int, Any]) -> None:
    """Make the functions in `copied`, a deep copy of `original` with this `memo`, compute with parts of the copy."""
    _Rebinding(copied, original, memo).run()


def rebind_handles(model: nn.Module, handles: dict[int, nn.Module]) -> None:
    """Make weak references and containers in `model` hold `handles` in place of the modules of these ids."""
    _Rebinding(model, model, handles, set(handles)).run()


class _Rebinding:
    """Gives what `copied` holds the parts of `memo` in place of those of `original`."""

    def __init__(
        self, copied: nn.Module, original: nn.Module, memo: dict[int, Any], own: set[int] | None = None
    ) -> None:
        self._copied, self._original, self._memo = copied, original, memo
        self._own, self._in_place = own, own is not None
        self._made: dict[int, tuple[Any, Any]] = {}  # id -> (what was found, what it has become)
        self._cells: dict[int, tuple[CellType, CellType]] = {}
        self._copies, self._known = set[int](), 0

    def run(self) -> None:
        for part in self._copied.modules():
            self._made[id(part)] = part, part
            held = vars(part)
            for key, value in list(held.items()):
                kind = type(value)
                if kind not in _PLAIN and key not in _REGISTRIES and not (kind in _HOLDERS and not value):
                    self._put(held, key, value)

    def _put(self, held: Any, key: Any, value: Any) -> None:
        if (new := self._of(value)) is not value:
            held[key] = new

    def _of(self, value: Any) -> Any:
        """Return what `value` becomes in the copy: `value` itself where it holds nothing of the original."""
        kind = type(value)
        if kind in weakref.ProxyTypes:  # asked for its class, it gives that of what it stands for
            new = self._instead(_target(value))
            return value if new is None else weakref.proxy(new)
        if kind in _PLAIN or isinstance(value, _CLOSED):
            return value
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, nn.Module) and (new := self._instead(value)) is not None:
            return new
        if kind is FunctionType:
            # A handle has the attributes of what a function holds: only who asks which module it is needs the handle.
            return value if self._in_place else self._function(value)
        self._made[id(value)] = value, value
        new = value
        if kind is MethodType:
            if (function := self._of(value.__func__)) is not value.__func__:
                new = MethodType(function, value.__self__)
        elif kind is functools.partial:
            parts = self._of((value.func, value.args)), self._each(value.keywords)
            if parts[0] != (value.func, value.args) or parts[1] is not value.keywords:
                (function, args), keywords = parts
                new = functools.partial(function, *args, **keywords)
        elif kind is _CACHED:
            if (function := self._of(value.__wrapped__)) is not value.__wrapped__:
                new = functools.lru_cache(**value.cache_parameters())(function)
        elif kind is weakref.ReferenceType:
            if (target := self._instead(value())) is not None:
                new = weakref.ref(target)
        elif kind is weakref.WeakMethod:
            method = value()
            if method is not None and (target := self._instead(method.__self__)) is not None:
                new = weakref.WeakMethod(MethodType(method.__func__, target))
        elif kind in _WEAK:
            held = dict.fromkeys(value) if kind is weakref.WeakSet else dict(value)
            changed = {self._of(key): self._of(item) for key, item in held.items()}
            if any(a is not b for a, b in zip((*held, *held.values()), (*changed, *changed.values()), strict=True)):
                new = kind(changed)
        elif isinstance(value, tuple):
            items = [self._of(item) for item in value]
            if any(a is not b for a, b in zip(items, value, strict=True)):
                new = tuple(items) if kind is tuple else kind(*items)
        elif kind in _CHANGED if self._in_place else self._is_copy(value):
            self._inside(value)
        self._made[id(value)] = value, new
        return new

    def _each(self, held: dict[str, Any]) -> dict[str, Any]:
        new = {key: self._of(value) for key, value in held.items()}
        return new if any(new[key] is not held[key] for key in held) else held

    def _inside(self, value: Any) -> None:
        """Put what things become into `value`, an object of the copy's own."""
        if isinstance(value, list | deque):
            for index in range(len(value) if len(value) <= _MOST else 0):
                self._put(value, index, value[index])
        elif isinstance(value, set):
            if len(value) <= _MOST and any(self._of(item) is not item for item in value):
                items = [self._of(item) for item in value]
                value.clear()
                value.update(items)
        elif isinstance(value, MutableMapping):
            for key, item in list(value.items()) if len(value) <= _MOST else ():
                self._put(value, key, item)
            if len(value) <= _MOST and any(self._of(key) is not key for key in value):
                items = [(self._of(key), item) for key, item in value.items()]
                value.clear()
                value.update(items)
        if not self._in_place and isinstance(held := getattr(value, "__dict__", None), dict) and len(held) <= _MOST:
            for key, item in list(held.items()):
                self._put(held, key, item)

    def _is_copy(self, value: Any) -> bool:
        """Return whether the copy alone has `value`: a logger, or a group of processes, is shared with the original."""
        if self._known != len(self._memo):
            self._known = len(self._memo)
            self._copies = {id(each) for each in self._memo.values()}
        return id(value) in self._copies

    def _function(self, function: FunctionType) -> FunctionType:
        self._made[id(function)] = function, function
        if not reaches(function, self._originals()):
            return function
        cells = function.__closure__ or ()
        unfilled = [cell for cell in cells if id(cell) not in self._cells]
        for cell in unfilled:
            self._cells[id(cell)] = cell, CellType()
        closure = tuple(self._cells[id(cell)][1] for cell in cells)
        new = FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
        self._made[id(function)] = function, new
        functools.update_wrapper(new, function, updated=())
        vars(new).pop("__wrapped__", None)
        vars(new).update(self._copy(vars(function)))
        new.__defaults__, new.__kwdefaults__ = self._copy(function.__defaults__), self._copy(function.__kwdefaults__)
        for cell in unfilled:
            if is_filled(cell):
                self._cells[id(cell)][1].cell_contents = self._copy(cell.cell_contents)
        return new

    def _copy(self, value: Any) -> Any:
        try:
            value = copy.deepcopy(value, self._memo)
        except Exception:  # a lock, a file: as it is. What then still reads the original is found when the copy runs.
            return value
        return self._of(value)

    def _instead(self, target: Any) -> Any:
        """Return what stands for `target` now, if that is a part of the original; else None."""
        return self._memo.get(id(target)) if id(target) in self._originals() else None

    def _originals(self) -> set[int]:
        if self._own is None:
            self._own = parts_of(self._original)
        return self._own


def parts_of(module: nn.Module) -> set[int]:
    """Ids of all modules, parameters and buffers in `module`."""
    return {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}


def reaches(value: Any, wanted: set[int]) -> bool:
    """Return whether one comes from `value` to one of the objects `wanted`, by ids, through what it holds."""
    seen, ahead = {id(value)}, [value]
    while ahead and len(seen) < _FARTHEST:
        for each in _held_by(ahead.pop()):
            if id(each) in wanted:
                return True
            if id(each) not in seen and type(each) not in _PLAIN and not isinstance(each, _CLOSED):
                seen.add(id(each))
                ahead.append(each)
    return False


def _target(proxy: Any) -> Any:
    """Return the module for which a weakref.proxy stands; None where it is gone, or no module."""
    try:
        return next(proxy.modules()) if isinstance(proxy, nn.Module) else None
    except ReferenceError:
        return None


def _held_by(value: Any) -> Iterable[Any]:
    if type(value) in weakref.ProxyTypes:
        return (_target(value),)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
        return [*cells, value.__defaults__, value.__kwdefaults__, *vars(value).values()]
    if isinstance(value, weakref.ReferenceType):
        return (value(),)
    if isinstance(value, dict | list | tuple | set | deque) and len(value) > _MOST:
        return ()
    return gc.get_referents(value)


def is_filled(cell: CellType) -> bool:
    """Return whether the variable that `cell` is of has a value."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
