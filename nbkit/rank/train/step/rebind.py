"""Copies an object with everything that it refers to, and puts other objects in the place of some of it.

An optimizer may hold parameters in more places than its groups: in optimizers of its own, lists, dicts, closures. A
copy of it over other parameters has to find them all. `copy.deepcopy` does not: Optimizer drops attributes when it is
copied, and functions are never copied.
"""

from __future__ import annotations

import copy
import enum
from collections import deque
from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

ABSENT: Any = object()
"""Takes the place of what the copy has to do without: containers leave it out, elsewhere it is None."""

_AS_THEY_ARE = (
    *(bool, int, float, complex, str, bytes, type, ModuleType, enum.Enum),
    *(nn.Module, torch.distributed.ProcessGroup, torch.dtype, torch.device),
)


class Rebinding:
    """Copies values that may refer to each other. Models are not copied.

    memo: id of an object -> what takes its place; it grows by the copies. meet: asked about each object that is new;
    what it returns takes the place of the object, unless it is None.
    """

    def __init__(self, memo: dict[int, Any], meet: Callable[[Any], Any] | None = None) -> None:
        self._memo, self._meet = memo, meet
        self._alive: list[Any] = []  # an id means something for as long as its object lives

    def copy(self, value: Any) -> Any:
        """Return what takes the place of `value`: a copy, itself, or ABSENT."""
        if value is None or value is ABSENT or isinstance(value, _AS_THEY_ARE):
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        self._alive.append(value)
        found = None if self._meet is None else self._meet(value)
        if found is None:
            found = self._copied(value)
        return self._memo.setdefault(id(value), found)

    def attribute(self, value: Any) -> Any:
        """Return a copy, None for what is absent."""
        new = self.copy(value)
        return None if new is ABSENT else new

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return copy.deepcopy(value) if value.is_leaf else value.detach().clone()
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, dict | list | deque | set):
            return self._filled(value)
        if isinstance(value, tuple | frozenset):
            items = [new for item in value if (new := self.copy(item)) is not ABSENT]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, FunctionType):
            return self._function(value) if value.__closure__ else value
        if isinstance(value, MethodType):
            return MethodType(self.attribute(value.__func__), self.attribute(value.__self__))
        if isinstance(value, partial):
            words = {name: self.attribute(each) for name, each in value.keywords.items()}
            return partial(self.attribute(value.func), *map(self.attribute, value.args), **words)
        return self._object(value)

    def _filled(self, value: Any) -> Any:
        new = self._memo[id(value)] = copy.copy(value)
        new.clear()
        if isinstance(value, dict):
            for name, item in value.items():
                key, own = self.copy(name), self.copy(item)
                if key is not ABSENT and own is not ABSENT:
                    new[key] = own
            return new
        put = new.add if isinstance(value, set) else new.append
        for item in value:
            if (own := self.copy(item)) is not ABSENT:
                put(own)
        return new

    def _function(self, value: FunctionType) -> FunctionType:
        """Return a function with variables of its own outside of it, which may refer to itself."""
        assert value.__closure__ is not None
        cells, to_fill = [], []
        for cell in value.__closure__:
            if id(cell) not in self._memo:
                self._memo[id(cell)] = CellType()
                self._alive.append(cell)
                to_fill.append(cell)
            cells.append(self._memo[id(cell)])
        new = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
        new.__kwdefaults__, new.__qualname__ = value.__kwdefaults__, value.__qualname__
        new.__dict__.update(value.__dict__)
        self._memo[id(value)] = new
        for cell in to_fill:
            try:
                held = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._memo[id(cell)].cell_contents = self.attribute(held)
        return new

    def _object(self, value: Any) -> Any:
        kind = type(value)
        own_way = any(name in base.__dict__ for base in kind.__mro__[:-1] for name in ("__deepcopy__", "__reduce__"))
        try:
            if own_way or not hasattr(value, "__dict__"):
                return copy.deepcopy(value, self._memo)
            new = self._memo[id(value)] = object.__new__(kind)
        except Exception:  # locks, files, groups of processes: a copy shares them
            return value
        for base in kind.__mro__:
            for name in base.__dict__.get("__slots__", ()):
                if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                    object.__setattr__(new, name, self.attribute(getattr(value, name)))
        new.__dict__.update({name: self.attribute(each) for name, each in vars(value).items()})
        return new
