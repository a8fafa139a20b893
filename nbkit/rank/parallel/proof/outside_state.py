"""State outside parameters, buffers and inputs that a forward pass or a loss changes and reads.

Examples are a hidden state or a memory in an attribute, a counter in a global variable, and a list in a closure. Such
state is in no state_dict, and is never sent. `OutsideState` remembers all such state that user code can reach, reports
what has changed, and restores it. `find_outside` runs the model to see whether the changes make a difference.
"""

from __future__ import annotations

import argparse
import array
import contextvars
import copy
import functools
import inspect
import io
import itertools
import os
import queue
import random
import sys
import threading
import types
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.proof.observe import tensors_in
from nbkit.rank.parallel.reshard.plain_attributes import OF_MODULES, is_own
from nbkit.rank.torch_private import tree_leaves

_LIBRARIES = frozenset({"torch", "numpy", "nbkit", "builtins", *sys.stdlib_module_names}) - {"__main__"}
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_HOLDERS = (
    types.SimpleNamespace,
    argparse.Namespace,
    UserDict,
    UserList,
    threading.local,
    threading.Event,
    queue.Queue,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
)
"""Library classes whose objects contain values of the user's program."""
_CACHED = type(functools.lru_cache(lambda: None))
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type, types.ModuleType)
_MOST, _LONG, _COPIED = 5000, 256, 1 << 24  # limits: places; elements of one place; elements of all tensors

_HOOKS = frozenset(key for key in OF_MODULES if "hooks" in key and isinstance(vars(nn.Module())[key], dict))
_ITERATORS = ("builtins", "itertools", "_csv")
"""Modules whose iterators have a position that cannot be read or restored."""
_OF_GENERATORS = {"send", "throw", "close", "gi_frame", "gi_running"}

Slots = dict[Any, Any]


@dataclass(frozen=True)
class OutsideUse:
    """The state outside of a model that a forward pass or a loss changes and reads.

    names: names of the places. by_rows: the new state depends on the rows. per_row: the state has a part for each row.
    tensors: the state is more than a number. attributes: (name of a module, name of its attribute) of the places that
    are module attributes. on_tensors: names of the places that are attributes of parameters and buffers, or inside one.
    unseen: difference between a second pass and the first, if no visible state explains it; `names` are then guesses.
    drawn: the places are only the user's random generators. keyed: names of the places that have the model itself, or
    one of its tensors, as a key; a switch replaces these objects.
    """

    names: tuple[str, ...]
    by_rows: bool
    per_row: bool
    tensors: bool
    attributes: frozenset[tuple[str, str]] = frozenset()
    on_tensors: tuple[str, ...] = ()
    unseen: float = 0.0
    drawn: bool = False
    keyed: tuple[str, ...] = ()

    def parted(self, module: nn.Module) -> tuple[dict[str, Any], list[str]]:
        """Return the numbers and strings in attributes of `module`, by name, and the names of all other places."""
        parts = dict(module.named_modules())
        plain = {
            f"{path}.{name}" if path else name: vars(parts[path])[name]
            for path, name in sorted(self.attributes)
            if path in parts and isinstance(vars(parts[path]).get(name), int | float | str)
        }
        return plain, [name for name in self.names if name not in plain]

    @property
    def spelled(self) -> str:
        """Return the first names as text."""
        return f"{', '.join(map(repr, self.names[:3]))}{', ...' * (len(self.names) > 3)}"


@dataclass(frozen=True)
class _Numpy:
    """The state of a numpy generator."""

    state: Any


class _Replayed:
    """Replaces an iterator that user code advances. It returns the same items, and can be copied.

    Each copy continues independently from the same position. Items that all copies have read are freed.
    """

    __slots__ = ("_from", "_items", "_place")

    def __init__(self, items: Any, source: object, place: int) -> None:
        self._items, self._from, self._place = items, source, place

    @classmethod
    def of(cls, iterator: Iterator[Any]) -> _Replayed:
        """Return a replacement for `iterator`, which nothing else may advance from now on."""
        return cls(itertools.tee(iterator, 1)[0], iterator, 0)

    def __iter__(self) -> _Replayed:
        return self

    def __next__(self) -> Any:
        found = next(self._items)
        self._place += 1
        return found

    def __copy__(self) -> _Replayed:
        return _Replayed(copy.copy(self._items), self._from, self._place)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Replayed:
        memo[id(self)] = copied = self.__copy__()
        return copied

    def go_to(self, other: _Replayed) -> None:
        """Continue from the position of `other`."""
        self._items, self._from, self._place = copy.copy(other._items), other._from, other._place

    def stands_as(self, other: _Replayed) -> bool:
        """Return True if `other` has the same source and position."""
        return self._from is other._from and self._place == other._place


@dataclass
class _Place:
    """Something that holds values.

    before: its first values, by key. path: path of the module whose attributes they are. draws: it is a random
    generator. The search for draws reports it (rng/draw_plan.py), and it is not state to carry over. cache: it is the
    cache of a function, keyed by arguments such as the model. hooks: it is the hooks of modules. They are restored
    together with the flags that a lazy model sets when it installs them, and are not state themselves.
    """

    name: str
    read: Callable[[], Slots]
    write: Callable[[Slots], None]
    before: Slots
    path: str | None = None
    draws: bool = False
    cache: bool = False
    hooks: bool = False


@dataclass(frozen=True)
class OutsideSnapshot:
    """The values of everything that an OutsideState watches, at one moment."""

    slots: Sequence[Slots]
    contents: Sequence[Tensor | None]


class OutsideState:
    """The state that `module` and `functions` can reach, at the time when this object was created."""

    def __init__(self, module: nn.Module, *functions: Any) -> None:
        self._places: list[_Place] = []
        self._tensors: list[tuple[str, Tensor, int, Tensor | None]] = []
        self._seen: dict[int, Any] = {}  # by id; keeps the objects alive, so that ids stay unique
        self._generators: list[tuple[_Place, Any]] = []
        self._called: set[str] = set()  # names in the code that was searched
        self.unkept: list[str] = []  # iterators and generators that cannot be restored
        self._module = module
        self._own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for tensor in self._own.values():
            self._seen[id(tensor)] = tensor
        self._most, self._room = len(self._seen) + _MOST, _COPIED
        self._modules(type(module).__name__, module, top=True)
        self._attributes_of_tensors()
        for function in functions:
            self._visit(getattr(function, "__name__", type(function).__name__), function)
        for place, key in self._generators:
            value = place.read().get(key)
            if isinstance(value, types.GeneratorType):
                self._replay(place, key, value, here=not self._called & _OF_GENERATORS)

    def changes(self) -> dict[str, Any]:
        """Return name -> current value of every place whose value has changed."""
        found: dict[str, Any] = {}
        for place in self._places:
            if place.draws or place.hooks:
                continue
            now = place.read()
            for key in place.before.keys() | now.keys():
                if not _same(place.before.get(key), now.get(key)):
                    found[_spelled(place.name, key)] = now.get(key)
        for name, tensor, version, _ in self._tensors:
            if tensor._version != version:
                found.setdefault(name, tensor)
        return found

    def attributes(self, names: Sequence[str]) -> frozenset[tuple[str, str]]:
        """Return the `names` that are attributes of the model's modules, as (path, attribute)."""
        own = {_spelled(place.name, key): (place.path, str(key)) for place in self._places for key in place.read()}
        found = ((name, own.get(name)) for name in names)
        return frozenset((at[0], at[1]) for _, at in found if at is not None and at[0] is not None)

    def drawn(self) -> list[str]:
        """Return the names of the random generators that were used."""
        return [place.name for place in self._places if place.draws and not _same(place.before[""], place.read()[""])]

    def advanced(self) -> bool:
        """Return True if an iterator has advanced. The effect of this may show only much later."""
        return any(
            isinstance(value, _Replayed) and not _same(place.before.get(key), value)
            for place in self._places
            for key, value in place.read().items()
        )

    def keyed(self) -> tuple[str, ...]:
        """Return the names of changed places that have the model itself, or one of its tensors, as a key."""
        own = {id(self._module), *map(id, self._own.values())}
        found = [
            _spelled(place.name, key)
            for place in self._places
            for key, value in place.read().items()
            if not _same(place.before.get(key), value) and any(map(own.__contains__, _keys(key)))
        ]
        return tuple(found)

    def caches(self) -> tuple[str, ...]:
        """Return the names of the functions whose caches were filled."""
        return tuple(place.name for place in self._places if place.cache and place.before != place.read())

    def on_tensors(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the `names` that are attributes of the model's parameters and buffers, or inside one."""
        return tuple(
            name for name in names if any(name[:at] in self._own for at, letter in enumerate(name) if letter == ".")
        )

    def draw_again(self) -> None:
        """Reset every random generator to its state when this object was created."""
        for place in self._places:
            if place.draws:
                place.write(place.before)

    def put_back(self) -> None:
        """Restore all values."""
        self.put(OutsideSnapshot([place.before for place in self._places], [content for *_, content in self._tensors]))

    def held(self) -> OutsideSnapshot:
        """Return the current values, for `put`."""
        slots = [place.read() for place in self._places]
        return OutsideSnapshot(
            slots, [None if kept is None else tensor.detach().clone() for _, tensor, _, kept in self._tensors]
        )

    def put(self, held: OutsideSnapshot) -> None:
        """Restore the values in `held`."""
        for place, slots in zip(self._places, held.slots, strict=True):
            now = place.read()
            if now.keys() != slots.keys() or any(not _stays(now[key], slots[key]) for key in now):
                place.write(slots)
        with torch.no_grad():
            for (_, tensor, version, _), content in zip(self._tensors, held.contents, strict=True):
                if tensor._version != version and content is not None:
                    tensor.detach().copy_(content)

    def readings(self) -> Callable[[], dict[str, Any]]:
        """Return a function that reads the current numbers, texts and versions of tensors, by name. It keeps no copies.

        Random generators and containers of more than 256 values are left out.
        """
        reads = [
            (place.name, place.read)
            for place in self._places
            if not (place.draws or place.hooks or place.cache) and len(place.before) <= _LONG
        ]

        def read() -> dict[str, Any]:
            found: dict[str, Any] = {}
            for name, slots in reads:
                for key, value in slots().items():
                    if isinstance(value, _PLAIN):
                        found[_spelled(name, key)] = value
                    elif isinstance(value, Tensor) and not value.is_inference():
                        found[_spelled(name, key)] = (id(value), value._version)
            return found

        return read

    def set_numbers(self) -> dict[tuple[str, str], Callable[[], None]]:
        """Return the numbers and strings that a pass set in module attributes. A switch carries only these over.

        The result maps (path, attribute) to a function that sets the value again.
        """
        found: dict[tuple[str, str], Callable[[], None]] = {}
        for place in self._places:
            for key, now in place.read().items() if place.path is not None else ():
                if isinstance(now, _PLAIN) and not _same(place.before.get(key, self), now):
                    found[place.path or "", str(key)] = functools.partial(_set, place, key, now)
        return found

    def set_values(self) -> Iterator[tuple[str, Callable[[float], None]]]:
        """Yield each float and tensor that a pass has set: its name, and a function that fills it with a number."""
        for place in self._places:
            for key, now in place.read().items():
                tensor = isinstance(now, Tensor) and now.is_floating_point()
                if (tensor or type(now) is float) and not _same(place.before.get(key, self), now):
                    yield _spelled(place.name, key), functools.partial(_fill_with, place, key, now)

    def numbers(self) -> Iterator[Callable[[float], None]]:
        """Yield, for every changed number and every tensor that was changed in place, a function that adds to it."""
        for place in self._places:
            now = place.read()
            for key, value in now.items():
                if type(value) in (int, float) and not _same(place.before.get(key), value):
                    yield functools.partial(_add, place, key)
        for _, tensor, version, kept in self._tensors:
            if tensor._version != version and kept is not None and tensor.dtype != torch.bool:
                yield functools.partial(_add_to, tensor)

    @contextmanager
    def other_weights(self) -> Iterator[None]:
        """Use other parameters, computed from the current ones, inside this context. Parameters and buffers are
        restored."""
        params = [p.detach() for p in self._module.parameters() if p.is_floating_point() or p.is_complex()]
        # Skip tensors with overlapping memory (see `window` in copies.py), because they cannot be written to.
        params = [p for p in params if p.untyped_storage().nbytes() >= p.numel() * p.element_size()]
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        with torch.no_grad():
            for p in params:
                p.mul_(-2).copy_(p.flip([*range(p.ndim)]))
            try:
                yield
            finally:
                for p in reversed(params):
                    p.copy_(p.flip([*range(p.ndim)])).mul_(-0.5)
                for buffer, content in buffers:
                    buffer.copy_(content)

    def _modules(self, name: str, module: nn.Module, *, top: bool = False) -> None:
        self._hooks([part for part in module.modules() if id(part) not in self._seen])
        for path, part in module.named_modules():
            if id(part) in self._seen:
                continue
            self._seen[id(part)] = part
            label = path if top else f"{name}.{path}" if path else name
            self._namespace(label, vars(part), lambda key: key not in OF_MODULES, path=path if top else None)
            if not top:
                for key, tensor in (*part._buffers.items(), *part._parameters.items()):
                    self._visit(_spelled(label, key), tensor)
            self._class(type(part))

    def _hooks(self, parts: Sequence[nn.Module]) -> None:
        """Watch the hooks of `parts`, except nbkit's, which are installed and removed with the code that needs them."""
        held = [hooks for part in parts for key, hooks in vars(part).items() if key in _HOOKS]

        def read() -> Slots:
            own = {key for hooks in held for key, hook in hooks.items() if is_own(hook)}
            return {(at, key): hook for at, hooks in enumerate(held) for key, hook in hooks.items() if key not in own}

        def write(slots: Slots) -> None:
            for at, key in read().keys() - slots.keys():
                del held[at][key]
            for (at, key), hook in slots.items():
                held[at][key] = hook

        self._places.append(_Place("", read, write, read(), hooks=True))

    def _attributes_of_tensors(self) -> None:
        """Watch attributes of the model's own tensors, such as `self.weight.calls = 1`, set before or in a pass."""
        own = self._own

        def read() -> Slots:
            return {f"{name}.{key}": value for name, each in own.items() for key, value in each.__dict__.items()}

        def write(slots: Slots) -> None:
            for name, each in own.items():
                for key in [key for key in each.__dict__ if f"{name}.{key}" not in slots]:
                    del each.__dict__[key]
            for at, value in slots.items():
                name, _, key = at.rpartition(".")
                own[name].__dict__[key] = value

        self._place("", read, write)

    def _visit(self, name: str, value: Any) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen or len(self._seen) > self._most:
            return
        if isinstance(value, nn.Module):
            self._modules(name, value)
            return
        if isinstance(value, type):
            self._class(value)
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            if not value.is_inference() and _has_memory(value):
                kept = value.detach().clone() if value.numel() <= self._room else None
                self._room -= 0 if kept is None else kept.numel()
                self._tensors.append((name, value, value._version, kept))
            if value.__dict__:
                self._namespace(name, value.__dict__, lambda _: True)
        elif isinstance(value, dict):
            self._namespace(name, value, lambda _: True)
        elif isinstance(value, list | deque):
            self._sequence(name, value)
        elif isinstance(value, set):
            self._set(name, value)
        elif isinstance(value, tuple):
            for number, each in enumerate(value[:_LONG]):
                self._visit(f"{name}[{number}]", each)
        elif isinstance(value, _Replayed):

            def read() -> Slots:
                return {"": copy.copy(value)}

            self._places.append(_Place(name, read, lambda slots: value.go_to(slots[""]), read()))
        elif isinstance(value, random.Random):
            self._place(name, lambda: {"": value.getstate()}, lambda slots: value.setstate(slots[""]), draws=True)
        elif isinstance(value, torch.Generator):
            self._place(name, lambda: {"": value.get_state()}, lambda slots: value.set_state(slots[""]), draws=True)
        elif type(value).__module__ == "numpy.random.mtrand" and hasattr(value, "set_state"):

            def state() -> Slots:
                return {"": _Numpy(value.get_state())}

            self._place(name, state, lambda slots: value.set_state(slots[""].state), draws=True)
        elif (bits := getattr(value, "bit_generator", None)) is not None:
            self._place(
                name,
                lambda: {"": _Numpy(bits.state)},
                lambda slots: setattr(bits, "state", slots[""].state),
                draws=True,
            )
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, _CACHED):
            self._cache(name, value)
        elif isinstance(value, io.IOBase):
            self._file(name, value)
        elif _is_iterator(value) or isinstance(value, types.GeneratorType):
            self.unkept.append(f"{name!r}, a {type(value).__name__}")  # it cannot be replaced
        elif isinstance(value, types.MethodType):
            self._visit(name, value.__func__)
            self._visit(name, value.__self__)
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            self._visit(name, value.__self__)  # the list of an append, the iterator of a __next__
        elif isinstance(value, functools.partial):
            for each in (value.func, value.args, value.keywords):
                self._visit(name, each)
        elif value is os.environ:
            self._namespace(name, value, lambda _: True)
        elif isinstance(value, contextvars.ContextVar):
            self._variable(name, value)
        elif isinstance(value, bytearray | array.array) or type(value).__module__ == "numpy":
            self._numbers(name, value)
        elif not isinstance(value, types.ModuleType) and (isinstance(value, _HOLDERS) or _is_users(type(value))):
            if isinstance(getattr(value, "__dict__", None), dict):
                self._namespace(name, vars(value), lambda _: True)
            self._slots(name, value)
            self._class(type(value))

    def _numbers(self, name: str, values: Any) -> None:
        """Watch an array that is not a tensor."""
        numpy, kind = sys.modules.get("numpy"), getattr(values, "dtype", None)
        if kind is None:
            self._place(name, lambda: {"": bytes(values)}, lambda slots: _fill(values, slots[""]))
        elif numpy is not None and isinstance(values, numpy.ndarray) and not kind.hasobject:
            if values.size <= self._room and values.flags.writeable:
                self._room -= values.size

                def write(slots: Slots) -> None:
                    values[...] = numpy.frombuffer(slots[""], kind).reshape(values.shape)

                self._place(name, lambda: {"": values.tobytes()}, write)

    def _cache(self, name: str, cached: Any) -> None:
        """Watch the cache of a function. It can be emptied, and is filled again by calls."""
        if isinstance(function := inspect.unwrap(cached), types.FunctionType) and _is_users(function):
            known = [cached.cache_info().misses]

            def read() -> Slots:
                return {"": cached.cache_info().misses - known[0]}

            def write(_: Slots) -> None:
                cached.cache_clear()
                known[0] = 0

            self._places.append(_Place(name, read, write, read(), cache=True))
            self._function(function)

    def _file(self, name: str, file: io.IOBase) -> None:
        """Watch the position in a file."""

        def read() -> Slots:
            try:
                return {"": file.tell()}
            except (OSError, ValueError):  # it is closed, or is a text file that is being iterated
                return {"": None}

        def write(slots: Slots) -> None:
            if slots[""] is not None:
                file.seek(slots[""])

        with suppress(ValueError):
            if file.seekable():
                self._place(name, read, write)

    def _variable(self, name: str, variable: contextvars.ContextVar[Any]) -> None:
        def read() -> Slots:
            try:
                return {"": variable.get()}
            except LookupError:
                return {}

        def write(slots: Slots) -> None:
            for value in slots.values():
                variable.set(value)

        self._place(name, read, write)

    def _slots(self, name: str, value: Any) -> None:
        """Watch the attributes of an object whose class declares `__slots__`."""
        kinds = [vars(base).get("__slots__", ()) for base in type(value).__mro__ if _is_users(base)]
        named = [key for keys in kinds for key in ((keys,) if isinstance(keys, str) else keys) if key[:2] != "__"]

        def write(slots: Slots) -> None:
            for key in named:
                if key in slots:
                    object.__setattr__(value, key, slots[key])
                elif hasattr(value, key):
                    object.__delattr__(value, key)

        if named:
            self._place(name, lambda: {key: getattr(value, key) for key in named if hasattr(value, key)}, write)

    def _namespace(
        self, name: str, values: MutableMapping[Any, Any], has: Callable[[Any], bool], path: str | None = None
    ) -> None:
        def read() -> Slots:
            return {key: value for key, value in values.items() if has(key)}

        def write(slots: Slots) -> None:
            for key in [key for key in values if has(key) and key not in slots]:
                del values[key]
            values.update(slots)

        with suppress(Exception):  # skip an object that cannot be read as a dict
            self._place(name, read, write, path)

    def _sequence(self, name: str, values: Any) -> None:
        def write(slots: Slots) -> None:
            values.clear()
            values.extend(slots.values())

        self._place(name, lambda: dict(enumerate(values)), write)

    def _set(self, name: str, values: set[Any]) -> None:
        def write(slots: Slots) -> None:
            values.clear()
            values.update(slots)

        self._place(name, lambda: dict.fromkeys(values), write)

    def _place(
        self,
        name: str,
        read: Callable[[], Slots],
        write: Callable[[Slots], Any],
        path: str | None = None,
        *,
        draws: bool = False,
    ) -> None:
        now = read()
        self._places.append(place := _Place(name, read, write, now, path, draws))
        for key, value in itertools.islice(now.items(), _LONG):
            if isinstance(value, types.GeneratorType):
                self._generators.append((place, key))  # whether its methods are used is known later
            elif _is_iterator(value):
                self._replay(place, key, value)
            else:
                self._visit(_spelled(name, key), value)

    def _replay(self, place: _Place, key: Any, iterator: Iterator[Any], *, here: bool = True) -> None:
        """Replace `iterator` by one that can be restored."""
        made = self._seen.get(id(iterator))
        if not isinstance(made, tuple):
            made = self._seen[id(iterator)] = iterator, _Replayed.of(iterator) if here else None
        if made[1] is None:
            self.unkept.append(f"{_spelled(place.name, key)!r}, a {type(iterator).__name__}")
            return
        place.before[key] = made[1]
        place.write({**place.read(), key: made[1]})
        self._visit(_spelled(place.name, key), made[1])

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if not _is_users(base) or id(base) in self._seen:
                continue
            self._seen[id(base)] = base
            own = [key for key, value in vars(base).items() if key[:2] != "__" and not _is_code(value)]

            def read(base: type = base, own: Sequence[str] = own) -> Slots:
                return {key: vars(base)[key] for key in own if key in vars(base)}

            def write(slots: Slots, base: type = base) -> None:
                for key, value in slots.items():
                    setattr(base, key, value)

            self._place(base.__name__, read, write)
            for value in list(vars(base).values()):
                function = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
                if isinstance(function, types.FunctionType | _CACHED):
                    self._visit(f"{base.__name__}.{function.__name__}", function)

    def _function(self, function: types.FunctionType) -> None:
        if not _is_users(function) or "-packages" in function.__code__.co_filename:
            return
        names, named = _names(function.__code__), function.__globals__
        self._called |= names
        for name in names & named.keys():
            value = named[name]
            if isinstance(value, types.ModuleType):
                if _is_users(value):
                    self._names(value.__name__, vars(value), names)
                elif value is os and "environ" in names:
                    self._visit("os.environ", os.environ)
            elif _is_code(value):
                self._visit(name, value)
        self._names("", named, names)
        for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=False):
            with suppress(ValueError):  # not filled yet
                self._cell(name, cell)
        for value in (function.__defaults__, function.__kwdefaults__, function.__dict__):
            if value:
                self._visit(function.__name__, value)

    def _names(self, label: str, values: dict[str, Any], names: set[str]) -> None:
        chosen = {name for name in names & values.keys() if not _is_code(values[name])}
        if chosen:
            # Another function may use the same names. Each name is restored to its first value.
            self._namespace(label, values, lambda key: key in chosen)

    def _cell(self, name: str, cell: types.CellType) -> None:
        if not _is_code(cell.cell_contents):
            self._place(name, lambda: {"": cell.cell_contents}, lambda slots: setattr(cell, "cell_contents", slots[""]))
        else:
            self._visit(name, cell.cell_contents)


@contextmanager
def outside_kept(module: nn.Module, *functions: Any) -> Iterator[OutsideState]:
    """Restore the state that `module` and `functions` can reach at the end of this context."""
    state = OutsideState(module, *functions)
    try:
        yield state
    finally:
        state.put_back()


def find_outside(
    forward: Callable[[Sequence[int]], Any], state: OutsideState, *, two: bool = True
) -> OutsideUse | None:
    """Return the state that a pass changes and reads, or None if its changes make no difference.

    forward: called with a list of row indices (0 and 1), returns tensors, which are equal as long as nothing else
    changes. state: the state at this time. two: True if the two rows differ.
    """

    def run(rows: Sequence[int]) -> Any:
        state.draw_again()
        return forward(rows)

    first = _copied(run([0, 1]))
    changes = {name: _copied(value) for name, value in state.changes().items()}
    if not changes:
        return None
    keyed, caches = state.keyed(), state.caches()
    run([1, 0])  # a model that remembers its rows may return the same result for the same rows
    if _equal(first, _copied(run([0, 1]))) and not (state.advanced() or _read(run, state, first)):
        if not _of_weights(run, state):
            return None
        keyed += caches
    unread = _unread(run, state)
    changes = {name: value for name, value in changes.items() if name not in unread} or changes
    state.put_back()
    run([0, 1])
    again = tree_leaves(run([0, 1]))
    parts, halves = [], []
    for row in (0, 1):
        state.put_back()
        run([row])
        parts.append({name: _copied(value) for name, value in state.changes().items() if name in changes})
        halves.append(tree_leaves(run([row])))
    state.put_back()
    same = {
        name
        for name, value in changes.items()
        if two and _equal(parts[0].get(name), parts[1].get(name)) and _equal(parts[0].get(name), value)
    }
    per_row = all(_for_each_row(changes[name], *(part.get(name) for part in parts)) for name in changes.keys() - same)
    if per_row and len(same) < len(changes):
        # Parts for each row may still be used together, for example as a mean.
        per_row = all(_read_by_row(whole, *half) for whole, *half in zip(again, *halves, strict=True))
    large = any(tensor.numel() != 1 for value in changes.values() for tensor in value if isinstance(tensor, Tensor))
    names = sorted(changes)
    attributes, on_tensors = state.attributes(names), state.on_tensors(names)
    return OutsideUse(tuple(names), len(same) < len(changes), per_row, large, attributes, on_tensors, keyed=keyed)


def _read(run: Callable[[Sequence[int]], Any], state: OutsideState, first: Any) -> bool:
    """Return True if larger numbers in the changed places, as after many passes, make a difference."""
    for added in (9, 99, 999):
        state.put_back()
        run([0, 1])
        changed = list(state.numbers())
        for add in changed:  # also numbers that a cache has stored beside them
            add(added)
        if changed and not _repeats(run, first):
            return True
    return False


def _unread(run: Callable[[Sequence[int]], Any], state: OutsideState) -> set[str]:
    """Return the names of floats and tensors that a pass sets and no later pass reads, such as values for a log."""
    state.put_back()
    run([0, 1])
    held, places = state.held(), list(state.set_values())
    later = [_copied(run([0, 1])) for _ in range(2)]  # a value may be read only two passes later

    def make_no_difference(some: list[tuple[str, Callable[[float], None]]]) -> bool:
        for number in (float("nan"), 0.0, 9.0, 999.0):
            state.put(held)
            for _, set_to in some:
                set_to(number)
            if not all(_repeats(run, each) for each in later):
                return False
        return True

    # All at once, because each of many layers may keep a value.
    unread = places if make_no_difference(places) else [place for place in places if make_no_difference([place])]
    return {name for name, _ in unread}


def _of_weights(run: Callable[[Sequence[int]], Any], state: OutsideState) -> bool:
    """Return True if the first pass computes something from the weights, and later passes reuse it for new weights."""
    state.put_back()
    run([0, 1])
    with state.other_weights():
        kept = _copied(run([0, 1]))
        state.put_back()
        made = _copied(run([0, 1]))
    state.put_back()
    finite = all(bool(each.isfinite().all()) for each in (*kept, *made) if isinstance(each, Tensor))
    return finite and not _equal(kept, made)


def find_caches(forward: Callable[[Sequence[int]], Any], state: OutsideState) -> frozenset[tuple[str, str]]:
    """Return the numbers in module attributes that a pass sets to describe objects that it stores beside them.

    An example is the length of a table that the pass has computed. If the number were kept without the table, the model
    would run differently, or not at all. Use this if `find_outside` has found nothing. Each result is (path of the
    module, name of the attribute).
    """

    def run(rows: Sequence[int]) -> Any:
        state.draw_again()
        return forward(rows)

    state.put_back()
    run([0, 1])
    numbers = state.set_numbers()
    if not numbers:
        return frozenset()
    second = _copied(run([0, 1]))

    def runs_with(names: Collection[str]) -> bool:
        state.put_back()
        for (_, name), set_again in numbers.items():
            if name in names:
                set_again()
        return _repeats(run, second)

    names = {name for _, name in numbers}
    if runs_with(names):
        return frozenset()
    alone = {name for name in names if runs_with({name})}
    return frozenset(at for at in numbers if at[1] not in alone)


def _repeats(run: Callable[[Sequence[int]], Any], first: Any) -> bool:
    """Return True if the two rows give `first` again. An error counts as a different result."""
    try:
        return _equal(first, _copied(run([0, 1])))
    except Exception:
        return False


def _fill(values: Any, content: bytes) -> None:
    """Replace the contents of a Python array by `content`."""
    if isinstance(values, bytearray):
        values[:] = content
    else:
        del values[:]
        values.frombytes(content)


def _set(place: _Place, key: Any, value: Any) -> None:
    place.write({**place.read(), key: value})


def _fill_with(place: _Place, key: Any, like: Any, number: float) -> None:
    _set(place, key, torch.full_like(like, number) if isinstance(like, Tensor) else number)


def _add(place: _Place, key: Any, value: float) -> None:
    now = place.read()
    if type(now.get(key)) in (int, float):
        place.write({**now, key: now[key] + value})


def _add_to(tensor: Tensor, value: float) -> None:
    tensor.detach().add_(value)


def _for_each_row(both: Any, first: Any, second: Any) -> bool:
    """Return True if the state after both rows is the concatenation of the states after each row."""
    if first is None or second is None or not len(both) == len(first) == len(second):
        return False
    for whole, *halves in zip(both, first, second, strict=True):
        if not all(isinstance(x, Tensor) for x in (whole, *halves)):
            return False
        if whole.ndim != halves[0].ndim or halves[0].shape != halves[1].shape:
            return False
        dims = [dim for dim in range(whole.ndim) if whole.shape[dim] != halves[0].shape[dim]]
        if len(dims) != 1 or whole.shape[dims[0]] != 2 * halves[0].shape[dims[0]]:
            return False
        if not torch.allclose(whole.double(), torch.cat(halves, dims[0]).double(), rtol=1e-3, atol=1e-6):
            return False
    return True


def _read_by_row(whole: Any, first: Any, second: Any) -> bool:
    """Return True if the output of both rows is the outputs of each row, concatenated, or does not depend on rows."""
    tensors = all(isinstance(value, Tensor) for value in (whole, first, second))
    return not tensors or whole.shape == first.shape or _for_each_row([whole], [first], [second])


def _copied(value: Any) -> list[Any]:
    """Return copies of the tensors and plain values in `value`. For other objects, return their types."""
    found: list[Any] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf.detach().clone())
        elif isinstance(leaf, _PLAIN):
            found.append(leaf)
        else:
            found += [tensor.detach().clone() for tensor in tensors_in(leaf)] or [repr(type(leaf))]
    return found


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None or len(one) != len(other):
        return False
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
        for a, b in zip(one, other, strict=True)
    )


def _is_iterator(value: Any) -> bool:
    known = type(value).__module__ in _ITERATORS and not isinstance(value, types.GeneratorType)
    return known and hasattr(value, "__next__")


def _stays(now: Any, wanted: Any) -> bool:
    """Return True if `now` may be used for `wanted`. Different tensors with a graph are not interchangeable."""
    return now is wanted or (_same(now, wanted) and not (isinstance(wanted, Tensor) and wanted.requires_grad))


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if isinstance(before, _Replayed) and isinstance(now, _Replayed):
        return before.stands_as(now)
    if isinstance(before, float) and isinstance(now, float) and before != before and now != now:
        return True
    if isinstance(before, _Numpy) and isinstance(now, _Numpy):
        return repr(before) == repr(now)
    if isinstance(before, tuple) and isinstance(now, tuple):
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, _PLAIN) or isinstance(now, _PLAIN):
        return type(before) is type(now) and bool(before == now)
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        if not (_has_memory(before) and _has_memory(now)):
            return before.shape == now.shape
        # Compare values, because it may be computed again in each pass, like a cache.
        return before.shape == now.shape and before.dtype == now.dtype and torch.equal(before, now)
    return False


def _has_memory(tensor: Tensor) -> bool:
    """Return True if a tensor can be read. ZeRO 3 frees weights to which an nn.LSTM still refers in a list."""
    return tensor.layout != torch.strided or not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def _spelled(name: str, key: Any) -> str:
    if key == "":
        return name
    if isinstance(key, str):
        return f"{name}.{key}" if name else key
    return f"{name}[{_shown(key)}]"


def _keys(key: Any) -> Iterator[int]:
    """Yield the ids of the objects in a key, and the numbers in it, because they may be ids too."""
    if isinstance(key, weakref.ReferenceType):
        key = key()
    if isinstance(key, tuple):
        for each in key:
            yield from _keys(each)
    elif isinstance(key, int | nn.Module | Tensor):
        yield key if isinstance(key, int) else id(key)


def _shown(key: Any) -> str:
    """Return a short text for a key, which is the same each time."""
    if isinstance(key, weakref.ReferenceType):
        key = key()
    if isinstance(key, tuple):
        return f"({', '.join(map(_shown, key))})"
    return type(key).__name__ if isinstance(key, nn.Module | Tensor) else repr(key)


def _names(code: types.CodeType) -> set[str]:
    found = {*code.co_names}
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            found |= _names(each)
    return found


def _is_code(value: Any) -> bool:
    return isinstance(value, (*_FUNCTIONS, property, classmethod, staticmethod, functools.partial))


def _is_users(what: Any) -> bool:
    """Return True if a class, function or module belongs to the user's program and not to a known library."""
    name = what.__name__ if isinstance(what, types.ModuleType) else getattr(what, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] not in _LIBRARIES


def put_back_before(run: Callable[..., Any], module: nn.Module, *functions: Any) -> Callable[..., Any]:
    """Return `run` wrapped so that each call first restores the state that existed at the first call."""
    states: list[OutsideState] = []

    def again(*args: Any) -> Any:
        if not states:
            states.append(OutsideState(module, *functions))
        states[0].put_back()
        return run(*args)

    return again
