"""A module with shapes and no memory: what a strategy is applied to before any weight is moved.

Every parameter is a scalar seen through zero strides, on the device and of the dtype that it will have. Unlike meta
tensors, factories of optimizers take it for what it will be; buffers, which `__init__` computes, stay real.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.module.parameter_aliases import note_aliases, notes_of, put_aliases, tensors_beside
from nbkit.rank.parallel.module.rebound_functions import parts_of, rebind

T = TypeVar("T", bound=Tensor)


def placeholder(shape: Sequence[int], like: nn.Parameter) -> nn.Parameter:
    """A parameter of `shape` without memory; dtype, device, requires_grad and marks as those of `like`."""
    empty = torch.zeros((), dtype=like.dtype, device=like.device).expand(tuple(shape))
    return parameter_like(empty, like)


def parameter_like(data: Tensor, like: nn.Parameter) -> nn.Parameter:
    """Return a parameter over `data`, trained or frozen as `like` is, with the attributes that were set on `like`."""
    return marked(nn.Parameter(data, requires_grad=like.requires_grad), like)


def marked(tensor: T, like: Tensor) -> T:
    """Return `tensor` with the attributes that were set on `like`, which a model may read: `weight.scale = 2.0`."""
    if like.__dict__:
        tensor.__dict__.update(like.__dict__)
    return tensor


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no memory of its own yet."""
    return tensor.numel() > 1 and not any(tensor.stride())


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return `copy.deepcopy(module, memo)`, with functions that compute with the copy's own parts.

    It takes half the time: most of the dicts that each module has for its hooks are empty, and `copy` takes an empty
    OrderedDict apart as it does a full one.
    Raise TypeError where the copy shares a module, parameter or buffer with `module` that `memo` does not name.
    """
    shared = parts_of(module) - memo.keys()
    for part in module.modules():
        for value in vars(part).values():
            if type(value) is OrderedDict and not value:
                memo.setdefault(id(value), OrderedDict())
        for reference in weakref.getweakrefs(part):
            if type(reference) in (*weakref.ProxyTypes, weakref.WeakMethod):
                memo[id(reference)] = reference  # a copy would be a module of its own, or cannot be made
    for note in notes_of(module):
        memo[id(note)] = {}
    made = copy.deepcopy(module, memo)
    if not shared.isdisjoint(parts_of(made)):
        raise TypeError(_shares(made, shared))
    rebind(made, module, memo)
    note_aliases(made)
    return made


def _shares(made: nn.Module, shared: set[int]) -> str:
    """Return who in the copy `made` has something of the ids `shared`."""
    for path, part in made.named_modules():
        if any(id(each) in shared for each in (part, *part._parameters.values(), *part._buffers.values())):
            while path and not hasattr(type(made.get_submodule(path)), "__deepcopy__"):
                path = path.rpartition(".")[0]
            kind = type(made.get_submodule(path))
            own = ", by a __deepcopy__ of its own" if hasattr(kind, "__deepcopy__") else ""
            return f"a copy of {path or 'the model'}, a {kind.__name__}, shares its parts with it{own}"
    return ""


_AGAIN = "_nbkit_built_again"


def build_again(skeleton: nn.Module, build: Callable[[nn.Module], nn.Module]) -> None:
    """Let `build`, given what the new one is to be like, build the copies of `skeleton`: it cannot be copied."""
    vars(skeleton)[_AGAIN] = build


def skeleton_of(module: nn.Module) -> nn.Module:
    """A copy of `module` whose parameters are placeholders; tied ones stay tied, buffers are copied.

    Also of a skeleton: `copy.deepcopy` of one would give every placeholder memory.
    """
    if (build := vars(module).get(_AGAIN)) is not None:
        made: nn.Module = build(module)
        build_again(made, build)
        return made
    memo: dict[int, Any] = {id(p): placeholder(p.shape, p) for p in module.parameters()}
    for _, tensor in tensors_beside(module):
        if not tensor.is_leaf:
            # A weight that a hook computes before each forward (torch.nn.utils.weight_norm) cannot be copied.
            memo.setdefault(id(tensor), tensor.detach().clone())
    return copied(module, memo)


def hooked_gradient(module: nn.Module) -> str:
    """Name of the first parameter whose gradient somebody's hook changes or looks at, which no copy takes along; ""
    without one. Those of a job are not meant."""
    for name, p in module.named_parameters():
        hooks = [*(p._backward_hooks or {}).values(), *(getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()]
        if any(not str(getattr(hook, "__module__", "")).startswith("nbkit.") for hook in hooks):
            return name
    return ""


def homes(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """name -> every (module, attribute) that holds this parameter; a tied one goes by its first name."""
    first: dict[int, str] = {}
    found: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, part in module.named_modules():
        for attribute, param in part._parameters.items():
            if param is None:
                continue
            name = first.setdefault(id(param), f"{path}.{attribute}" if path else attribute)
            found.setdefault(name, []).append((part, attribute))
    return found


def replace(places: Sequence[tuple[nn.Module, str]], param: nn.Parameter | None) -> None:
    """Put `param` wherever another one was held, in lists too; None leaves an absent parameter there."""
    for part, attribute in places:
        part._parameters[attribute] = param
        put_aliases(part, attribute, param)


_MATRIX = 1 << 20


def window(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, draw: torch.Generator | None = None
) -> Tensor:
    """A tensor of `shape` whose rows differ, with hardly more memory than the sum of its dims. draw: of its numbers.

    One of many small matrices, as of experts, has the memory of one of them.
    """
    if not shape:
        return torch.ones((), dtype=dtype, device=device)
    strides = list(accumulate([1] + [7] * (len(shape) - 1), lambda a, b: a * b))
    if len(shape) == 3 and shape[1] * shape[2] <= _MATRIX:
        # Torch's product of groups of rows takes matrices of experts that overlap, and none whose rows do.
        strides = [16, shape[2], 1]
    size = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True) if length)
    drawn = torch.randn(size, generator=draw) * 0.02 + (1.0 if len(shape) == 1 else 0.0)
    return drawn.to(device, dtype).as_strided(tuple(shape), strides)


def runnable(skeleton: nn.Module) -> nn.Module:
    """A copy of `skeleton` that can be run, forward and backward, with hardly any memory: every parameter is a window
    onto a few random numbers, and its gradient is let go of as soon as it is made. Draws from a generator of its own.
    """
    module, draw = skeleton_of(skeleton), torch.Generator().manual_seed(0)
    for places in homes(module).values():
        old: nn.Parameter = getattr(*places[0])
        param = parameter_like(window(old.shape, old.dtype, old.device, draw), old)
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_let_go)
        replace(places, param)
    return module


def _let_go(param: Tensor) -> None:
    param.grad = None
