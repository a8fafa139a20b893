"""Copies of a model: with shapes only, as deep copies, or built again by the user's callable.

Building again. The callable that built a model builds a second one, which shares nothing with the first. A proof needs
this, because it must not rely on nbkit's own code that makes copies. Some models also cannot be copied correctly: for
example, if their classes are created anew for each model, or if they keep parts in objects that `copy.deepcopy` shares.

Rebinding. `copy.deepcopy` shares functions. So some functions of a copy would still use the weights of the original:
`self.mlpf = lambda x: mlp.down(mlp.up(x))`, a forward that was patched with a closure over the old one, or a hook that
reads another layer. Here each such function is created again, with cells and defaults that hold the copies. Then a deep
copy computes with its own parts alone. `own_parts.py` finds what no copy can reach, such as a model in a global
variable.

Aliases. Parameters may be held in other places than attributes of modules: in lists, tuples, dicts, plain objects,
closures of functions, and modules that are not registered. For example, `self.decayed = [block.weight for block in
self.blocks]` holds the tensors themselves. A strategy that replaces a parameter has to replace it there too. Otherwise
the model would use a tensor that is not trained.

Skeletons. A skeleton is a module with shapes and without memory. Strategies are applied to it before any weight is
moved. Every parameter is a scalar, expanded with zero strides, on its final device and of its final dtype. Factories of
optimizers treat it like the final parameter, unlike meta tensors. Buffers, which `__init__` computes, stay real.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import sys
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from itertools import accumulate
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nbkit.errors import TrainingError
from nbkit.rank.parallel.proof.outside_state import outside_kept
from nbkit.rank.parallel.reshard.plain_attributes import plain_attributes, put
from nbkit.rank.rng.host_generators import Drawn
from nbkit.rank.rng.seeding import seeded

_CACHED = type(functools.lru_cache(lambda: None))
_PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_FUNCTION_HOLDERS = {OrderedDict, dict, list, tuple, set}
_CLOSED: tuple[type, ...] = (str, bytes, int, float, type, CodeType, ModuleType, Tensor)
_WEAK: Any = {weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary}
_CHANGED = {*_FUNCTION_HOLDERS, deque}
_REGISTRIES = {"_parameters", "_buffers", "_modules"}
_MOST_ITEMS, _FARTHEST = 4096, 20_000
"""A container with more than _MOST_ITEMS items is a vocabulary or a cache, and is not searched. The search from one
function visits at most _FARTHEST objects."""


def rebind(copied: nn.Module, original: nn.Module, memo: dict[int, Any]) -> None:
    """Make the functions in `copied`, a deep copy of `original` with this `memo`, use the parts of the copy."""
    _Rebinding(copied, original, memo).run()


def rebind_handles(model: nn.Module, handles: dict[int, nn.Module]) -> None:
    """Replace modules by `handles`, keyed by their ids, in the weak references and containers of `model`."""
    _Rebinding(model, model, handles, set(handles)).run()


class _Rebinding:
    """Replaces the parts of `original` by those in `memo`, in everything that `copied` holds."""

    def __init__(
        self, copied: nn.Module, original: nn.Module, memo: dict[int, Any], own: set[int] | None = None
    ) -> None:
        self._copied, self._original, self._memo = copied, original, memo
        self._own, self._in_place = own, own is not None
        self._made: dict[int, tuple[Any, Any]] = {}  # id -> (the object, its replacement)
        self._cells: dict[int, tuple[CellType, CellType]] = {}
        self._copies, self._known = set[int](), 0

    def run(self) -> None:
        for part in self._copied.modules():
            self._made[id(part)] = part, part
            held = vars(part)
            for key, value in list(held.items()):
                kind = type(value)
                if kind not in _PLAIN and key not in _REGISTRIES and not (kind in _FUNCTION_HOLDERS and not value):
                    self._put(held, key, value)

    def _put(self, held: Any, key: Any, value: Any) -> None:
        if (new := self._of(value)) is not value:
            held[key] = new

    def _of(self, value: Any) -> Any:
        """Return the replacement of `value` in the copy: `value` itself if it holds nothing of the original."""
        kind = type(value)
        if kind in weakref.ProxyTypes:  # its __class__ is the class of its target
            new = self._instead(_target(value))
            return value if new is None else weakref.proxy(new)
        if kind in _PLAIN or isinstance(value, _CLOSED):
            return value
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, nn.Module) and (new := self._instead(value)) is not None:
            return new
        if kind is FunctionType:
            # A handle shares the module's attributes, so a function works with either of them.
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
        """Replace the contents of `value`, an object that belongs to the copy."""
        if isinstance(value, list | deque):
            for index in range(len(value) if len(value) <= _MOST_ITEMS else 0):
                self._put(value, index, value[index])
        elif isinstance(value, set):
            if len(value) <= _MOST_ITEMS and any(self._of(item) is not item for item in value):
                items = [self._of(item) for item in value]
                value.clear()
                value.update(items)
        elif isinstance(value, MutableMapping):
            for key, item in list(value.items()) if len(value) <= _MOST_ITEMS else ():
                self._put(value, key, item)
            if len(value) <= _MOST_ITEMS and any(self._of(key) is not key for key in value):
                items = [(self._of(key), item) for key, item in value.items()]
                value.clear()
                value.update(items)
        if (
            not self._in_place
            and isinstance(held := getattr(value, "__dict__", None), dict)
            and len(held) <= _MOST_ITEMS
        ):
            for key, item in list(held.items()):
                self._put(held, key, item)

    def _is_copy(self, value: Any) -> bool:
        """Return True if only the copy has `value`. A logger, for example, is shared with the original."""
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
        except Exception:  # a lock, a file: keep it. If it still reads the original, a run of the copy shows it.
            return value
        return self._of(value)

    def _instead(self, target: Any) -> Any:
        """Return the replacement of `target` if it is a part of the original, else None."""
        return self._memo.get(id(target)) if id(target) in self._originals() else None

    def _originals(self) -> set[int]:
        if self._own is None:
            self._own = parts_of(self._original)
        return self._own


def parts_of(module: nn.Module) -> set[int]:
    """Return the ids of all modules, parameters and buffers in `module`."""
    return {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}


def reaches(value: Any, wanted: set[int]) -> bool:
    """Return True if an object whose id is in `wanted` can be reached from `value`."""
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
    """Return the module behind a weakref.proxy, or None if it is gone or is not a module."""
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
    if isinstance(value, dict | list | tuple | set | deque) and len(value) > _MOST_ITEMS:
        return ()
    return gc.get_referents(value)


def is_filled(cell: CellType) -> bool:
    """Return True if the variable of `cell` has a value."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


_NOTE = "_nbkit_aliases"
_OWN = {"_parameters", "_buffers", "_modules", _NOTE}
_LEAVES = (str, bytes, int, float, complex, bool, type, BuiltinFunctionType, ModuleType)
_DEPTH, _MOST = 8, 4096
# Nearly all attributes of nn.Module are numbers or None, or dicts without a hook.
_NUMBERS, _HOLDERS = {bool, int, float, str, type(None)}, {OrderedDict, dict, list, tuple}

Where = tuple[Any, Any, tuple[int, ...]]
"""(a dict or list, the key in it, the indices that lead from there through nested tuples)"""


def tensors_beside(module: nn.Module) -> Iterator[tuple[Where, Tensor]]:
    """Yield (place, tensor) for every tensor in the attributes of all modules, except parameters and buffers."""
    parts = list(module.modules())
    seen = {id(part) for part in parts}
    for part in parts:
        if isinstance(part, nn.RNNBase):
            continue  # it updates its own list
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
        return  # such as a vocabulary or a cache
    for key, inner in list(enumerate(inside) if isinstance(inside, list) else inside.items()):
        yield from _below((inside, key, ()), inner, depth - 1, seen)


class _Attributes:
    """Presents the contents of a cell, a function or a partial function as a dict."""

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
    """Note on each module in `module` in which other places its parameters are held."""
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
    """Yield every note in `module`. Notes cannot be copied: call `note_aliases` for a copy."""
    return (vars(part)[_NOTE] for part in module.modules() if _NOTE in vars(part))


def aliased(part: nn.Module) -> Iterable[str]:
    """Return the names of the parameters of `part` that are also held elsewhere."""
    noted: dict[str, list[Where]] = vars(part).get(_NOTE) or {}
    return noted


def put_aliases(part: nn.Module, name: str, param: Tensor | None) -> None:
    """Put `param` in all other noted places of the parameter `name` of `part`."""
    if (noted := vars(part).get(_NOTE)) is not None:
        for where in noted.get(name, ()):
            put_in_place(where, param)


def put_in_place(where: Where, tensor: Tensor | None) -> None:
    """Put `tensor` in a place that `tensors_beside` has found."""
    holder, key, path = where
    holder[key] = _with(holder[key], path, tensor) if path else tensor


def _with(value: Any, path: tuple[int, ...], param: Tensor | None) -> Any:
    """Return a tuple like `value` with `param` at `path`."""
    first, *rest = path
    inner = _with(value[first], tuple(rest), param) if rest else param
    items = (*value[:first], inner, *value[first + 1 :])
    return items if type(value) is tuple else type(value)(*items)


T = TypeVar("T", bound=Tensor)


def placeholder(shape: Sequence[int], like: nn.Parameter) -> nn.Parameter:
    """Return a parameter of `shape` without memory, with the dtype, device, requires_grad and attributes of `like`."""
    empty = torch.zeros((), dtype=like.dtype, device=like.device).expand(tuple(shape))
    return parameter_like(empty, like)


def parameter_like(data: Tensor, like: nn.Parameter) -> nn.Parameter:
    """Return a parameter over `data`, with the requires_grad of `like` and the attributes that were set on it."""
    return marked(nn.Parameter(data, requires_grad=like.requires_grad), like)


def marked(tensor: T, like: Tensor) -> T:
    """Return `tensor` with the attributes that were set on `like`. A model may read them: `weight.scale = 2.0`."""
    if like.__dict__:
        tensor.__dict__.update(like.__dict__)
    return tensor


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` has no memory of its own yet."""
    return tensor.numel() > 1 and not any(tensor.stride())


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return `copy.deepcopy(module, memo)`, with functions that use the parts of the copy.

    It takes half the time of `copy.deepcopy`, because it does not copy the empty OrderedDicts in which modules keep
    their hooks. Raise TypeError if the copy shares a module, parameter or buffer with `module` that is not in `memo`.
    """
    shared = parts_of(module) - memo.keys()
    for part in module.modules():
        for value in vars(part).values():
            if type(value) is OrderedDict and not value:
                memo.setdefault(id(value), OrderedDict())
        for reference in weakref.getweakrefs(part):
            if type(reference) in (*weakref.ProxyTypes, weakref.WeakMethod):
                memo[id(reference)] = reference  # a copy of it would refer to another module, or fail
    for note in notes_of(module):
        memo[id(note)] = {}
    made = copy.deepcopy(module, memo)
    if not shared.isdisjoint(parts_of(made)):
        raise TypeError(_shares(made, shared))
    rebind(made, module, memo)
    note_aliases(made)
    return made


def _shares(made: nn.Module, shared: set[int]) -> str:
    """Return a description of the part of the copy `made` that holds an object with an id in `shared`."""
    for path, part in made.named_modules():
        if any(id(each) in shared for each in (part, *part._parameters.values(), *part._buffers.values())):
            while path and not hasattr(type(made.get_submodule(path)), "__deepcopy__"):
                path = path.rpartition(".")[0]
            kind = type(made.get_submodule(path))
            own = ", by its own __deepcopy__" if hasattr(kind, "__deepcopy__") else ""
            return f"a copy of {path or 'the model'}, a {kind.__name__}, shares its parts with it{own}"
    return ""


_AGAIN = "_nbkit_built_again"


def build_again(skeleton: nn.Module, build: Callable[[nn.Module], nn.Module]) -> None:
    """Use `build` to make the copies of `skeleton`, which cannot be copied. It is called with the module to match."""
    vars(skeleton)[_AGAIN] = build


def skeleton_of(module: nn.Module) -> nn.Module:
    """Return a copy of `module` whose parameters are placeholders. Tied parameters stay tied, and buffers are copied.

    Use it for skeletons too: `copy.deepcopy` would allocate memory for every placeholder.
    """
    if (build := vars(module).get(_AGAIN)) is not None:
        made: nn.Module = build(module)
        build_again(made, build)
        return made
    memo: dict[int, Any] = {id(p): placeholder(p.shape, p) for p in module.parameters()}
    for _, tensor in tensors_beside(module):
        if not tensor.is_leaf:
            # A weight that a hook computes before each forward (torch.nn.utils.weight_norm) cannot be deep-copied.
            memo.setdefault(id(tensor), tensor.detach().clone())
    return copied(module, memo)


def hooked_gradient(module: nn.Module) -> str:
    """Return the name of the first parameter with a user's hook on its gradient, or "".

    Copies do not keep such a hook. Hooks of nbkit are ignored.
    """
    for name, p in module.named_parameters():
        hooks = [*(p._backward_hooks or {}).values(), *(getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()]
        if any(not str(getattr(hook, "__module__", "")).startswith("nbkit.") for hook in hooks):
            return name
    return ""


def homes(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return name -> every (module, attribute) that holds this parameter. A tied parameter has its first name."""
    first: dict[int, str] = {}
    found: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, part in module.named_modules():
        for attribute, param in part._parameters.items():
            if param is None:
                continue
            name = first.setdefault(id(param), f"{path}.{attribute}" if path else attribute)
            found.setdefault(name, []).append((part, attribute))
    return found


def replace_submodule(places: Sequence[tuple[nn.Module, str]], param: nn.Parameter | None) -> None:
    """Put `param` in all `places` of another parameter and in its noted aliases. None removes the parameter there."""
    for part, attribute in places:
        part._parameters[attribute] = param
        if _NOTE in vars(part):
            put_aliases(part, attribute, param)


_MATRIX = 1 << 20


def window(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, draw: torch.Generator | None = None
) -> Tensor:
    """Return a tensor of `shape` whose rows differ. It takes little more memory than the sum of its dims.

    draw: the generator of its numbers. Many small matrices in one tensor, such as experts, share the memory of one.
    """
    if not shape:
        return torch.ones((), dtype=dtype, device=device)
    strides = list(accumulate([1] + [7] * (len(shape) - 1), lambda a, b: a * b))
    if len(shape) == 3 and shape[1] * shape[2] <= _MATRIX:
        # Torch's grouped product accepts overlapping matrices of experts, but not matrices whose rows overlap.
        strides = [16, shape[2], 1]
    size = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True) if length)
    drawn = torch.randn(size, generator=draw) * 0.02 + (1.0 if len(shape) == 1 else 0.0)
    return drawn.to(device, dtype).as_strided(tuple(shape), strides)


def runnable(skeleton: nn.Module) -> nn.Module:
    """Return a copy of `skeleton` that can run forward and backward with very little memory.

    Every parameter is a view of a few random numbers. Its gradient is freed as soon as it is computed. The numbers come
    from a separate generator.
    """
    module, draw = skeleton_of(skeleton), torch.Generator().manual_seed(0)
    for places in homes(module).values():
        old: nn.Parameter = getattr(*places[0])
        param = parameter_like(window(old.shape, old.dtype, old.device, draw), old)
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(drop_gradient)
        replace_submodule(places, param)
    return module


def drop_gradient(param: Tensor) -> None:
    """Free the gradient of `param`. Used as a hook that runs when the gradient has been accumulated."""
    param.grad = None


Build = Callable[[], nn.Module]


def built_again(build: Build, like: nn.Module, *, first: nn.Module | None = None) -> nn.Module:
    """Call `build` again, and return its model in the state of the skeleton `like`.

    The model has no memory, and has the buffers, attributes and modes of `like`. first: the result of the first call of
    `build`, if it still exists. The output of `build` is hidden, and random generators are restored. Raises
    TrainingError if `build` returns a different model than before, or the same object again.
    """
    made = _called(build, like)
    if not isinstance(made, nn.Module) or parts_of(made) & parts_of(like if first is None else first):
        raise _other("it returns the same object each time")
    if (found := _differences(made, like)) != "":
        raise _other(found)
    note_aliases(made)
    params = dict(like.named_parameters())
    for name, places in homes(made).items():
        replace_submodule(places, placeholder(params[name].shape, params[name]))
    take_buffers(made, like)
    for (where, own), (_, theirs) in list(zip(tensors_beside(made), tensors_beside(like), strict=True)):
        if own.shape == theirs.shape and not isinstance(own, nn.Parameter):
            if own.is_meta:
                put_in_place(where, marked(theirs.detach().clone(), own))
            else:
                own.data = theirs.detach().clone()
    put(plain_attributes(like), made)
    return made


def take_buffers(made: nn.Module, like: nn.Module) -> None:
    """Give `made` the buffers of `like`, which has the same modules; in place if possible."""
    parts = dict(like.named_modules())
    for path, part in made.named_modules():
        for name, buffer in parts[path]._buffers.items():
            own = part._buffers[name]
            if buffer is None or own is None:
                part._buffers[name] = None if buffer is None else marked(buffer.detach().clone(), buffer)
            elif (own.shape, own.dtype, own.device) == (buffer.shape, buffer.dtype, buffer.device):
                marked(own, buffer).detach().copy_(buffer)
            else:
                part._buffers[name] = marked(buffer.detach().clone(), buffer)


def _called(build: Build, like: nn.Module) -> Any:
    drawn = Drawn.so_far()
    device = next(like.parameters()).device
    try:
        with (
            open(os.devnull, "w") as nowhere,
            redirect_stdout(nowhere),
            warnings.catch_warnings(),
            seeded(device),
            outside_kept(like, build),
            classes_kept(),
        ):
            warnings.simplefilter("ignore")
            try:
                with _Unfilled():
                    return build()
            except Exception:  # it may have computed with the numbers that were not drawn
                return build()
    finally:
        drawn.restore()


@contextmanager
def classes_kept() -> Iterator[None]:
    """Undo changes to classes of modules that are made inside this context.

    A callable may patch a class (`Block.forward = scaled(Block.forward)`). A second call would wrap the patch of the
    first model, which is in use for training.
    """
    kinds, ahead = set[type](), [nn.Module]
    while ahead:
        for kind in ahead.pop().__subclasses__():
            if kind not in kinds:
                ahead.append(kind)
                kinds.update(kind.__mro__)
    before = {kind: dict(vars(kind)) for kind in kinds}
    try:
        yield
    finally:
        for kind, held in before.items():
            now = dict(vars(kind))
            for name in now.keys() | held.keys():
                with suppress(AttributeError, TypeError):
                    if name not in held:
                        type.__delattr__(kind, name)
                    elif now.get(name) is not held[name]:
                        type.__setattr__(kind, name, held[name])


class _Unfilled(TorchFunctionMode):
    """Skips filling tensors with random numbers, which takes most of the time of building a model.

    It skips calls of torch.nn.init, and fills by torch's and transformers' own code. Other code may repeat a fill until
    the numbers suit it (rejection sampling), as torch.nn.init.trunc_normal_ does. Without numbers it might never end.
    """

    _FILLS = frozenset({"uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "bernoulli_", "exponential_"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._FILLS and not _may_repeat(func, sys._getframe(1)):
            # torch.nn.init passes the tensor by name.
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _may_repeat(func: Any, caller: FrameType) -> bool:
    if getattr(func, "__module__", "") == "torch.nn.init":
        return False
    known = str(caller.f_globals.get("__name__", "")).startswith(("torch.", "transformers."))
    return not known or "trunc_normal" in caller.f_code.co_name


def _differences(made: nn.Module, like: nn.Module) -> str:
    for what, own, theirs in zip(("parameter", "buffer", "module"), _parts(made), _parts(like), strict=True):
        if own != theirs:
            first = next((b for a, b in zip(own, theirs, strict=False) if a != b), None)
            return f"{len(own)} {what}s for {len(theirs)}" if first is None else f"{what} {first[0]!r} is another"
    if len(list(tensors_beside(made))) != len(list(tensors_beside(like))):
        return "its attributes hold different tensors"
    return ""


def _parts(module: nn.Module) -> tuple[list[tuple[str, Any]], ...]:
    """Return, for parameters, buffers and modules, the properties that stay the same if a model is built again."""
    params = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    buffers = [(name, buffer.dtype) for name, buffer in module.named_buffers()]
    return params, buffers, [(path, type(part).__qualname__) for path, part in module.named_modules()]


def _other(numbers: str) -> TrainingError:
    return TrainingError(
        "The callable model= does not build the same model each time.",
        numbers=numbers,
        hint="model=lambda: MyModule(...), with values that do not change",
    )
