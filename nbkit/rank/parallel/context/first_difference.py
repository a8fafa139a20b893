"""Compares what is computed on all positions with what parts of them give; and says which call differs first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nbkit.rank.parallel.proof.calls import watched
from nbkit.rank.parallel.proof.compare import gap
from nbkit.rank.parallel.tensor.collectives import together
from nbkit.rank.torch_private import tree_leaves
from nbkit.tensor_layout import Parting, contiguous, count

_SEEN = 1e-7


def joined(whole: Tensor, parts: Sequence[Tensor], parting: Parting = contiguous) -> tuple[int | None, Tensor]:
    """(dim of positions, the parts put together along it); (None, their mean) where each has the shape of `whole`: of
    its gradient, each is given a share. parting: what each part holds.

    Raises ValueError where they do not make up `whole`.
    """
    shapes = [part.shape for part in parts]
    if all(shape == whole.shape for shape in shapes):
        return None, torch.stack(list(parts)).mean(0) if whole.requires_grad else parts[0]
    for dim in range(whole.ndim):
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes if len(shape) == whole.ndim}
        same = rest == {(*whole.shape[:dim], *whole.shape[dim + 1 :])}
        if not same or sum(shape[dim] for shape in shapes) != whole.shape[dim]:
            continue
        if parting is contiguous:
            return dim, torch.cat(list(parts), dim)
        total, size = whole.shape[dim], len(parts)
        if [shape[dim] for shape in shapes] == [count(parting(total, size, i)) for i in range(size)]:
            return dim, together(parts, dim, total, parting)
    raise ValueError(f"{tuple(whole.shape)} is not made up of {', '.join(str(tuple(shape)) for shape in shapes)}")


class Trace:
    """What each call of a torch function gave while a block ran, in each of several threads."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._inside = threading.local()

    def around(self, forward: Callable[..., Any], log: Callable[[], list[Any]]) -> Callable[..., Any]:
        """`forward`, which appends (call, module, tensors that it gave) to log()."""

        @wraps(forward)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with self._hooks(), _Recording(log(), self._path):
                return forward(*args, **kwargs)

        return traced

    def _path(self) -> str:
        stack = getattr(self._inside, "stack", [])
        return stack[-1] if stack else ""

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        thread = threading.get_ident()
        self._inside.stack = []

        def enter(name: str, *_: Any) -> None:
            if name and threading.get_ident() == thread:
                self._inside.stack.append(name)

        def leave(name: str, *_: Any) -> None:
            if name and threading.get_ident() == thread and self._inside.stack:
                self._inside.stack.pop()

        with watched(self.block, enter, leave):
            yield


class _Recording(TorchFunctionMode):
    def __init__(self, log: list[Any], path: Callable[[], str]) -> None:
        super().__init__()
        self._log, self._path = log, path

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        path, result = self._path(), func(*args, **(kwargs or {}))
        tensors = [leaf.detach().clone() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if tensors:
            self._log.append((getattr(func, "__name__", str(func)), path, tensors))
        return result


def first_difference(
    whole: Sequence[Any], parts: Sequence[Sequence[Any]], parting: Parting = contiguous
) -> tuple[str, str] | None:
    """(call, path of its module) of the first call of which the parts do not give the whole, or that they do not
    make; from logs of a Trace. None where all do. parting: what each part holds."""
    for i, (name, path, tensors) in enumerate(whole):
        if any(len(part) <= i for part in parts):
            return _spelled(name), path
        others = [part[i] for part in parts]
        if any(other[0] != name or len(other[2]) != len(tensors) for other in others):
            return _spelled(name), path
        for j, tensor in enumerate(tensors):
            given = [other[2][j] for other in others]
            try:
                rule, put = joined(tensor, given, parting)
            except ValueError:
                return _spelled(name), path
            if any(gap(tensor, each) > _SEEN for each in (given if rule is None else [put])):
                return _spelled(name), path
    return None


def _spelled(name: str) -> str:
    return "x[...]" if name == "__getitem__" else name.strip("_")
