"""A limit on the tensors of a training on CPU ranks, which raises as a device without room does.

NBKIT_TENSOR_LIMIT=BYTES, of a rank: what a GPU of that size would hold of weights, gradients, optimizer state and
activations. For tests and for trying out what happens there; it costs time at every operation.
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
    """Within it, an operation that leaves more than `num_bytes` alive raises torch.OutOfMemoryError, once: what cleans
    up behind it allocates on a device's host.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(resized=True)
        self.num_bytes, self._raised = num_bytes, False

    @property
    def left(self) -> int:
        """Bytes that tensors can still take."""
        return max(self.num_bytes - self.now, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = self.now
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.levels = [self.peak]  # a training has no end of operations
        if self.now > max(self.num_bytes, before) and not self._raised:
            self._raised = True
            raise torch.OutOfMemoryError(
                f"CPU rank out of memory. Tried to allocate {(self.now - before) / 1e6:.3g} MB for {func}: "
                f"{before / 1e6:.3g} MB of {self.num_bytes / 1e6:.3g} MB ({VARIABLE}) are in use."
            )
        return out

    @contextmanager
    def counting(self, held: Iterable[Tensor]) -> Iterator[None]:
        """The limit holds inside. held: what there is already; what was counted before is counted once."""
        for tensor in held:
            self._see(tensor, there=True)
        self._raised = False
        with self:
            yield


_in_force: TensorLimit | None = None


def in_force() -> TensorLimit | None:
    """The limit of this rank, as the environment has it now; None without one.

    Raises UsageError for what is no number of bytes.
    """
    global _in_force
    text = os.environ.get(VARIABLE, "")
    if text and not text.isdigit():
        raise UsageError(f"{VARIABLE} is no number of bytes.", numbers=repr(text), hint=f"{VARIABLE}=8000000000")
    if not text:
        _in_force = None
    elif _in_force is None:
        _in_force = TensorLimit(int(text))
    else:
        _in_force.num_bytes = int(text)
    return _in_force


def held_by(sharded_model: ShardedModel, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors that a training holds between two steps, the buffers of its gradients too."""
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
