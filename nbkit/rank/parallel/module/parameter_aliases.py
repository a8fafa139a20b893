"""Parameters that are also held elsewhere than as attributes of modules: in lists, tuples, dicts, plain objects, the
closures of functions, and modules that are not registered.

`self.decayed = [block.weight for block in self.blocks]` holds the tensors themselves. A strategy that puts another
tensor in the place of a parameter has to put it there too, or the model goes on with one that nobody trains.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, MutableMapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from nbkit.rank.parallel.module.rebound_functions import is_filled

_NOTE = "_nbkit_aliases"
_OWN = {"_parameters", "_buffers", "_modules", _NOTE}
_LEAVES = (str, bytes, int, float, complex, bool, type, BuiltinFunctionType, ModuleType)
_DEPTH, _MOST = 8, 4096
# What nearly all attributes of nn.Module are: a number or nothing, and dicts without a hook in them.
_NUMBERS, _HOLDERS = {bool, int, float, str, type(None)}, {OrderedDict, dict, list, tuple}

Where = tuple[Any, Any, tuple[int, ...]]
"""(a dict or list, the key in it, the way on from there through tuples)"""


def tensors_beside(module: nn.Module) -> Iterator[tuple[Where, Tensor]]:
    """Every tensor in the attributes of `module` and what is in it, beside parameters and buffers, and where it is."""
    parts = list(module.modules())
    seen = {id(part) for part in parts}
    for part in parts:
        if isinstance(part, nn.RNNBase):
            continue  # looks after its own list
        for key, value in list(vars(part).items()):
            kind = type(value)
            if key not in _OWN and kind not in _NUMBERS and not (kind in _HOLDERS and not value):
                yield from _below((vars(part), key, ()), value, _DEPTH, seen)


def _below(where: Where, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[Where, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
        return
    if value is None or isinstance(value, _LEAVES) or depth == 0:
        return
    if isinstance(value, tuple):
        for i, inner in enumerate(value):
            yield from _below((where[0], where[1], (*where[2], i)), inner, depth - 1, seen)
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            if is_filled(cell):
                yield from _below((_Attributes(cell), "cell_contents", ()), cell.cell_contents, depth - 1, seen)
        for name in ("__defaults__", "__kwdefaults__"):
            yield from _below((_Attributes(value), name, ()), getattr(value, name), depth - 1, seen)
    if isinstance(value, MethodType):
        yield from _below(where, value.__func__, depth - 1, seen)
        yield from _below(where, value.__self__, depth - 1, seen)
        return
    if isinstance(value, partial):
        for name in ("func", "args", "keywords"):
            yield from _below((_Attributes(value), name, ()), getattr(value, name), depth - 1, seen)
        return
    inside: Any = value
    if not isinstance(value, list | MutableMapping):
        inside = getattr(value, "__dict__", {})
    if len(inside) > _MOST:
        return  # a vocabulary, a cache
    for key, inner in list(enumerate(inside) if isinstance(inside, list) else inside.items()):
        yield from _below((inside, key, ()), inner, depth - 1, seen)


class _Attributes:
    """Cells, functions and partial functions as a dict of what they hold."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getitem__(self, name: str) -> Any:
        return getattr(self._of, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(self._of, partial):
            held = {"func": self._of.func, "args": self._of.args, "keywords": self._of.keywords, name: value}
            self._of.__setstate__((*held.values(), vars(self._of)))  # type: ignore[attr-defined]
        else:
            setattr(self._of, name, value)


def note_aliases(module: nn.Module) -> None:
    """Note on each module in `module` where else its parameters are held."""
    homes = {id(p): (part, name) for part in module.modules() for name, p in part._parameters.items() if p is not None}
    found: dict[int, dict[str, list[Where]]] = {}
    for where, tensor in tensors_beside(module):
        if (home := homes.get(id(tensor))) is not None:
            found.setdefault(id(home[0]), {}).setdefault(home[1], []).append(where)
    for part in module.modules():
        vars(part).pop(_NOTE, None)
        if id(part) in found:
            vars(part)[_NOTE] = found[id(part)]


def notes_of(module: nn.Module) -> Iterator[Any]:
    """Every note in `module`. A copy is to be noted anew: what a note holds cannot be copied."""
    return (vars(part)[_NOTE] for part in module.modules() if _NOTE in vars(part))


def aliased(part: nn.Module) -> Iterable[str]:
    """Names of the parameters of `part` that were noted elsewhere too."""
    noted: dict[str, list[Where]] = vars(part).get(_NOTE) or {}
    return noted


def put_aliases(part: nn.Module, name: str, param: Tensor | None) -> None:
    """Put `param` wherever else the parameter `name` of `part` was noted."""
    if (noted := vars(part).get(_NOTE)) is not None:
        for holder, key, path in noted.get(name, ()):
            holder[key] = _with(holder[key], path, param) if path else param


def _with(value: Any, path: tuple[int, ...], param: Tensor | None) -> Any:
    """A tuple with `param` at `path`."""
    first, *rest = path
    inner = _with(value[first], tuple(rest), param) if rest else param
    items = (*value[:first], inner, *value[first + 1 :])
    return items if type(value) is tuple else type(value)(*items)
