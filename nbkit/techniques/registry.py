"""The keys of a strategy by name.

`__init__.py` adds nbkit's own keys. `register` adds a user's key. A package can offer a key by an entry point in the
group `nbkit.techniques`. Entry points are only read if a strategy has a key that is not known yet.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

from nbkit.errors import StrategyError
from nbkit.plugins import described, load
from nbkit.techniques.axes import DEGREES
from nbkit.techniques.exchange import GradientExchange

if TYPE_CHECKING:
    from nbkit.techniques.key import AnyStrategy, Key

GROUP = "nbkit.techniques"
RESERVED = (*DEGREES, "zero", "shard")
"""Keys that nbkit/strategy.py itself reads."""

_keys: dict[str, Key] = {}
_built_in: list[str] = []


def register(key: Key | type[Key]) -> None:
    """Add a key. Afterwards `ddp NAME=VALUE` is a strategy. Call this on all ranks, and in the notebook.

    key: a subclass of `Key` or `GradientKey`, or an instance of such a class.

    A second call with the same name replaces the key. nbkit's own keys cannot be replaced.
    """
    from nbkit.techniques.key import GradientKey, Key

    made = key() if isinstance(key, type) else key
    if not isinstance(made, Key):
        raise StrategyError(
            "A key must derive from Key or GradientKey.",
            numbers=repr(key),
            hint="class Mine(nbkit.techniques.GradientKey):",
        )
    name = getattr(made, "name", "")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise StrategyError(
            f"{name!r} cannot be the name of a key.",
            numbers="a lower-case letter, then lower-case letters, digits and _",
            hint="name = 'mine'",
        )
    if name in (*RESERVED, *_built_in):
        raise StrategyError(
            f"The key {name!r} is one of nbkit's own.",
            numbers=f"keys: {' '.join([*RESERVED, *_keys])}",
            hint=f"name = 'my_{name}'",
        )
    whole = isinstance(made, GradientKey) and made.needs_whole
    if engine_place(made) is not None and not whole:
        raise StrategyError(
            f"nbkit would not call the torch half of the key {name!r} under zero1 to zero3.",
            numbers=f"engine={made.engine!r}, and the key is no GradientKey with needs_whole = True",
            hint="class Mine(nbkit.techniques.GradientKey):   with needs_whole = True, its default",
        )
    if type(made).parse is Key.parse:
        raise StrategyError(
            f"The key {name!r} cannot read its value.",
            numbers="it has no parse",
            hint="def parse(self, text): return text",
        )
    if whole and engine_place(made) is None:
        raise StrategyError(
            f"The key {name!r} has no torch half, so it would change nothing.",
            numbers="engine is None",
            hint="engine = 'my_package.on_ranks:apply';   or needs_whole = False, if it needs none",
        )
    add(made)


def add(key: Key, *, built_in: bool = False) -> None:
    """Add a key without a check: it was checked where it was registered."""
    _keys[key.name] = key
    if built_in:
        _built_in.append(key.name)


def keys() -> Sequence[Key]:
    """Return the known keys, nbkit's own first, in the order in which a strategy is written."""
    return tuple(_keys.values())


def names() -> tuple[str, ...]:
    """Return the names of the known keys."""
    return tuple(_keys)


def registered() -> list[Key]:
    """Return the keys that users have registered, or for which they have a class. A new rank needs them too."""
    return [key for name, key in _keys.items() if name not in _built_in or getattr(key, "classes", None)]


def is_key(name: str) -> bool:
    """Return True if there is a key of that name, here or in an installed package."""
    if name not in _keys and name not in RESERVED:
        _register_installed()
    return name in _keys


def key_of(name: str) -> Key:
    """Return the key of that name. Raises StrategyError if there is none."""
    if not is_key(name):
        raise StrategyError(
            f"{name!r} is not a key.",
            numbers=f"keys: {' '.join([*RESERVED, *_keys])}",
            hint="nbkit.techniques.register(...), on all ranks and in the notebook: %%distributed --here",
        )
    return _keys[name]


def spelled(settings: Mapping[str, Any]) -> str:
    """Return the words of `settings`, in the order of the keys."""
    return " ".join(key.word(settings[name]) for name, key in _keys.items() if name in settings)


def exchange_of(strategy: AnyStrategy) -> GradientExchange:
    """Return how the ranks of `strategy` exchange gradients."""
    found = GradientExchange()
    for name, value in strategy.settings.items():
        found = key_of(name).exchange(value, found, strategy)
    return found


def parsed(key: Key, text: str) -> Any:
    """Return the value of a key in a strategy. Raises StrategyError for a text that the key cannot parse.

    It also raises StrategyError if the key cannot parse its own spelling: strategies are stored and sent as text.
    """
    try:
        value = key.parse(text)
        hash(value)
        if value == key.neutral:
            return value
        word = key.spell(value)
        again = key.parse(word.lower())
    except StrategyError:
        raise
    except Exception as error:
        raise StrategyError(
            f"{key.name}={text} cannot be read.",
            numbers=described(error),
            hint="raise StrategyError(...) in parse for a wrong text; the value must be hashable",
        ) from error
    if again != value or word.split() != [word]:
        raise StrategyError(
            f"The method parse of the key {key.name!r} cannot read what its method spell writes.",
            numbers=f"parse({text!r}) is {value!r}, its spell is {word!r}, and parse({word.lower()!r}) is {again!r}",
            hint="def spell(self, value): a text without spaces, from which parse makes the same value",
        )
    return value


def engine_place(key: Key) -> Callable[..., Any] | str | None:
    """Return the torch half of a key as the class defines it: a function, or the place of a function."""
    # `key.engine` would turn a function in the class into a method.
    engine = inspect.getattr_static(key, "engine")
    return engine.__func__ if isinstance(engine, staticmethod) else engine


def engine_of(key: Key) -> Callable[..., Any] | None:
    """Return the torch half of a key. Import it if the key has only its place. Return None if there is none.

    Raises StrategyError if it cannot be imported.
    """
    engine = engine_place(key)
    if not isinstance(engine, str):
        return engine
    module, _, name = engine.partition(":")
    try:
        return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise StrategyError(
            f"The torch half of the key {key.name!r} cannot be imported.",
            numbers=f"engine = {engine!r}: {type(error).__name__}: {error}",
            hint="engine = 'my_package.my_module:apply'",
        ) from error


@dataclass(frozen=True)
class Settings(Mapping[str, Any]):
    """Values of keys by name, without neutral values, in the order of the keys. It is hashable."""

    pairs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """Return `values` without neutral values. Raises StrategyError for a name that no key has."""
        if isinstance(values, cls):
            return values
        given = {name: value for name, value in values.items() if value != key_of(name).neutral}
        return cls(tuple((name, given[name]) for name in names() if name in given))

    def __repr__(self) -> str:
        return repr(dict(self.pairs))

    def __getitem__(self, name: str) -> Any:
        return dict(self.pairs)[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)


@cache
def _register_installed() -> None:
    """Register the keys of installed packages, once in a process."""
    for entry in entry_points(group=GROUP):
        register(load(entry, "key", StrategyError))
