"""Calls of the modules of a model: watched while it runs, and keys by which those that compute alike are known."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_SMALL = 1 << 16
"""Tensors of modules with up to so many elements are compared by their values."""


@contextmanager
def watched(
    module: nn.Module,
    enter: Callable[..., Any] | None = None,
    leave: Callable[..., Any] | None = None,
    *,
    names: Iterable[str] | None = None,
) -> Iterator[None]:
    """Inside, each call of a module in `module` begins with enter(name, module, args, kwargs), before all other hooks,
    and ends with leave(name, module, args, kwargs, output); both may return something else to go on with.

    names: of the modules to look at; all by default.
    """
    parts = dict(module.named_modules())
    with ExitStack() as hooks:
        for name in parts if names is None else names:
            if enter is not None:
                hook = functools.partial(enter, name)
                hooks.callback(parts[name].register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
            if leave is not None:
                hooks.callback(
                    parts[name].register_forward_hook(functools.partial(leave, name), with_kwargs=True).remove
                )
        yield


def call_counts(module: nn.Module, call: Callable[[], Any]) -> Counter[str]:
    """How often `call` calls each module in `module`, in the order of the first calls."""
    counts: Counter[str] = Counter()
    with watched(module, lambda name, *_: counts.update([name])):
        call()
    return counts


def key_of(value: Any) -> Hashable:
    """Equal for two values with which a module computes the same; what is not known to be so is told by identity."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(map(key_of, value))
    if isinstance(value, dict):
        return type(value), tuple((key_of(key), key_of(each)) for key, each in value.items())
    if isinstance(value, functools.partial):
        return key_of(value.func), key_of(value.args), key_of(value.keywords)
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_meta:
            return tuple(value.shape), value.dtype, value.item()
        content = (
            hash(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()) if _plain(value) else id(value)
        )
        return tuple(value.shape), value.dtype, content
    return id(value)


def _plain(value: Tensor) -> bool:
    return value.layout == torch.strided and not value.is_meta and 0 < value.numel() <= _SMALL and value.ndim > 0
