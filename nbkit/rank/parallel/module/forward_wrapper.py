"""Run code around the forward of a user's module, and remove it again.

A wrapper is stored in the module itself, as its attribute `forward`. The class does not change, because a forward may
count its calls in the class, use it to look up a registry, or call `super(type(self), self)`. A wrapper is an object,
not a closure over the original: a deep copy of the module must use its own weights, and functions are not copied.

Activation checkpointing (Chen et al. 2016): a block keeps only its inputs, and is computed again in backward.
Everything else on which the computation depends is as it was the first time: extents, the positions of a context split,
dropout (keyed, so it has the same mask), and torch's generators. The recomputation may run in any thread. A selective
recomputation repeats only a part of the block: see kept_outputs.py.

Only `forward` is replaced, so names, hooks and signatures do not change. This determines the order of composition.
Changes for tensor and context parallelism come first, so that their collectives are recomputed too. Ranks of a group
recompute the same blocks in the same order. (A selective recomputation runs no collectives in the first backward pass.)
Hooks that gather a block's shards come last, on the block itself. They run once per forward and once before its
backward. The recomputation in between finds the parameters whole.

Hooks can also be called where a backward pass enters a module and where it leaves it. Backward needs the parameters
from the time when it reaches any output until the gradients of all inputs are computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar, copy_context
from dataclasses import fields, is_dataclass
from functools import partial, update_wrapper
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nbkit.errors import StrategyError
from nbkit.rank.parallel.module.kept_outputs import KeptOutputs
from nbkit.rank.parallel.tensor.sharded_tensor import ShardedTensor
from nbkit.rank.rng.keyed_dropout import again
from nbkit.rank.torch_private import call_of_module, graph_task_id, tree_flatten, tree_unflatten

_MARK = "_nbkit_parts_of"


class Wrapper:
    """An object that becomes a module's `forward`. plain: the previous forward, whose name and signature it has.

    encloses: True if only `plain` can be recomputed, because the wrapper is part of a larger computation.
    """

    encloses: ClassVar[bool] = False

    def __init__(self, plain: Callable[..., Any]) -> None:
        # Do not copy the attributes of another wrapper.
        update_wrapper(self, plain, updated=() if isinstance(plain, Wrapper) else ("__dict__",))
        self.plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def wrap(module: nn.Module, wrapper: Wrapper) -> None:
    """Make `wrapper` the forward of `module`. Raise StrategyError if the class prevents it."""
    vars(module)["forward"] = wrapper
    if module.forward is not wrapper:
        del vars(module)["forward"]
        raise StrategyError(
            f"The class {type(module).__name__} computes its attribute forward, so nbkit cannot replace it.",
            numbers="forward is a property, or the class has its own __getattribute__",
            hint="def forward(self, ...) in the class; or strategy='ddp'",
        )


def wrapped_by(module: nn.Module, kind: type[Wrapper]) -> bool:
    """Return True if a wrapper of `kind` is around the forward of `module`."""
    return any(isinstance(wrapper, kind) for wrapper in _wrappers(module))


def _wrappers(module: nn.Module) -> Iterator[Wrapper]:
    """Yield the wrappers of the forward of `module`, the outermost first."""
    forward = vars(module).get("forward")
    while isinstance(forward, Wrapper):
        yield forward
        forward = forward.plain


def unwrap(module: nn.Module) -> None:
    """Remove every Wrapper from `module` and its submodules, in place."""
    for part in module.modules():
        while isinstance(wrapper := vars(part).get("forward"), Wrapper):
            if getattr(wrapper.plain, "__func__", None) is type(part).forward:
                del part.forward
            else:
                part.forward = wrapper.plain  # type: ignore[method-assign]


def overrides_train(module: nn.Module) -> bool:
    """Return True if a part of `module` has its own `train()`, which may do more than set modes."""
    return any(type(part).train is not nn.Module.train or "train" in vars(part) for part in module.modules())


def mark_parts(module: nn.Module, strategy: str) -> None:
    """Mark `module` and its submodules: `strategy` left only a part of each on this rank. Copies keep the mark."""
    for part in module.modules():
        vars(part)[_MARK] = strategy


def refuse_copies(module: nn.Module, strategy: str) -> None:
    """Make `module` and its submodules raise an error if a part of the weights would be used as the whole.

    This concerns `model.state_dict()`, `copy.deepcopy(model)`, an AveragedModel and `torch.save(model)`.
    """
    methods = {name: _OfParts(name, strategy) for name in ("state_dict", "__deepcopy__", "__reduce_ex__")}
    for part in module.modules():
        vars(part).update(methods)


class _OfParts:
    """Replaces a method of a module."""

    def __init__(self, method: str, strategy: str) -> None:
        self._method, self._strategy = method, strategy

    def __call__(self, *_: Any, **__: Any) -> Any:
        is_state = self._method == "state_dict"
        raise StrategyError(
            f"{'state_dict()' if is_state else 'A copy'} of the model would contain only this rank's part of the "
            f"weights, because {self._strategy} splits them over the ranks.",
            numbers="" if is_state else "by copy.deepcopy" if self._method == "__deepcopy__" else "by pickle",
            hint="trainer.full_state_dict() or job.full_state_dict(), on every rank, returns all weights"
            + ("" if is_state else "; load it into a new model"),
        )


def marked_parts(module: nn.Module) -> str | None:
    """Return the strategy that left only a part of a tensor in `module`, or None if everything is whole."""
    return next((vars(part)[_MARK] for part in module.modules() if _MARK in vars(part)), None)


def recompute(module: nn.Module, blocks: Iterable[str], *, selective: bool = False) -> None:
    """Make the named blocks keep no activations between forward and backward. In place.

    selective: keep those that take long to compute. A second call can change this for the following forward passes.
    """
    for name in blocks:
        block = module.get_submodule(name)
        if (before := next((each for each in _wrappers(block) if isinstance(each, _Forgetful)), None)) is not None:
            before.selective = selective
        elif (outer := next((each for each in _wrappers(block) if each.encloses), None)) is not None:
            outer.plain = _Forgetful(outer.plain, selective)
        else:
            block.forward = _Forgetful(block.forward, selective)  # type: ignore[method-assign]


def repeats_collectives(module: nn.Module) -> bool:
    """Return True if the backward pass of `module` computes all of its forward again, with the collectives in it."""
    return any(isinstance(each, _Forgetful) and not each.selective for each in _wrappers(module))


def forgetting(compute: Callable[..., Any]) -> Wrapper:
    """Return a function that computes the same, keeps only its arguments, and recomputes in the backward pass."""
    return _Forgetful(compute, selective=False)


_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


def recomputing() -> bool:
    """Return True in a forward that recomputes a block because of `recompute`, not of the model's own checkpointing."""
    return in_backward() and _recomputing.get()


class _Forgetful(Wrapper):
    """Computes the same, keeps only its arguments, and recomputes in the backward pass."""

    def __init__(self, plain: Callable[..., Any], selective: bool) -> None:
        super().__init__(plain)
        self.selective = selective

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.plain
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        surroundings, replayed, first = copy_context(), again(), True
        outputs = KeptOutputs() if self.selective else None

        def compute(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            run = partial(forward, *args, **kwargs)
            if first:
                first = False
                return run() if outputs is None else outputs.record(run, _parts)

            def once_more() -> Any:
                _recomputing.set(True)
                with replayed():
                    return run() if outputs is None else outputs.replay(run)

            # Use a copy: backward may run this more than once (retain_graph), and only one thread can enter a context
            # at a time.
            return surroundings.copy().run(once_more)

        return checkpoint(compute, *args, use_reentrant=False, **kwargs)


class _Passage(torch.autograd.Function):
    """Passes tensors on unchanged, and reports when their gradients arrive."""

    @staticmethod
    def forward(ctx: Any, passed: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.passed = passed
        # An input without a gradient stays None. Zeros would count as a gradient.
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.passed()
        return None, *grads


def marked(
    args: tuple[Any, ...], kwargs: dict[str, Any], passed: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the inputs of a module, changed so that `passed` is called when backward has left the module.

    Return None if no input requires a gradient. Then backward ends inside the module, and nothing reports it.
    """
    leaves, structure = tree_flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not at:
        return None
    # A tensor that is split over the tensor axis has its graph at its part.
    given = [leaves[i].part if isinstance(leaves[i], ShardedTensor) else leaves[i] for i in at]
    for i, tensor in zip(at, _Passage.apply(passed, *given), strict=True):  # type: ignore[no-untyped-call]
        leaves[i] = leaves[i].like(tensor) if isinstance(leaves[i], ShardedTensor) else tensor
    result: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, structure)
    return result


def in_backward() -> bool:
    """Return True if autograd runs in this thread. Then a forward is the recomputation of a checkpointed block."""
    return graph_task_id() != -1


def is_nested(module: nn.Module) -> bool:
    """Return True if a call of `module` runs inside another call of it. It walks the stack, so call it rarely."""
    frame: FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None:
        calls += frame.f_code is call_of_module and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


def awaited(output: Any, wanted: Callable[..., None]) -> bool:
    """Call `wanted` when backward reaches any output tensor of a module. Return False if it never will."""
    waiting = [tensor for tensor in _parts(output) if tensor.requires_grad]
    for tensor in waiting:
        tensor.register_hook(wanted)
        if tensor._base is not None and tensor._base.requires_grad:
            # If a view is changed in place, the view leaves the graph together with its hook.
            tensor._base.register_hook(wanted)
    return bool(waiting)


def _parts(output: Any) -> Iterator[Tensor]:
    """Yield all tensors in the output of a module; of those that are split, this rank's part."""
    for tensor in _tensors(output):
        yield tensor.part if isinstance(tensor, ShardedTensor) else tensor


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield all tensors in the output of a module: in nested tuples, lists, dicts, dataclasses, and pytrees."""
    for leaf in tree_flatten(output)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from _tensors(getattr(leaf, field.name))
