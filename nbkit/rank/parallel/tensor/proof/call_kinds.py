"""What tells two calls of modules apart, for one of each kind to be run: classes, attributes that are read, shapes."""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nbkit.rank.parallel.tensor.proof.capture import Call, Given

__all__ = ["kind_of"]

_SMALL = 1 << 16
"""Tensors of modules with up to so many elements are compared by their values."""


def kind_of(module: nn.Module, reads: Mapping[str, Collection[str]], call: Call) -> Hashable:
    """Equal for two calls of which one tells all about the other. reads: path within -> attributes that are read."""
    parts = []
    for path, part in module.named_modules():
        own = tuple((name, _key(vars(part).get(name))) for name in sorted(reads.get(path, ())))
        params = tuple((name, None if p is None else tuple(p.shape)) for name, p in part._parameters.items())
        buffers = tuple((name, _key(buffer)) for name, buffer in part._buffers.items())
        hooks = tuple(map(id, (*part._forward_hooks.values(), *part._forward_pre_hooks.values())))
        opaque = id(part) if isinstance(part, torch.jit.ScriptModule) else None
        parts.append((path, type(part), part.training, own, params, buffers, hooks, opaque))
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    places: dict[int, int] = {}
    given = tuple(
        (tuple(leaf.value.shape), leaf.value.dtype, leaf.hangs, places.setdefault(id(leaf), number))
        if isinstance(leaf, Given)
        else _key(leaf)
        for number, leaf in enumerate(leaves)
    )
    return tuple(parts), given, str(spec), call.training


def _key(value: Any) -> Hashable:
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_key, value))
    if isinstance(value, functools.partial):
        return _key(value.func), _key(value.args), _key(tuple(sorted(value.keywords.items())))
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
