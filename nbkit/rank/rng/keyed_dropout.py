"""Dropout that drops the same elements under every strategy.

A draw is known by (seed, step, path of the module, call of the module, draw within the call); an element of it by the
sample's place in the global batch and its own place within the sample (`masks`). No state is consumed, so ranks,
micro-batches, pipeline stages and recomputation agree without a word.

Every draw is intercepted, whoever makes it: nn.Dropout and its kin, F.dropout, the dropout inside of
scaled_dot_product_attention and of nn.MultiheadAttention. What a model draws itself (torch.rand, bernoulli_) is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nbkit.rank.rng.dropout_masks import coordinates, dropped, key_of
from nbkit.rank.rng.dropout_ops import DRAWS, Draw


@dataclass
class _Call:
    """A module that is being called: `number` counts its calls in this pass, `draws` what it drew in this one."""

    path: int
    number: int
    sequence_first: bool
    draws: int = 0


@dataclass
class _Pass:
    """One forward pass of one micro-batch. calls: path -> calls so far. stack: the modules that are being called."""

    key: int
    rows: Tensor
    mode: TorchFunctionMode
    calls: dict[int, int] = field(default_factory=dict)
    stack: list[_Call] = field(default_factory=list)

    def copy(self) -> _Pass:
        return replace(self, calls=dict(self.calls), stack=[replace(call) for call in self.stack])

    def mask(self, shape: Sequence[int], p: float) -> Tensor:
        """Which elements of the next draw are dropped; bool, of `shape`."""
        call = self.stack[-1]
        key = key_of(self.key, call.path, call.number, call.draws)
        call.draws += 1
        places = coordinates(shape, self.rows, sequence_first=call.sequence_first)
        return dropped(key, places, p).view(tuple(shape))


_passing: ContextVar[_Pass | None] = ContextVar("dropout", default=None)


class KeyedDropout:
    """Keys all dropout of `module` (whole, or what one rank holds of it: the paths are what counts).

    A model that cannot drop pays nothing: no p above zero among the dropout modules, and among attributes of modules
    and of their `config` that have "drop" in their name. They are looked at in every step, so that a p may be changed
    while the model trains. A p that is written in the code is found when the first pass uses it.
    """

    def __init__(self, module: nn.Module, seed: int) -> None:
        self.seed = seed
        self._module = module
        self._settings = _settings(module)
        self._found = self._tried = False

    def step(self, step: int, rows: Tensor | Sequence[int]) -> AbstractContextManager[None]:
        """Around a forward pass. step: finished steps. rows: place in the global batch of each sample in it.

        Draws inside need it to be the only source of samples: dim 0 of what is dropped counts them.
        """
        if self._tried and not self._found and not any(_positive(of, name) for of, name in self._settings):
            if _followed(self._module):
                self.release()
            return nullcontext()
        return self._keyed(step, rows)

    @contextmanager
    def _keyed(self, step: int, rows: Tensor | Sequence[int]) -> Iterator[None]:
        if not _followed(self._module):
            _follow(self._module)
        places = torch.as_tensor(rows, dtype=torch.int64).to(self._device(), non_blocking=True)
        mode = _Interception(self)
        # What is drawn outside of every module counts as the root's.
        new = _Pass(key_of(self.seed, step), places, mode, stack=[_Call(0, 0, False)])
        token = _passing.set(new)
        try:
            with mode:
                yield
            self._tried |= self._module.training
        finally:
            _passing.reset(token)

    def release(self) -> None:
        """Take the hooks out of the module, as when it passes to another owner. A later step puts them in again."""
        unfollow(self._module)

    def seen(self) -> None:
        """Something was dropped."""
        self._found = True

    def _device(self) -> torch.device:
        first = next(self._module.parameters(), None)
        return torch.device("cpu") if first is None else first.device


def keyed() -> bool:
    """Whether a pass is under way whose draws are keyed."""
    return _passing.get() is not None


def again() -> Callable[[], AbstractContextManager[None]]:
    """Taken before a part of a forward pass: what to enter, on any thread, when that part is computed once more."""
    now = _passing.get()
    if now is None:
        return nullcontext
    then = now.copy()
    return lambda: _replayed(then.copy())


@contextmanager
def _replayed(then: _Pass) -> Iterator[None]:
    token = _passing.set(then)
    try:
        with then.mode:
            yield
    finally:
        _passing.reset(token)


class _Interception(TorchFunctionMode):
    """Hands what drops to DRAWS, and lets everything else through."""

    def __init__(self, owner: KeyedDropout) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draw: Draw | None = DRAWS.get(func)
        now = _passing.get()
        if draw is None or now is None:
            return func(*args, **(kwargs or {}))
        return draw(func, self._mask, *args, **(kwargs or {}))

    def _mask(self, shape: Sequence[int], p: float) -> Tensor:
        now = _passing.get()
        assert now is not None
        self.owner.seen()
        return now.mask(shape, p)


class _Enter:
    """A module is called: from here on it is the one that draws."""

    def __init__(self, path: str, sequence_first: bool) -> None:
        self.path, self.sequence_first = crc32(path.encode()), sequence_first

    def __call__(self, _: nn.Module, __: Any) -> None:
        if (now := _passing.get()) is not None:
            now.calls[self.path] = number = now.calls.get(self.path, -1) + 1
            now.stack.append(_Call(self.path, number, self.sequence_first))


def _leave(_: nn.Module, __: Any, ___: Any) -> None:
    if (now := _passing.get()) is not None and len(now.stack) > 1:
        now.stack.pop()


def _follow(module: nn.Module) -> None:
    """Hooks by which a pass knows the module that draws. They hold nothing, and are idle outside of a pass."""
    # A copy of a followed module has its hooks, and two on one module would count every call twice.
    unfollow(module)
    sequence_first = tuple(
        f"{path.rpartition('.')[0]}."
        for path, part in module.named_modules()
        if isinstance(part, nn.MultiheadAttention) and not part.batch_first
    )
    for path, part in module.named_modules():
        part.register_forward_pre_hook(_Enter(path, f"{path}.".startswith(sequence_first)), prepend=True)
        # Exceptions leave a module too: a pipeline stage ends by one, and so does a recomputation that has enough.
        part.register_forward_hook(_leave, always_call=True)


def _followed(module: nn.Module) -> bool:
    return any(isinstance(hook, _Enter) for hook in module._forward_pre_hooks.values())


def unfollow(module: nn.Module) -> None:
    """Take the hooks of every KeyedDropout out of `module`."""
    for part in module.modules():
        for number in [n for n, hook in part._forward_pre_hooks.items() if isinstance(hook, _Enter)]:
            del part._forward_pre_hooks[number]
        for number in [n for n, hook in part._forward_hooks.items() if hook is _leave]:
            del part._forward_hooks[number]
            part._forward_hooks_always_called.pop(number, None)


def _settings(module: nn.Module) -> list[tuple[Any, str]]:
    """(object, attribute) of everything that looks like a probability of dropping."""
    found: list[tuple[Any, str]] = []
    configs: dict[int, Any] = {}
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            found.append((part, "p"))
        found += [(part, name) for name in vars(part) if "drop" in name.lower()]
        configs |= {id(config): config for name in ("config", "cfg", "args") if (config := vars(part).get(name))}
    for config in configs.values():
        found += [(config, name) for name in getattr(config, "__dict__", {}) if "drop" in name.lower()]
    return [(of, name) for of, name in found if type(getattr(of, name)) in (int, float)]


def _positive(of: Any, name: str) -> bool:
    value = getattr(of, name, 0)
    return type(value) in (int, float) and value > 0
