"""Plain attributes of modules, which no state_dict has: a switch takes along those that were set while it trained.

A temperature or a dropout rate that a live cell sets, the mode of a frozen part, a number of calls.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

OF_MODULES = frozenset(vars(nn.Module()))
"""What every module has: its mode, hooks, parameters, buffers and parts."""

Plain = int | float | complex | bool | str | bytes | None
Attributes = Mapping[tuple[str, str], Plain]
"""(name of a module, name of an attribute of it) -> its value."""


def plain_attributes(module: nn.Module) -> dict[tuple[str, str], Plain]:
    """Numbers, text and modes of all parts of `module`."""
    return {
        (path, name): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Plain) and (name == "training" or name not in OF_MODULES)
    }


def take_along(old: nn.Module, built: Attributes, new: nn.Module) -> None:
    """Set in `new` what is another in `old` than when that was `built`.

    What a strategy itself has changed, such as the number of heads of a rank, stays what it is in `new`.
    """
    parts = dict(new.named_modules())
    for (path, name), value in plain_attributes(old).items():
        if path in parts and ((path, name) not in built or built[path, name] != value):
            setattr(parts[path], name, value)
