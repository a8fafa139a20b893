"""Selective recomputation: keep the outputs of a block that take long to compute, and compute the rest again.

A block keeps the outputs of matrix products with a weight, of convolutions and of attention kernels, and the results of
collectives. Backward computes everything else again: norms, activations, dropout, rotary positions, casts and sums.
These operations read and write memory, and take little time. No collective runs twice, except in a second backward pass
through the same graph.

Two forms of this are known. Korthikanti et al. (2022) compute the core of attention again, because its scores take most
memory. A fused attention kernel stores no scores, so this would save nothing there. The selective checkpointing of
torchtitan keeps the outputs of matrix products, attention kernels and collectives. nbkit does the same, but computes a
product of two activations again. So attention without a kernel does not keep its scores.

nbkit does not use torch's `create_selective_checkpoint_contexts`, for three reasons. In backward, it would skip nbkit's
collectives, which write their results into their arguments. It raises an error if the model changes a kept output in
place. And it keeps outputs that backward does not read: the last product of a block, and what each rank adds to a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.rank.comm.delegating_group import before_collective
from nbkit.rank.torch_private import active_saved_tensors_hooks, tree_leaves, tree_map_only
from nbkit.rank.watching_mode import WatchingMode

P = ParamSpec("P")
T = TypeVar("T")

_PRODUCTS = {f"aten::{name}" for name in (
    "mm", "addmm", "_addmm_activation", "linear", "convolution", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm",
)}  # fmt: skip
_BATCHED = {"aten::bmm", "aten::baddbmm"}
_AGAIN: Any = object()
"""The value of an output that is no longer there. Its operation runs again."""


@dataclass
class _Output:
    """An output. source: the operation, or the name of the collective. value: the tensors, or a function that makes
    them, or _AGAIN."""

    source: Any
    value: Any


class KeptOutputs:
    """The outputs that one call of a block keeps from its forward pass to its backward pass."""

    def __init__(self) -> None:
        self._outputs: list[_Output] = []

    def record(self, forward: Callable[[], T], tensors: Callable[[T], Iterable[Tensor]]) -> T:
        """Return `forward()`, inside of torch's checkpoint, and keep outputs of its operations.

        tensors: returns the tensors in the result.
        """
        needed, hooks = 0, active_saved_tensors_hooks(False)

        def pack(x: Tensor) -> Any:
            nonlocal needed
            needed = len(self._outputs)
            return hooks[0](x)

        with _Recording(self._outputs) as recording:
            with torch.autograd.graph.saved_tensors_hooks(pack, hooks[1]) if hooks else nullcontext():
                result = forward()
        if hooks:
            # Recomputation ends with the last tensor that is saved for backward.
            for output in self._outputs[needed:]:
                output.value = _AGAIN
        recording.spare(list(tensors(result)))  # the caller may change them in place
        return result

    def replay(self, forward: Callable[[], T]) -> T:
        """Return `forward()`, with the kept outputs in place of the operations that made them.

        Each output is released when it is used. A further backward pass (retain_graph=True) computes all of them.
        """
        with _Replaying(self._outputs):
            return forward()


def kept(collective: Callable[P, T]) -> Callable[P, T]:
    """Wrap a collective so that a selective recomputation does not call it again, but uses its first result.

    The result may be a tensor, or another object. Tensors inside of an object have no gradient, and do not change.
    """

    @wraps(collective)
    def once(*args: P.args, **kwargs: P.kwargs) -> T:
        mode = _mode.get()
        if mode is None:
            return collective(*args, **kwargs)
        result: T = mode.once(collective.__name__, partial(collective, *args, **kwargs))
        return result

    return once


def used_up(x: Tensor) -> None:
    """Note that only a `kept` collective reads `x`, so that recomputation does not need its values."""
    mode = _mode.get()
    if mode is not None:
        mode.use_up(x)


class _SelectiveMode(WatchingMode):
    """Finds the operations whose outputs are kept."""

    supports_higher_order_operators = True

    def __init__(self, outputs: list[_Output]) -> None:
        super().__init__()
        self._outputs = outputs

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._token = _mode.set(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _mode.reset(self._token)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, kind = kwargs or {}, _kind(func)
        if kind == "changes":
            self.spare(_changed(func, args, kwargs))
        elif kind and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            # An operation without a gradient may be missing the second time: a model may cache a table of positions.
            if kind != "batched" or any(map(_is_weight, args[-2:])):
                return self.once(func, partial(func, *args, **kwargs))
        return func(*args, **kwargs)

    def once(self, source: Any, call: Callable[[], Any]) -> Any:
        """Return the result of `call`, now or in the forward pass."""
        raise NotImplementedError

    def use_up(self, x: Tensor) -> None:
        """See `used_up`."""

    def spare(self, changed: Any) -> None:
        """Note that the tensors in `changed` may be about to change."""


_mode: ContextVar[_SelectiveMode | None] = ContextVar("selective", default=None)


class _Recording(_SelectiveMode):
    """Keeps outputs in the forward pass."""

    def __init__(self, outputs: list[_Output]) -> None:
        super().__init__(outputs)
        self._homes: dict[int, _Output] = {}  # a storage that is kept -> the output in it

    def __enter__(self) -> Any:
        self._before = before_collective.set(self.spare)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        before_collective.reset(self._before)

    def once(self, source: Any, call: Callable[[], Any]) -> Any:
        result = call()
        # `.data` has no part in the graph, which refers to this list.
        output = _Output(source, tree_map_only(Tensor, lambda x: x.data, result))
        self._homes |= {storage: output for storage in _storages(result)}
        self._outputs.append(output)
        return result

    def use_up(self, x: Tensor) -> None:
        for storage in _storages(x):
            output = self._homes.pop(storage, None)
            if output is not None and isinstance(made := output.value, Tensor):
                # Nothing reads these numbers. If something did, the loss would show it.
                output.value = partial(torch.full, made.shape, math.nan, dtype=made.dtype, device=made.device)

    def spare(self, changed: Any) -> None:
        for storage in _storages(changed):
            if (output := self._homes.pop(storage, None)) is not None:
                output.value = tree_map_only(Tensor, torch.clone, output.value)


class _Replaying(_SelectiveMode):
    """Returns kept outputs in the backward pass."""

    def __init__(self, outputs: list[_Output]) -> None:
        super().__init__(outputs)
        self._at = 0

    def once(self, source: Any, call: Callable[[], Any]) -> Any:
        number, self._at = self._at, self._at + 1
        output = self._outputs[number] if number < len(self._outputs) else _Output(None, None)
        if output.source != source:
            raise TrainingError(
                "A block ran other operations when it was recomputed for the backward pass.",
                numbers=f"operation {number + 1} was {output.source}, and is {source}",
                hint="compute=nbkit.Compute(recompute=True); or recompute=False",
            )
        value, output.value = output.value, _AGAIN
        return call() if value is _AGAIN else value() if isinstance(value, partial) else value


@cache
def _kind(func: Any) -> str:
    """Return "product", "batched" (a product of two batches of matrices), "changes" (its arguments), or ""."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ""
    if schema.is_mutable or func.namespace == "c10d":
        return "changes"
    if schema.name in _BATCHED:
        return "batched"
    kernel = ("attention" in schema.name or "attn" in schema.name) and "backward" not in schema.name
    return "product" if schema.name in _PRODUCTS or kernel else ""


def _changed(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation writes into."""
    every = func.namespace == "c10d"  # torch's collectives do not say it
    return [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if every or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


def _is_weight(x: Any) -> bool:
    """Return True if `x` is a parameter, or a view or cast of one. Activations come from several tensors."""
    node = x.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return x.is_leaf or (node is not None and not node.next_functions)


def _storages(value: Any) -> Iterator[int]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            yield leaf.untyped_storage()._cdata
