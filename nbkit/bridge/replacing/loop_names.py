"""What the body of a loop has made of its names, kept at each boundary, so that they can be what they were there.

Numbers, texts, lists, dicts, sets, small tensors and arrays, instances of classes of cells, and what has a state_dict,
such as an LR scheduler. What the user holds stays the same object, and its contents go back. All else is left as it is.
"""

from __future__ import annotations

import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, MutableMapping
from typing import Any

import torch

LIMIT_BYTES = 1 << 20  # of one tensor or array
LIMIT_ITEMS = 200_000  # of all containers together
_PLAIN = (int, float, complex, bool, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size)
_FIXED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_SEQUENCES, _MAPPINGS = (list, deque), (dict, OrderedDict, defaultdict, Counter)
_MISSING = object()

GoBack = Callable[[], Any]


class Left(Exception):
    """A value cannot be kept: it is left as it is."""


class LoopNames:
    """Of one loop. names: that its body uses. fixed: ids of what goes back by itself: job, model and optimizer.

    left: name -> its type, of what was not kept at the last boundary.
    """

    def __init__(self, namespace: MutableMapping[str, Any], names: Collection[str], fixed: Collection[int]) -> None:
        self._namespace, self._names, self._fixed = namespace, sorted(names), frozenset(fixed)
        self.left: dict[str, str] = {}

    def take(self) -> GoBack:
        """Keep them; what is returned makes them what they are now, any number of times."""
        copying, kept = _Copying(self._fixed), dict[str, GoBack]()
        self.left = {}
        for name in self._names:
            value = self._namespace.get(name, _MISSING)
            try:
                kept[name] = copying.keep(value)
            except Left:
                self.left[name] = type(value).__name__

        def go_back() -> None:
            for name, back in kept.items():
                if (value := back()) is _MISSING:
                    self._namespace.pop(name, None)
                else:
                    self._namespace[name] = value

        return go_back


class _Copying:
    def __init__(self, fixed: frozenset[int]) -> None:
        self._fixed, self._room = fixed, LIMIT_ITEMS
        self._known: dict[int, GoBack] = {}

    def keep(self, value: Any) -> GoBack:
        """How to have `value` as it is now. Raises Left."""
        kind = type(value)
        if kind in _PLAIN or value is _MISSING or isinstance(value, _FIXED) or id(value) in self._fixed:
            return lambda: value
        if id(value) not in self._known:
            self._known[id(value)] = lambda: value  # where it holds itself
            self._known[id(value)] = self._kept(value, kind)
        return self._known[id(value)]

    def _kept(self, value: Any, kind: type) -> GoBack:
        if isinstance(value, torch.Tensor) and kind is torch.Tensor:
            return _tensor(value)
        if kind in _SEQUENCES or kind is set or isinstance(value, tuple):
            return self._sequence(value)
        if kind in _MAPPINGS:
            return self._mapping(value)
        if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.generic):
            return lambda: value
        if numpy is not None and kind is numpy.ndarray and value.nbytes <= LIMIT_BYTES:
            array = value.copy()
            return lambda: _filled(value, lambda: value.__setitem__(..., array))
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.utils.data.DataLoader):
            raise Left
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            state = self.keep(value.state_dict())
            return lambda: _filled(value, lambda: value.load_state_dict(state()))
        if kind.__module__ == "__main__" and hasattr(value, "__dict__") and not hasattr(kind, "__slots__"):
            attributes = self._mapping(vars(value))
            return lambda: _filled(value, attributes)
        raise Left

    def _sequence(self, value: Any) -> GoBack:
        self._count(value)
        if all(kind in _PLAIN for kind in set(map(type, value))):
            plain = tuple(value)
            return (lambda: value) if isinstance(value, tuple) else (lambda: _refilled(value, plain))
        items = [self.keep(each) for each in value]
        if isinstance(value, tuple):  # what it holds is the same, with its contents of then
            return lambda: _filled(value, lambda: [each() for each in items])
        return lambda: _refilled(value, [each() for each in items])

    def _mapping(self, value: Any) -> GoBack:
        self._count(value)
        items = [(key, self.keep(each)) for key, each in value.items()]
        return lambda: _refilled(value, {key: each() for key, each in items})

    def _count(self, value: Any) -> None:
        self._room -= len(value)
        if self._room < 0:
            raise Left


def _tensor(value: torch.Tensor) -> GoBack:
    if value.numel() * value.element_size() > LIMIT_BYTES or value.layout is not torch.strided:
        raise Left
    before = value.detach().clone()
    return lambda: _filled(value, lambda: value.detach().copy_(before))


def _filled(value: Any, fill: Callable[[], Any]) -> Any:
    fill()
    return value


def _refilled(value: Any, items: Any) -> Any:
    value.clear()
    (value.extend if isinstance(value, _SEQUENCES) else value.update)(items)
    return value
