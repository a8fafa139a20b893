"""The kind of a call of a module, of which one is run: classes, attributes that are read, shapes."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

import torch
from torch import nn

from nbkit.rank.parallel.proof.calls import key_of
from nbkit.rank.parallel.tensor.proof.capture import Call, Given
from nbkit.rank.torch_private import pytree


def kind_of(module: nn.Module, reads: Mapping[str, Collection[str]], call: Call) -> Hashable:
    """Equal for two calls of which one tells all about the other. reads: path within -> attributes that are read."""
    parts = []
    for path, part in module.named_modules():
        own = tuple((name, key_of(vars(part).get(name))) for name in sorted(reads.get(path, ())))
        params = tuple((name, None if p is None else tuple(p.shape)) for name, p in part._parameters.items())
        buffers = tuple((name, key_of(buffer)) for name, buffer in part._buffers.items())
        hooks = tuple(map(id, (*part._forward_hooks.values(), *part._forward_pre_hooks.values())))
        opaque = id(part) if isinstance(part, torch.jit.ScriptModule) else None
        parts.append((path, type(part), part.training, own, params, buffers, hooks, opaque))
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    places: dict[int, int] = {}
    given = tuple(
        (tuple(leaf.value.shape), leaf.value.dtype, leaf.hangs, places.setdefault(id(leaf), number))
        if isinstance(leaf, Given)
        else key_of(leaf)
        for number, leaf in enumerate(leaves)
    )
    return tuple(parts), given, str(spec), call.training
