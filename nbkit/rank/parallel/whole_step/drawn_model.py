"""A model with drawn weights, made of its shapes: none is zero, which would hide what is behind it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.module.copies import (
    homes,
    marked,
    parameter_like,
    placeholder,
    replace,
    skeleton_of,
    take_buffers,
)
from nbkit.rank.parallel.proof.unchanged import attributes_kept
from nbkit.rank.parallel.reshard.plain_attributes import plain_attributes, put

_PERIOD = 65521  # a prime, so that no two rows of a matrix get the same numbers


def drawn_model(skeleton: nn.Module, dtype: torch.dtype, *, positive: bool = False) -> nn.Module:
    """A copy of `skeleton` on the CPU, with memory; floating parameters and buffers in `dtype`.

    positive: all weights are above zero. Draws from a generator of its own: another thread may be training.
    """
    return _draw(skeleton_of(skeleton), dtype, positive)


class Reference:
    """The model as its callable built it a second time, which a proof runs as one process does.

    No code that a strategy's copies are made by has touched it. It has memory only while it runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self._one = module, threading.Lock()

    @contextmanager
    def drawn(self, like: nn.Module, dtype: torch.dtype, *, positive: bool = False) -> Iterator[nn.Module]:
        """The model, with the weights of `drawn_model(like)` and what has been changed in the skeleton `like`."""
        with self._one, attributes_kept(self.module):
            put(plain_attributes(like), self.module)
            take_buffers(self.module, like)
            empty = {name: getattr(*places[0]) for name, places in homes(like).items()}
            for name, places in homes(self.module).items():
                replace(places, placeholder(empty[name].shape, empty[name]))
            try:
                yield _draw(self.module, dtype, positive)
            finally:
                for name, places in homes(self.module).items():
                    replace(places, placeholder(empty[name].shape, empty[name]))


def _draw(model: nn.Module, dtype: torch.dtype, positive: bool) -> nn.Module:
    numbers = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0), dtype=torch.float64).repeat(2)
    numbers = (numbers.abs() + 0.01 if positive else numbers).to(dtype)
    start = 0
    for name, places in homes(model).items():
        old: nn.Parameter = getattr(*places[0])
        kind = dtype if old.is_floating_point() else old.dtype
        replace(places, parameter_like(_drawn(old, name, numbers[start:]).to(kind), old))
        start = (start + old.numel()) % _PERIOD
    for part in model.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                # A forward may change them, in the model of which this is one copy of several.
                kind = dtype if buffer.is_floating_point() else buffer.dtype
                part._buffers[name] = marked(buffer.detach().to("cpu", kind, copy=True), buffer)
    return model


def _drawn(old: nn.Parameter, name: str, numbers: Tensor) -> Tensor:
    size = old.numel()
    enough = numbers if size <= _PERIOD else numbers[:_PERIOD].repeat(size // _PERIOD + 1)
    noise = enough[:size].view(old.shape)
    if old.ndim > 1:
        # Sums of as many products stay as large as what goes in.
        return noise / math.sqrt(max(size // max(old.shape[0], 1), 1))
    return 0.2 * noise + (0 if name.endswith("bias") else 1)
