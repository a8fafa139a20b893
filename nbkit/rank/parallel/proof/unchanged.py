"""Running a model to look at it, so that afterwards it is as before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.proof.memory import Memory, memory_of, written_by
from nbkit.rank.parallel.reshard.plain_attributes import OF_MODULES, Plain
from nbkit.rank.rng.seeding import generators_kept
from nbkit.rank.watching_mode import WatchingMode


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Parameters, buffers, gradients, modes, what is frozen and random generators are afterwards as before.

    So are plain attributes of the modules: numbers, text, tensors, and what lists, dicts and sets of them hold.
    Meanwhile HF models keep no cache, and attention is plain.
    """
    buffers = [
        (part, name, b, b.clone()) for part in module.modules() for name, b in part._buffers.items() if b is not None
    ]
    params = [(p, p.requires_grad, p.grad) for p in module.parameters()]
    modes = [(part, part.training) for part in module.modules()]
    cached = torch.is_autocast_cache_enabled()
    configs = {id(c): c for part in module.modules() if getattr(c := getattr(part, "config", None), "use_cache", False)}
    generators = generators_kept([p.device for p, _, _ in params])
    with generators, plain_attention(), _weights_kept(module), _attributes_kept(module):
        for config in configs.values():
            config.use_cache = False  # type: ignore[union-attr]
        for p, _, _ in params:
            p.grad = None
        # A tied weight that autocast casts once would go around the cuts of a pipeline.
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)
            for config in configs.values():
                config.use_cache = True  # type: ignore[union-attr]
            for part, mode in modes:
                part.training = mode
            for p, trained, grad in params:
                p.grad = grad
                if p.requires_grad != trained:
                    p.requires_grad_(trained)
            with torch.no_grad():
                for part, name, buffer, value in buffers:
                    part._buffers[name] = buffer.copy_(value)


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """A forward may count its calls, or keep what it has seen, in attributes that no state_dict has."""
    kept = []
    for part in module.modules():
        plain = {name: value for name, value in vars(part).items() if name not in OF_MODULES and _is_plain(value)}
        kept.append((part, plain, {name: _copy(value) for name, value in plain.items()}))
    try:
        yield
    finally:
        for part, before, contents in kept:
            now = vars(part)
            for name in [name for name in now if name not in OF_MODULES | before.keys() and _is_plain(now[name])]:
                del now[name]
            for name, value in before.items():
                now[name] = value
                _fill(value, contents[name])


_HOLDERS = (list, dict, set, deque)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (Plain, Tensor, tuple, *_HOLDERS)) and not isinstance(value, nn.Parameter)


def _copy(value: Any) -> Any:
    """What `_fill` needs to make `value` hold again what it holds now; None where it cannot be changed."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else (value._version, value.detach().clone())
    return copy(value) if isinstance(value, _HOLDERS) else None


def _fill(value: Any, content: Any) -> None:
    if isinstance(value, Tensor) and content is not None:
        version, before = content
        if value._version != version:
            value.detach().copy_(before)
    elif isinstance(value, _HOLDERS):
        value.clear()
        value.extend(content) if isinstance(value, list | deque) else value.update(content)


@contextmanager
def _weights_kept(module: nn.Module) -> Iterator[None]:
    """A forward may move weights itself, as the average of a teacher: in place, or by `p.data = ...`."""
    held = [(p, p.detach()) for p in module.parameters()]
    writes = _CopiesBeforeWrites([data for _, data in held])
    try:
        with writes:
            yield
    finally:
        for p, data in held:
            memory = memory_of(data)
            if memory_of(p.detach()) != memory:
                p.data = data
            if (before := writes.copies.get(memory)) is not None:
                data.untyped_storage().copy_(before)


class _CopiesBeforeWrites(WatchingMode):
    """Copies the memory of some tensors when it is first written to; what nobody writes to costs no memory."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._watched = {memory_of(tensor) for tensor in tensors}
        self.copies: dict[Memory, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for tensor in written_by(func, args, kwargs or {}):
                memory = memory_of(tensor)
                if memory in self._watched and memory not in self.copies:
                    self.copies[memory] = tensor.untyped_storage().clone()
        return func(*args, **(kwargs or {}))


@contextmanager
def plain_attention() -> Iterator[None]:
    """nn.TransformerEncoder calls its layers, and those their parts, in evaluation too."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def thaw(module: nn.Module) -> None:
    """Every parameter is trained, within `unchanged`: the graph tells what hangs on frozen ones, too."""
    for p in module.parameters():
        p.requires_grad_(p.is_floating_point() or p.is_complex())
