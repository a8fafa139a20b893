"""Hooks where a backward pass enters a module and where it leaves it.

It needs the parameters from when it comes to any output until the gradients of all inputs are made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.tensor.sharded_tensor import InParts
from nbkit.rank.torch_private import call_of_module, graph_task_id, tree_flatten, tree_unflatten


class _Passage(torch.autograd.Function):
    """Hands tensors on as they are; tells when their gradients come back."""

    @staticmethod
    def forward(ctx: Any, passed: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.passed = passed
        # An input that gets no gradient stays None: zeros would be a gradient.
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.passed()
        return None, *grads


def marked(
    args: tuple[Any, ...], kwargs: dict[str, Any], passed: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The inputs of a module such that `passed` is called when backward has come through it.

    None when no input requires a gradient: backward ends inside then, and nothing tells.
    """
    leaves, structure = tree_flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not at:
        return None
    # What lies in parts over the tensor axis has its graph at the part.
    given = [leaves[i].part if isinstance(leaves[i], InParts) else leaves[i] for i in at]
    for i, tensor in zip(at, _Passage.apply(passed, *given), strict=True):  # type: ignore[no-untyped-call]
        leaves[i] = leaves[i].like(tensor) if isinstance(leaves[i], InParts) else tensor
    result: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, structure)
    return result


def in_backward() -> bool:
    """Whether autograd is at work in this thread: a forward now is the recomputation of a checkpointed one."""
    return graph_task_id() != -1


def is_nested(module: nn.Module) -> bool:
    """Whether a call of `module` runs within another call of it. Walks the stack: for what happens rarely."""
    frame: FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None:
        calls += frame.f_code is call_of_module and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


def awaited(output: Any, wanted: Callable[..., None]) -> bool:
    """Call `wanted` when backward comes to anything in what a module returns; False when it never will."""
    parts = [tensor.part if isinstance(tensor, InParts) else tensor for tensor in _tensors(output)]
    waiting = [tensor for tensor in parts if tensor.requires_grad]
    for tensor in waiting:
        tensor.register_hook(wanted)
        if tensor._base is not None and tensor._base.requires_grad:
            # Changed in place, a view leaves the graph, and its hook with it.
            tensor._base.register_hook(wanted)
    return bool(waiting)


def _tensors(output: Any) -> Iterator[Tensor]:
    """All tensors in what a module returns: nested tuples, lists, dicts, dataclasses, what pytree knows."""
    for leaf in tree_flatten(output)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from _tensors(getattr(leaf, field.name))
