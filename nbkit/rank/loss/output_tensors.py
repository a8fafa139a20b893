"""Finds the tensors in a model's output by path, replaces them in a copy, and makes a loss of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def leaves(value: Any) -> dict[str, Tensor]:
    """Return path -> tensor for a tree of mappings, tuples, lists and plain objects.

    Paths look like "logits", "0", "hidden_states.3". A single tensor has the path "".
    """
    return dict(_walk(value, ""))


def with_leaves(value: Any, of: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Return a copy of `value` in which each tensor is replaced by `of(path, tensor)`."""
    if isinstance(value, Tensor):
        return of(path, value)
    if isinstance(value, Mapping):
        # A plain dict would lose features of transformers' outputs, such as output.loss and output[0].
        new: Any = copy.copy(value)
        for key, part in value.items():
            if part is not None:
                new[key] = with_leaves(part, of, _joined(path, key))
        return new
    if isinstance(value, tuple | list):
        parts = [with_leaves(part, of, _joined(path, name)) for name, part in _named(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if _is_plain(value):
        new = copy.copy(value)
        for name, part in vars(value).items():
            object.__setattr__(new, name, with_leaves(part, of, _joined(path, name)))
        return new
    return value


def _walk(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _walk(part, _joined(path, key))
    elif isinstance(value, tuple | list):
        for name, part in _named(value):
            yield from _walk(part, _joined(path, name))
    elif _is_plain(value):
        for name, part in vars(value).items():
            yield from _walk(part, _joined(path, name))


def _named(value: tuple[Any, ...] | list[Any]) -> Iterator[tuple[str, Any]]:
    names = getattr(value, "_fields", None) or map(str, range(len(value)))
    return zip(names, value, strict=True)


def _is_plain(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type | nn.Module) and not callable(value)


def _joined(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def loss_of_outputs(output: Any, target: Any) -> Tensor:
    """Return a loss that depends on all outputs. It is used in the trials of a job without `loss=`.

    A single number may be a loss that the model computes. If that is a mean over rows, its square is not.
    """
    found = [tensor for tensor in leaves(output).values() if tensor.is_floating_point()]
    return sum((tensor.square().mean() if tensor.ndim else tensor for tensor in found), torch.zeros(()))
