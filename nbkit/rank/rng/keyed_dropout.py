"""Dropout and random numbers that are the same under every strategy.

A draw is identified by (seed, step, path of the module, call of the module, draw within the call). An element of a draw
is identified by the sample's place in the global batch and the element's place within the sample (dropout_masks.py). No
generator state is used, so ranks, micro-batches, pipeline stages and recomputation agree without communication.

Every draw is intercepted: nn.Dropout and similar modules, F.dropout, the dropout inside scaled_dot_product_attention
and nn.MultiheadAttention, and the random functions in random_ops.py. A draw either has the rows along dim 0, or is
shared by the whole batch. Python's and numpy's generators are seeded for each call of a module that draws from them,
and restored afterwards. draw_plan.py runs the model to find out which draws are of which kind. Without this run, dim 0
holds rows if it is a multiple of their number.

No fused attention kernel accepts a dropout mask, and unfused attention is too slow for some models. With `fused`, the
kernel draws its own mask. Its seed depends on the draw, the first row and the first head. So the mask is the same if a
step or a part of it is computed again, but it differs between strategies.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from nbkit.errors import TrainingError
from nbkit.rank.data.batch import rows_of
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.proof.observe import watched
from nbkit.rank.rng.draw_plan import DrawPlan, DrawTrace, Elsewhere, Place, place_of, plan_of
from nbkit.rank.rng.dropout_masks import coordinates, dropped, key_of, random_bits
from nbkit.rank.rng.host_generators import Drawn, OtherGenerators, seed_others
from nbkit.rank.rng.random_ops import DRAWS, RANDOM, Draw
from nbkit.rank.torch_private import DropoutNd, graph_task_id


class KeyedNumbers:
    """Random numbers that are a function of a draw's key and of each element's place: see dropout_masks.py.

    begin: shape -> (key, True if the whole batch shares the draw). rows: ids of the samples along dim 0.
    """

    def __init__(self, begin: Callable[[Sequence[int]], tuple[int, bool]], rows: Tensor) -> None:
        self._begin, self._rows = begin, rows

    def uniform(self, like: Tensor) -> Tensor:
        """Return uniform numbers in [0, 1), with the resolution of the dtype of `like`."""
        key, places = self._draw(like)
        return _uniform(key, places, like.dtype).view(like.shape)

    def normal(self, like: Tensor) -> Tensor:
        """Return normal numbers of mean 0 and variance 1, by the formula of Box and Muller (1958)."""
        key, places = self._draw(like)
        wide = torch.promote_types(like.dtype, torch.float32)
        radius = torch.log1p(-_uniform(key_of(key, 1), places, wide)).mul_(-2).sqrt_()
        angle = _uniform(key_of(key, 2), places, wide).mul_(2 * math.pi)
        return radius.mul_(angle.cos_()).view(like.shape)

    def integers(self, like: Tensor, low: int, high: int) -> Tensor:
        """Return int64 numbers in [low, high), for ranges below 2^31."""
        key, places = self._draw(like)
        return (random_bits(key, places) * (high - low) >> 32).add_(low).view(like.shape)

    def _draw(self, like: Tensor) -> tuple[int, list[Tensor]]:
        shape, rows = tuple(like.shape), self._rows.to(like.device)
        key, shared = self._begin(shape)
        if shared:
            shape, rows = (1, *shape), rows.new_tensor([-1])
        places = coordinates(shape, rows)
        # Along a dim of length 1, numbers are broadcast over positions, heads or features, so all parts share them.
        return key, [place if i == 0 or len(place) > 1 else place * 0 for i, place in enumerate(places)]


def _uniform(key: int, places: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    bits = random_bits(key, places)
    if dtype == torch.float64:
        return (bits << 21 | random_bits(key_of(key, 3), places) >> 11).double().mul_(2.0**-53)
    digits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)
    return (bits >> (32 - digits)).float().mul_(2.0**-digits).to(dtype)


_BITS = (1 << 62) - 1


@dataclass
class _Call:
    """A module that is being called. number: distinguishes this call from the module's other calls in the pass.

    draws: the number of draws in this call. hook: the hook that has seen the call; None outside of all modules.
    outside: the generators of Python and numpy before the call, if the call draws from them.
    """

    path: int
    number: int
    sequence_first: bool
    draws: int = 0
    hook: _Enter | None = None
    outside: Drawn | None = None


@dataclass
class _Pass:
    """A forward pass of one micro-batch.

    first: the id of its first row, on the host. calls: (enclosing call, path) -> number of the last call. stack: the
    calls that have begun and not ended, outermost first.
    """

    key: int
    rows: Tensor
    first: int
    mode: TorchFunctionMode
    plan: DrawPlan | None = None
    trace: DrawTrace | None = None
    calls: dict[tuple[int, int], int] = field(default_factory=dict)
    stack: list[_Call] = field(default_factory=list)

    def copy(self) -> _Pass:
        return replace(self, calls=dict(self.calls), stack=[replace(call) for call in self.stack])

    def mask(self, shape: Sequence[int], p: float) -> Tensor:
        """Return a bool mask of `shape`, True for the elements to drop in the next draw."""
        places = coordinates(shape, self.rows, sequence_first=self.stack[-1].sequence_first)
        return dropped(key_of(self.key, *self._next()), places, p).view(tuple(shape))

    def seed(self) -> int:
        """Return the seed of the next draw, for the part of the heads and positions on this rank."""
        starts = [(place_of(kind) or (0, 0))[0] for kind in ("head", "sequence")]
        return key_of(self.key, *self._next(), self.first, *starts)

    def numbers(self, shape: Sequence[int]) -> tuple[int, bool]:
        """Return (key, True if the whole batch shares the draw) for the next draw of random numbers of `shape`."""
        place, length = self._next(), shape[0] if shape else 0
        if self.trace is not None:
            self.trace.lengths[place] = length
        by_shape = not length or length % max(len(self.rows), 1) != 0
        return key_of(self.key, *place), by_shape or (self.plan is not None and place in self.plan.shared)

    def _next(self) -> Place:
        call = self.stack[-1]
        call.draws += 1
        if call.hook is not None:
            call.hook.drew = True
        return call.path, call.number, call.draws - 1


_passing: ContextVar[_Pass | None] = ContextVar("dropout", default=None)


class KeyedDropout:
    """Keys all random draws of `module`, which may be a whole model or a rank's part of it. Only module paths matter.

    A model that draws nothing is not slowed down. Such a model has no p above zero in its dropout modules, or in
    attributes of modules and of their `config` with "drop" in the name. These are checked in every step, so p may
    change during training. A p that is a constant in the code is found when the first pass uses it.
    """

    def __init__(
        self, module: nn.Module, seed: int, plan: DrawPlan | None = None, *, dropping: bool = True, fused: bool = False
    ) -> None:
        """plan: the model's own draws, if known. dropping: False leaves dropout unkeyed. fused: see top of the file."""
        self.seed, self.plan, self.dropping, self.fused = seed, plan, dropping, fused
        self._module = module
        self._settings = _settings(module)
        self._found, self._tried, self._said = plan is not None, False, False

    def step(self, step: int, rows: Tensor | Sequence[int], call: int = 0) -> AbstractContextManager[None]:
        """Key the draws of a forward pass inside this context.

        step: number of finished steps. rows: for each sample of the pass, its place in the global batch. All samples
        must be included, because dim 0 of a dropped tensor is compared with their number. call: counts the passes of
        these rows in the step.
        """
        return nullcontext() if self.idle() else self._keyed(step, rows, call=call)

    @property
    def has_drawn(self) -> bool:
        """Return True if the model has drawn something, or is known to draw something."""
        return self._found

    def idle(self) -> bool:
        """Return True if the model draws nothing with its current settings."""
        if not self._tried or self._found or any(_positive(of, name) for of, name in self._settings):
            return False
        if _followed(self._module):
            self.release()
        return True

    @contextmanager
    def traced(self, rows: int) -> Iterator[DrawTrace]:
        """Record the draws of a forward pass of `rows` rows inside this context."""
        trace, others = DrawTrace(), OtherGenerators()
        names = {crc32(name.encode()): name for name, _ in self._module.named_modules()}

        def where() -> str:
            now = _passing.get()
            return names.get(now.stack[-1].path, "") if now is not None else ""

        def look(module: str) -> None:
            for name, state in others.changed().items():
                trace.hosts.setdefault((name, module), []).append(state)

        def enter(*_: Any) -> None:
            look(where())

        def leave(module: str, *_: Any) -> None:
            look(module)

        with self._keyed(0, range(rows), trace), watched(self._module, enter, leave), Elsewhere(trace, where):
            yield trace

    @contextmanager
    def _keyed(
        self, step: int, rows: Tensor | Sequence[int], trace: DrawTrace | None = None, *, call: int = 0
    ) -> Iterator[None]:
        if not _followed(self._module):
            _follow(self._module)
        replay_checkpoints()
        places = accelerator().send(torch.as_tensor(rows, dtype=torch.int64), self._device())
        mode = _Interception(self)
        # Draws outside of all modules count as draws of the root module.
        first = int(rows[0]) if len(rows) else 0
        key = key_of(self.seed, step, call) if call else key_of(self.seed, step)
        new = _Pass(key, places, first, mode, self.plan, trace, stack=[_Call(0, 0, False)])
        token = _passing.set(new)
        try:
            with mode:
                yield
            self._tried |= self._module.training
        finally:
            _passing.reset(token)

    def release(self) -> None:
        """Remove the hooks from the module, for example when it gets another owner. A later step adds them again."""
        unfollow(self._module)

    def seen(self) -> None:
        """Note that something was drawn."""
        self._found = True

    def say_fused(self) -> None:
        """Warn once, when attention drops for the first time."""
        if not self._said:
            self._said = True
            warnings.warn(
                "torch's fast attention kernel applies the dropout, so its masks change with the strategy. "
                "compute=nbkit.Compute(dropout='keyed') keeps its masks the same, like the masks of all other "
                "dropout, but does not use that kernel",
                stacklevel=2,
            )

    def _device(self) -> torch.device:
        first = next(self._module.parameters(), None)
        return torch.device("cpu") if first is None else first.device


def find_draws(module: nn.Module, run: Callable[[int], Any]) -> DrawPlan | None:
    """Return the draws that `module` makes itself in training; None if there are none.

    run: runs the module on a number of rows. It is called with 2, and then with 3 if the model draws. It changes the
    module's state and the random generators.
    """
    keyed, traces = KeyedDropout(module, 0), list[DrawTrace]()
    try:
        for rows in (2, 3):
            seed_others(0)  # so that states of Python's and numpy's generators can be compared
            with torch.no_grad(), keyed.traced(rows) as trace:
                run(rows)
            traces.append(trace)
            if not trace.lengths and not trace.unkeyed and not trace.hosts:
                return None
    finally:
        keyed.release()
    return plan_of(*traces)


@contextmanager
def repeating(module: nn.Module, plan: DrawPlan | None, batch: Any) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Yield a function that runs a forward pass on `batch` in a proof, with equal draws in every run.

    Dropout is not changed. plan: None if the model draws nothing. Then the pass runs without keys.
    """
    if plan is None:
        yield lambda run: run()
        return
    keyed, rows = KeyedDropout(module, 0, plan, dropping=False), range(rows_of(batch))

    def drawing(run: Callable[[], Any]) -> Any:
        with keyed.step(0, rows):
            return run()

    try:
        yield drawing
    finally:
        keyed.release()


def redrawing(part: nn.Module, batch: Sequence[Any]) -> AbstractContextManager[None]:
    """Make a part of a model draw the same numbers each time when it runs by itself inside `repeating`.

    batch: the inputs of the part. Dim 0 of the first tensor gives the number of rows.
    """
    first = next((x for x in batch if isinstance(x, Tensor) and x.ndim), None)
    if first is None or not _followed(part):
        return nullcontext()
    return KeyedDropout(part, 0, DrawPlan(), dropping=False).step(0, range(len(first)))


def keyed() -> bool:
    """Return True inside a pass whose draws are keyed."""
    return _passing.get() is not None


def again() -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes a context in which a part of the forward pass can be recomputed, on any thread.

    Call this before that part of the forward pass.
    """
    now = _passing.get()
    if now is None:
        return nullcontext
    then = now.copy()
    return lambda: _replayed(then.copy())


@cache
def replay_checkpoints() -> None:
    """Make recomputation by a model's own torch.utils.checkpoint draw the same numbers as the keyed pass.

    This changes torch for the life of the process. Models import `checkpoint` under names of their own, so this
    replaces the functions that `checkpoint` calls.
    """
    # torch 2.14 calls the first of these, and keeps the second for compatibility.
    names = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    name = next((name for name in names if hasattr(torch.utils.checkpoint, name)), None)
    forward = CheckpointFunction.forward
    if name is None:
        return  # this torch works differently, and _Enter refuses recomputation
    generator = getattr(torch.utils.checkpoint, name)

    def without_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # `_replaying` changes only the recomputation.
        return generator(_replaying(function), *args, **kwargs)

    def with_reentrant(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        once_more = _replaying(function)
        outputs = forward(ctx, function, *args)
        ctx.run_function = once_more
        return outputs

    setattr(torch.utils.checkpoint, name, without_reentrant)
    CheckpointFunction.forward = staticmethod(with_reentrant)  # type: ignore[method-assign]


def _replaying(function: Callable[..., Any]) -> Callable[..., Any]:
    replayed = again()

    def once_more(*args: Any, **kwargs: Any) -> Any:
        with replayed():
            return function(*args, **kwargs)

    return once_more


@contextmanager
def _replayed(then: _Pass) -> Iterator[None]:
    token = _passing.set(then)
    try:
        with then.mode:
            yield
    finally:
        _passing.reset(token)


class _Masks:
    """The masks of the current pass; see random_ops.Mask."""

    def __init__(self, owner: KeyedDropout) -> None:
        self.owner = owner

    def __call__(self, shape: Sequence[int], p: float) -> Tensor:
        return self._now().mask(shape, p)

    def in_kernel(self, device: torch.device) -> AbstractContextManager[None] | None:
        if not self.owner.fused:
            return None
        self.owner.say_fused()
        return accelerator().drawing_by(self._now().seed(), device)

    def _now(self) -> _Pass:
        now = _passing.get()
        assert now is not None
        self.owner.seen()
        return now


class _Interception(TorchFunctionMode):
    """A mode that replaces dropping functions by DRAWS and random functions by RANDOM, and passes on all others."""

    def __init__(self, owner: KeyedDropout) -> None:
        super().__init__()
        self.owner, self.masks = owner, _Masks(owner)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (now := _passing.get()) is None:
            return func(*args, **kwargs)
        draw: Draw | None = DRAWS.get(func) if self.owner.dropping else None
        if draw is not None:
            return draw(func, self.masks, *args, **kwargs)
        random = RANDOM.get(func)
        # Draws from the model's own generator are not replaced.
        if random is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self.owner.seen()
        with now.trace.replaced() if now.trace is not None else nullcontext():
            return random(func, KeyedNumbers(now.numbers, now.rows), *args, **kwargs)


class _Enter:
    """A hook before a module's forward. From then on, draws count as draws of this module."""

    def __init__(self, path: str, sequence_first: bool) -> None:
        self.name, self.path, self.sequence_first = path, crc32(path.encode()), sequence_first
        self.drew = False  # True if the module drew in its last call in a keyed pass

    def __call__(self, _: nn.Module, __: Any) -> None:
        if (now := _passing.get()) is not None:
            caller = now.stack[-1]
            # Count calls within the enclosing call, because a pipeline stage does not see the calls in other stages.
            within = ((caller.number * 1000003) ^ caller.path) & _BITS
            now.calls[within, self.path] = count = now.calls.get((within, self.path), -1) + 1
            call = _Call(self.path, (within * 31 + count) & _BITS, self.sequence_first, hook=self)
            if now.plan is not None and self.name in now.plan.hosts:
                call.outside = Drawn.so_far()
                seed_others(key_of(now.key, call.path, call.number))
            now.stack.append(call)
        elif self.drew and graph_task_id() != -1:
            raise TrainingError(
                f"{self.name or 'The model'} is recomputed in the backward pass, and would draw different random "
                "numbers.",
                numbers="not by torch.utils.checkpoint",
                hint="torch.utils.checkpoint.checkpoint around it; or compute=nbkit.Compute(recompute=True); or "
                "dropout of 0",
            )
        self.drew = False


def _leave(_: nn.Module, __: Any, ___: Any) -> None:
    if (now := _passing.get()) is not None and len(now.stack) > 1:
        if (outside := now.stack.pop().outside) is not None:
            outside.restore()


def _follow(module: nn.Module) -> None:
    """Add the hooks that tell a pass which module draws. They refer to no objects, and do nothing outside of a pass."""
    # A copy of a hooked module has the hooks too, and two sets of hooks would count every call twice.
    unfollow(module)
    sequence_first = tuple(
        f"{path.rpartition('.')[0]}."
        for path, part in module.named_modules()
        if isinstance(part, nn.MultiheadAttention) and not part.batch_first
    )
    for path, part in module.named_modules():
        part.register_forward_pre_hook(_Enter(path, f"{path}.".startswith(sequence_first)), prepend=True)
        # Call `_leave` after an exception too, which ends a pipeline stage, or a recomputation that stops early.
        part.register_forward_hook(_leave, always_call=True)


def _followed(module: nn.Module) -> bool:
    return any(isinstance(hook, _Enter) for hook in module._forward_pre_hooks.values())


def unfollow(module: nn.Module) -> None:
    """Remove the hooks of every KeyedDropout from `module`."""
    for part in module.modules():
        for number in [n for n, hook in part._forward_pre_hooks.items() if isinstance(hook, _Enter)]:
            del part._forward_pre_hooks[number]
        for number in [n for n, hook in part._forward_hooks.items() if hook is _leave]:
            del part._forward_hooks[number]
            part._forward_hooks_always_called.pop(number, None)


def _settings(module: nn.Module) -> list[tuple[Any, str]]:
    """Return (object, attribute) for every attribute that looks like a dropout probability."""
    found: list[tuple[Any, str]] = []
    configs: dict[int, Any] = {}
    for part in module.modules():
        if isinstance(part, DropoutNd):
            found.append((part, "p"))
        found += [(part, name) for name in vars(part) if "drop" in name.lower()]
        configs |= {id(config): config for name in ("config", "cfg", "args") if (config := vars(part).get(name))}
    for config in configs.values():
        found += [(config, name) for name in getattr(config, "__dict__", {}) if "drop" in name.lower()]
    return [(of, name) for of, name in found if type(getattr(of, name)) in (int, float)]


def _positive(of: Any, name: str) -> bool:
    value = getattr(of, name, 0)
    return type(value) in (int, float) and value > 0
