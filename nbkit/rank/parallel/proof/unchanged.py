"""Run a model in order to examine it, and restore its state.

Meanwhile, the random numbers that the model draws itself are noted, and its dropout drops nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nbkit.rank.parallel.proof.observe import Memory, memory_of, written_by
from nbkit.rank.parallel.reshard.plain_attributes import OF_MODULES, Plain
from nbkit.rank.rng.random_ops import DRAWS, AttentionMask
from nbkit.rank.rng.seeding import generators_kept
from nbkit.rank.watching_mode import WatchingMode


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore parameters, buffers, gradients, modes, requires_grad and random generators at the end of this context.

    Also restore plain attributes of the modules: numbers, strings, tensors, and lists, dicts and sets of them. Restore
    hooks, and remove what a forward registers. A library may install hooks in the first forward, and note this in an
    attribute. It will then do so again in training. Inside the context, HF models keep no cache, and attention is
    plain.
    """
    buffers = [
        (part, name, b, b.clone()) for part in module.modules() for name, b in part._buffers.items() if b is not None
    ]
    params = [(p, p.requires_grad, p.grad) for p in module.parameters()]
    modes = [(part, part.training) for part in module.modules()]
    cached = torch.is_autocast_cache_enabled()
    configs = {id(c): c for part in module.modules() if getattr(c := getattr(part, "config", None), "use_cache", False)}
    generators = generators_kept([p.device for p, _, _ in params])
    with generators, plain_attention(), _weights_kept(module), attributes_kept(module):
        for config in configs.values():
            config.use_cache = False  # type: ignore[union-attr]
        for p, _, _ in params:
            p.grad = None
        # Otherwise autocast would cast a tied weight once, and the result would bypass the cuts of a pipeline.
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
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restore what a forward changes besides weights and buffers: attributes, hooks, and registered names.

    A forward may count its calls, store what it has seen, or install hooks. None of these are in a state_dict.
    """
    kept = []
    for part in module.modules():
        held = vars(part)
        plain = {name: value for name, value in held.items() if name not in OF_MODULES and _is_plain(value)}
        own = {name: value for name, value in held.items() if name in OF_MODULES and isinstance(value, dict | set)}
        kept.append((part, plain, own, {name: _copy(value) for name, value in (plain | own).items()}))
    try:
        yield
    finally:
        for part, before, own, contents in kept:
            now = vars(part)
            for name in [name for name in now if name not in OF_MODULES | before.keys() and _is_plain(now[name])]:
                del now[name]
            for name, value in before.items():
                now[name] = value
                _fill(value, contents[name])
            for name, value in own.items():
                now[name] = value
                if name in _REGISTERED:
                    # A registered name may refer to another tensor by now. The code that put it there restores it.
                    for new in [key for key in value if key not in contents[name]]:
                        del value[new]  # type: ignore[union-attr]
                else:
                    _fill(value, contents[name])


_HOLDERS = (list, dict, set, deque)
_REGISTERED = {"_parameters", "_buffers", "_modules"}


def _is_plain(value: Any) -> bool:
    return isinstance(value, (Plain, Tensor, tuple, *_HOLDERS)) and not isinstance(value, nn.Parameter)


def _copy(value: Any) -> Any:
    """Return what `_fill` needs to restore the current contents of `value`, or None if it cannot be changed."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else (value._version, value.detach().clone())
    if isinstance(value, dict):
        return dict(value.items())
    return list(value) if isinstance(value, _HOLDERS) else None


def _fill(value: Any, content: Any) -> None:
    """Restore the contents of `value` from `content`.

    Do not write if nothing has changed: `value` may be frozen, like a config of diffusers.
    """
    if isinstance(value, Tensor):
        if content is not None and value._version != content[0]:
            value.detach().copy_(content[1])
    elif isinstance(value, dict):
        if not (_same(value, content) and _same(value.values(), content.values())):
            kind = OrderedDict if isinstance(value, OrderedDict) else dict
            kind.clear(value)
            for key, held in content.items():
                kind.__setitem__(value, key, held)
    elif isinstance(value, _HOLDERS) and not _same(value, content):
        value.clear()
        value.update(content) if isinstance(value, set) else value.extend(content)  # type: ignore[union-attr]


def _same(now: Collection[Any], before: Collection[Any]) -> bool:
    """Return True if both hold the same objects, in the same order."""
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


@contextmanager
def _weights_kept(module: nn.Module) -> Iterator[None]:
    """Restore weights that a forward itself changes, as for a teacher's average: in place, or by `p.data = ...`."""
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
    """Copies the memory of some tensors before the first write to it. Memory that is not written to costs nothing."""

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
    """Make nn.TransformerEncoder call its layers, and these their parts, in evaluation too."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def set_evaluation(module: nn.Module) -> None:
    """Set every part to evaluation mode, inside `unchanged`. The model's own `train()`, which may merge, is not
    called."""
    for part in module.modules():
        part.training = False


def thaw(module: nn.Module) -> None:
    """Make all parameters trainable, inside `unchanged`, so that the graph also shows what depends on frozen ones."""
    for p in module.parameters():
        p.requires_grad_(p.is_floating_point() or p.is_complex())


class Draws(WatchingMode):
    """Adds every operation that draws random numbers to `found`, a list that several objects may share.

    Attention does not count, because it draws only for dropout.
    """

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.__name__:
            self.found.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


class DroppingNothing(TorchFunctionMode):
    """Makes dropout scale as usual but drop no element, so that a model can be compared with itself in training."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draw = DRAWS.get(func)
        if draw is None:
            return func(*args, **(kwargs or {}))
        device = next((x.device for x in args if isinstance(x, Tensor)), None)
        return draw(func, _Nothing(device), *args, **(kwargs or {}))


class _Nothing(AttentionMask):
    """A mask on `device` that drops nothing. Attention must not leave dropout to its kernel."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    def __call__(self, shape: Sequence[int], p: float, /) -> Tensor:
        return torch.zeros(tuple(shape), dtype=torch.bool, device=self.device)

    def in_kernel(self, device: torch.device) -> None:
        return None
