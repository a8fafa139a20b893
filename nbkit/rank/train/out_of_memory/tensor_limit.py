"""Limit the bytes of a training's tensors on CPU ranks, and raise the error of a device that is out of memory.

NBKIT_TENSOR_LIMIT=BYTES (per rank) imitates a GPU with so much memory for weights, gradients, optimizer state and
activations. It is for tests and experiments. It makes every operation slower.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nbkit.errors import UsageError
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.estimate.model_trace import LiveBytes

VARIABLE = "NBKIT_TENSOR_LIMIT"


class TensorLimit(LiveBytes):
    """A dispatch mode that raises torch.OutOfMemoryError when live tensors exceed `num_bytes`.

    It raises only once, so that the cleanup after the error can allocate.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(resized=True)
        self.num_bytes, self._raised = num_bytes, False

    @property
    def left(self) -> int:
        """The bytes that can still be allocated."""
        return max(self.num_bytes - self.now, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = self.now
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.levels = [self.peak]  # keep only one level, because a training has too many operations
        if self.now > max(self.num_bytes, before) and not self._raised:
            self._raised = True
            raise torch.OutOfMemoryError(
                f"CPU rank out of memory. Tried to allocate {(self.now - before) / 1e6:.3g} MB for {func}: "
                f"{before / 1e6:.3g} MB of {self.num_bytes / 1e6:.3g} MB ({VARIABLE}) are in use."
            )
        return out

    @contextmanager
    def counting(self, held: Iterable[Tensor]) -> Iterator[None]:
        """Apply the limit inside. held: tensors that exist already. Each tensor counts only once."""
        for tensor in held:
            self._see(tensor, there=True)
        self._raised = False
        with self:
            yield


_in_force: TensorLimit | None = None


def in_force() -> TensorLimit | None:
    """Return the limit that the environment sets for this rank now, or None.

    Raises UsageError for a value that is not a number of bytes.
    """
    global _in_force
    text = os.environ.get(VARIABLE, "")
    if text and not text.isdigit():
        raise UsageError(f"{VARIABLE} is not a number of bytes.", numbers=repr(text), hint=f"{VARIABLE}=8000000000")
    if not text:
        _in_force = None
    elif _in_force is None:
        _in_force = TensorLimit(int(text))
    else:
        _in_force.num_bytes = int(text)
    return _in_force


def held_by(sharded_model: ShardedModel, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of a training between two steps, including gradient buffers."""
    yield from sharded_model.module.parameters()
    yield from sharded_model.module.buffers()
    for values in list(optimizer.state.values()):
        yield from (value for value in values.values() if isinstance(value, Tensor))
    seen, ahead = set[int](), [sharded_model.data]
    while ahead:
        thing: Any = ahead.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, dict | list | tuple) or type(thing).__module__.startswith("nbkit.rank.parallel"):
            ahead += gc.get_referents(thing)
