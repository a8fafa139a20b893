"""Plain attributes of modules, which are in no state_dict.

Examples are a temperature or dropout rate that a live cell sets, the mode of a frozen part, or a count of calls. A
switch carries over those that were set during training, and a process that joins the training receives them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module: its mode, hooks, parameters, buffers and parts."""

Plain = int | float | complex | bool | str | bytes | None
Attributes = Mapping[tuple[str, str], Plain]
"""(name of a module, name of its attribute) -> value of the attribute."""


_HOOKS = "_forward_hooks", "_forward_pre_hooks"


_OF_TENSORS = {"param_name", "unit_name", "retired"}  # set by nbkit


def plain_attributes(module: nn.Module) -> dict[tuple[str, str], Plain]:
    """Return the numbers, strings and modes of all parts of `module`, and how many hooks each part has.

    An attribute of a parameter or buffer, as in `self.weight.scale = 2.0`, is named "weight.scale".
    """
    found: dict[tuple[str, str], Plain] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Plain) and (name == "training" or name not in OF_MODULES):
                found[path, name] = value
            elif name in _HOOKS and value:
                found[path, name] = sum(not is_own(hook) for hook in value.values())
        for name, tensor in _tensors(part):
            for key, value in tensor.__dict__.items():
                if isinstance(value, Plain) and key not in _OF_TENSORS:
                    found[path, f"{name}.{key}"] = value
    return found


def _tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of `part` itself that have attributes."""
    for held in (part._parameters, part._buffers):
        for name, tensor in held.items():
            if tensor is not None and tensor.__dict__:
                yield name, tensor


def is_own(hook: Any) -> bool:
    """Return True if a hook belongs to nbkit, not to the user or another library."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("nbkit.")


def _tensor(part: nn.Module, name: str) -> Tensor | None:
    return part._parameters.get(name, part._buffers.get(name))


def take_along(
    old: nn.Module, built: Attributes, new: nn.Module, *, left: Collection[tuple[str, str]] = frozenset()
) -> None:
    """Set in `new` the attributes of `old` that changed since it was `built`, except those in `left`.

    Attributes that a strategy itself changes, such as the number of heads of a rank, keep their value in `new`.
    """
    put({at: value for at, value in set_since(old, built).items() if at not in left}, new)


def take_objects_along(old: nn.Module, new: nn.Module) -> None:
    """Pass the objects and tensors in module attributes of `old` to `new`, with everything in them.

    A model may change and read them while it runs. An object that refers to a part of the model, or to a function, is
    left out, because `new` has its own.
    """
    model = {id(each) for each in (*old.modules(), *old.parameters(), *old.buffers())}
    parts = dict(new.named_modules())
    for path, part in old.named_modules():
        for name, value in vars(part).items() if path in parts else ():
            if name not in OF_MODULES and not _is_fixed(value) and not _holds(value, model, set()):
                parts[path].__dict__[name] = value
        for name, tensor in _tensors(part) if path in parts else ():
            own = _tensor(parts[path], name)
            for key, value in tensor.__dict__.items() if own is not None else ():
                if key not in _OF_TENSORS and not _holds(value, model, set()):
                    own.__dict__[key] = value


def _is_fixed(value: object) -> bool:
    """Return True if `value` is plain, or an object of nbkit, such as one that refuses to copy a part of the weights.

    An iterator of nbkit wraps an iterator of the user, so it is treated like the user's objects.
    """
    kind = type(value)
    return isinstance(value, Plain) or (kind.__module__.startswith("nbkit.") and not hasattr(kind, "__next__"))


def _holds(value: object, model: set[int], seen: set[int]) -> bool:
    """Return True if an object in `model`, or a function, can be reached from `value`."""
    if id(value) in model or isinstance(value, FunctionType | MethodType):
        return True
    if isinstance(value, Plain | Tensor) or id(value) in seen:
        return False
    seen.add(id(value))
    inside = [*value.values()] if isinstance(value, Mapping) else []
    if isinstance(value, list | tuple | set | deque):
        inside += value
    return any(_holds(each, model, seen) for each in (*inside, *getattr(value, "__dict__", {}).values()))


def set_since(module: nn.Module, built: Attributes) -> Attributes:
    """Return the attributes of `module` that changed since it was `built`.

    An attribute that was added together with hooks is left out. It may record that they are installed, like that of
    transformers for collected outputs. Without it, a module installs its hooks in its next forward.
    """
    found = plain_attributes(module)
    hooked = {path for (path, name), value in found.items() if name in _HOOKS and built.get((path, name), 0) != value}
    above = {"", *hooked, *(path[:dot] for path in hooked for dot, letter in enumerate(path) if letter == ".")}
    return {
        at: value
        for at, value in found.items()
        if at[1] not in _HOOKS and not (at not in built and hooked and at[0] in above) and built.get(at, _NONE) != value
    }


_NONE = object()


def put(attributes: Attributes, module: nn.Module) -> None:
    """Set `attributes` in the modules that `module` has."""
    parts = dict(module.named_modules())
    for (path, name), value in attributes.items():
        if path not in parts:
            continue
        tensor, _, key = name.rpartition(".")
        if not tensor:
            setattr(parts[path], name, value)
        elif (own := _tensor(parts[path], tensor)) is not None:
            own.__dict__[key] = value
