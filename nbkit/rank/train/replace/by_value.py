"""Pickles for a process of the same program that was forked later: functions of a notebook and lambdas go by value.

What can be imported goes by its name, as pickle has it. A lambda, a function within a function and whatever stands in
`__main__` goes as its code, defaults and closure; names that it looks up when called are looked up in the module of the
same name over there, which has to have them by then.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import sys
from types import CellType, FunctionType
from typing import Any


def dumps(value: Any) -> bytes:
    """The pickle of `value`. Raises what pickling raises."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def loads(packed: bytes) -> Any:
    """The counterpart of `dumps`, of bytes that a rank of the same world has made."""
    return pickle.loads(packed)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, FunctionType) or _importable(value):
            return NotImplemented
        code = marshal.dumps(value.__code__)
        held = [_content(cell) for cell in value.__closure__ or ()]
        attributes = value.__defaults__, value.__kwdefaults__, value.__qualname__, value.__dict__
        # Filled once it is there: a function that calls itself is in its own closure.
        return _function, (code, value.__module__, len(held)), (held, *attributes), None, None, _fill


def _importable(function: FunctionType) -> bool:
    if function.__module__ in (None, "__main__"):
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _content(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _function(code: bytes, module: str | None, cells: int) -> FunctionType:
    names = vars(importlib.import_module(module or "__main__"))
    closure = tuple(CellType() for _ in range(cells))
    function = FunctionType(marshal.loads(code), names, closure=closure)
    function.__module__ = module or "__main__"
    return function


def _fill(function: FunctionType, state: tuple[Any, ...]) -> None:
    held, defaults, keywords, name, attributes = state
    for cell, content in zip(function.__closure__ or (), held, strict=True):
        if content:
            cell.cell_contents = content[0]
    function.__defaults__, function.__kwdefaults__, function.__qualname__ = defaults, keywords, name
    function.__dict__.update(attributes)
